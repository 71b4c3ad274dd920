"""The harness `mini`: mini-swe-agent in a box, from a virtual environment of its own, with short prompts for small models.

Rule: it runs under the box's Python, so its environment must have been made for the same version.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.boxes.launching import BoxResult, Limits
from finetune.boxes.process import Box
from finetune.errors import FinetuneError
from finetune.rollout.bridge import POLICY, Session
from finetune.rollout.harness_program import (
    HarnessOutcome,
    HarnessSettings,
    Program,
    endpoint_environment,
    needed_path,
    run_program,
)

_PACKAGES, _CONFIG = "/opt/mini", "/opt/mini-config"
_SAID = "finetune-exit-status:"
# Runs the agent, and says in the last line how it ended by its own account. Its record stays outside of the workspace.
_RUN = f"""
import json, os, subprocess, sys, tempfile
record = os.path.join(tempfile.mkdtemp(), "trajectory.json")
code = subprocess.run([sys.executable, "-m", "minisweagent.run.mini", *sys.argv[1:], "-o", record]).returncode
try:
    status = json.load(open(record))["info"]["exit_status"]
except (OSError, ValueError, KeyError, TypeError):
    status = None
print("\\n{_SAID} %s" % status, flush=True)
sys.exit(code)
"""


@dataclass(frozen=True)
class MiniHarness:
    """settings.program: the folder of the virtual environment; config: a file of mini's own form, instead of ours."""

    settings: HarnessSettings
    name: str = "mini"
    helper_prompts: tuple[str, ...] = ()

    def check(self) -> None:
        _packages(needed_path(self.settings.program, "mini-swe-agent"))
        if self.settings.config is not None:
            needed_path(self.settings.config, "the settings of mini-swe-agent")

    def run(
        self, task_prompt: str, workspace: Path, session: Session, box: Box, limits: Limits
    ) -> HarnessOutcome:
        packages = _packages(needed_path(self.settings.program, "mini-swe-agent"))
        with tempfile.TemporaryDirectory(prefix="finetune-mini-") as name:
            folder = Path(name)
            folder.chmod(0o755)
            own = self.settings.config
            text = own.read_text(encoding="utf-8") if own else json.dumps(self.config())  # JSON is YAML
            (folder / "mini.yaml").write_text(text, encoding="utf-8")
            (folder / "mini.yaml").chmod(0o644)
            arguments = ["-y", "--exit-immediately", "-m", f"openai/{POLICY}", "-c", f"{_CONFIG}/mini.yaml"]
            command = [box.python, "-c", _RUN, *arguments, "-t", task_prompt]
            environment = endpoint_environment(session) | {
                "PYTHONPATH": _PACKAGES,
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_SILENT_STARTUP": "1",
                "NO_COLOR": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            }
            program = Program(command, environment, {_PACKAGES: packages, _CONFIG: folder})
            return run_program(program, workspace, session, box, limits, _is_used_up)

    def config(self) -> dict[str, Any]:
        """Return the agent's settings: prompts of a few words, and its budget of calls."""
        return {
            "agent": {
                "system_template": "You solve tasks with the bash tool.",
                "instance_template": "{{task}}\n\nWhen it is done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
                "step_limit": self.settings.max_steps,
                "cost_limit": 0,
                "mode": "yolo",
            },
            "environment": {"timeout": int(self.settings.tool_timeout_s)},
            "model": {"model_kwargs": {"drop_params": True}},
        }


def _packages(environment: Path) -> Path:
    """Return the packages of a virtual environment; raises missing_package where mini is not among them."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = environment / "lib" / version / "site-packages"
    if not (found / "minisweagent").is_dir():
        text = f"mini-swe-agent: {found}: it is not installed there; {version} is what boxes run"
        raise FinetuneError("missing_package", text, setting="harness")
    return found


def _is_used_up(result: BoxResult) -> bool:
    said = [line for line in result.stdout.splitlines() if line.startswith(_SAID)]
    return bool(said) and said[-1].removeprefix(_SAID).strip() in ("LimitsExceeded", "TimeExceeded")
