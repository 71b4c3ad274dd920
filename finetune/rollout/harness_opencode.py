"""The harness `opencode`: OpenCode's one executable in a box, without network, with an agent that suits small contexts.

Rule: everything it reads comes from one file that we write; nothing is fetched, and no folder of a task changes how it works.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.boxes.launching import Limits
from finetune.boxes.process import Box
from finetune.errors import FinetuneError
from finetune.rollout.bridge import HELPER, POLICY, Session
from finetune.rollout.harness_program import (
    HarnessOutcome,
    HarnessSettings,
    Program,
    needed_path,
    run_program,
)

TINY = "tiny"
_TINY_PROMPT = "You solve the task with the bash tool. Stop when it is done."
_BUILTIN_AGENTS = ("build", "plan", "general", "explore")
_PROGRAM, _CONFIG = "/opt/opencode", "/opt/opencode-config"
# The token is in the environment alone: the file must be readable by the box's user, and so by all others.
_TOKEN = "FINETUNE_TOKEN"
_PROCESSES = 256  # its threads count too
_ENVIRONMENT = {
    "NO_COLOR": "1",
    "OPENCODE_CONFIG": f"{_CONFIG}/opencode.json",
    **{
        f"OPENCODE_{name}": "1"
        for name in (
            "DISABLE_PROJECT_CONFIG",
            "PURE",  # a plugin folder in a workspace would hang it without a network
            "DISABLE_MODELS_FETCH",
            "DISABLE_AUTOUPDATE",
            "DISABLE_LSP_DOWNLOAD",
            "DISABLE_DEFAULT_PLUGINS",
            "DISABLE_EXTERNAL_SKILLS",
            "DISABLE_CLAUDE_CODE",
        )
    },
}


@dataclass(frozen=True)
class OpencodeHarness:
    """settings.program: the executable (bin/opencode of the npm package of the platform); agent: tiny, or one of config.

    config: an opencode.json of the user's, for agents, prompts and tools; provider, models and what would need a network
    are ours.
    """

    settings: HarnessSettings
    name: str = "opencode"
    # The summary that it shows in a list of sessions, and the title; the summary of a compaction is the policy's own work.
    helper_prompts: tuple[str, ...] = (
        r"^You are a title generator\b",
        r"^Summarize what was done in this conversation\b",
    )

    def check(self) -> None:
        needed_path(self.settings.program, "opencode")
        self._own_config()

    def run(
        self, task_prompt: str, workspace: Path, session: Session, box: Box, limits: Limits
    ) -> HarnessOutcome:
        program = needed_path(self.settings.program, "opencode")
        with tempfile.TemporaryDirectory(prefix="finetune-opencode-") as name:
            folder = Path(name)
            folder.chmod(0o755)
            (folder / "opencode.json").write_text(json.dumps(self.config()))
            (folder / "opencode.json").chmod(0o644)
            # The task comes by stdin: words of the command line would reach the policy in quotes.
            command = [_PROGRAM, "run", "--agent", self._agent, "--title", "task"]
            reads = {_PROGRAM: program, _CONFIG: folder}
            environment = _ENVIRONMENT | {_TOKEN: session.token}
            run = Program(command, environment, reads, task_prompt.encode())
            # Bun reserves far more memory than it uses, and unpacks a library of its own under /tmp.
            processes = None if limits.processes is None else max(limits.processes, _PROCESSES)
            roomy = replace(limits, memory_bytes=None, processes=processes)
            return run_program(run, workspace, session, box, roomy, lambda result: _is_used_up(self, session))

    @property
    def _agent(self) -> str:
        return self.settings.agent or TINY

    def config(self) -> dict[str, Any]:
        """Return the file that opencode reads; raises bad_value for a file of the user's that cannot be read."""
        settings, own = self.settings, self._own_config()
        given: dict[str, Any] = {name: {} for name in (*_BUILTIN_AGENTS, TINY)} | own.get("agent", {})
        tiny = {
            "mode": "primary",
            "description": "Works with the shell alone",
            "prompt": _TINY_PROMPT,
            "tools": {"*": False, "bash": True},
        }
        given[TINY] = tiny | given[TINY]
        agents = {name: self._bounded(agent) for name, agent in given.items()}
        limit = {"context": settings.context, "output": settings.max_new_tokens}
        models = {name: {"name": name, "tool_call": True, "limit": limit} for name in (POLICY, HELPER)}
        options = {"baseURL": "{env:FINETUNE_ENDPOINT}/v1", "apiKey": f"{{env:{_TOKEN}}}"}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": models}
        return {
            **own,
            "$schema": "https://opencode.ai/config.json",
            "model": f"local/{POLICY}",
            "small_model": f"local/{HELPER}",
            "enabled_providers": ["local"],
            "provider": {"local": provider},
            "agent": agents,
            "default_agent": self._agent,
            "permission": self._permission({"*": "allow", **own.get("permission", {})}),
            # A refused command is told to the policy; it does not end the work.
            "experimental": {"continue_loop_on_deny": True},
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "lsp": False,
            "formatter": False,
        }

    def _bounded(self, agent: dict[str, Any]) -> dict[str, Any]:
        """Return an agent with the budget of steps, unless it has one, and without the commands that are denied."""
        permission = self._permission(agent.get("permission", {}))
        return {"steps": self.settings.max_steps, **agent, "permission": permission}

    def _permission(self, permission: dict[str, Any]) -> dict[str, Any]:
        """Return permissions in which the denied commands come last, which decides; an agent's own stand above all others."""
        denied = dict.fromkeys(self.settings.denied, "deny")
        if not denied:
            return permission
        shell = permission.get("bash", "allow")
        return permission | {"bash": {**(shell if isinstance(shell, dict) else {"*": shell}), **denied}}

    def _own_config(self) -> dict[str, Any]:
        path = self.settings.config
        if path is None:
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FinetuneError(
                "bad_value", f"{path}: no opencode.json: {error}", setting="harness"
            ) from error
        if not isinstance(value, dict):
            raise FinetuneError("bad_value", f"{path}: no JSON object", setting="harness")
        return value


def _is_used_up(harness: OpencodeHarness, session: Session) -> bool:
    """Whether it came to the step at which opencode tells the policy to use no more tools."""
    return session.num_calls >= harness.settings.max_steps
