"""The settings of agents that work on tasks, which grpo takes besides its own (see config.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finetune.knobs import knob


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Which tasks, which agent program, and what it may use."""

    tasks: list[str] = knob(
        [],
        help="tasks for agents instead of --data: folders of task folders, lists of them, or builtin:desk; their own"
        " verifiers give the rewards",
    )
    eval_tasks: list[str] = knob([], help="held-out tasks, beside --tasks", advanced=True)
    harness: Literal["loop", "mini", "opencode", "command"] = knob(
        "loop", help="what works on tasks: our tool loop, mini-swe-agent, OpenCode, or any program"
    )
    harness_program: str | None = knob(
        None,
        help="where it lies: opencode's executable, mini's virtual environment, or what command's box has as /opt/agent",
        identity=False,
        advanced=True,
    )
    harness_command: list[str] = knob(
        [],
        help="program and arguments of harness command; one that begins with - as --harness-command=-x",
        advanced=True,
    )
    harness_agent: str | None = knob(
        None, help="agent of opencode; none: tiny, which suits small models", advanced=True
    )
    harness_config: str | None = knob(
        None, help="file of settings in the harness's own form (opencode, mini)", advanced=True
    )
    harness_denied: list[str] = knob(
        [], help="patterns of shell commands that opencode refuses", advanced=True
    )
    max_agent_steps: int = knob(
        20,
        at_least=1,
        at_most=10_000,
        help="answers of the policy in one rollout of an agent at most",
        advanced=True,
    )
    tool_timeout: float = knob(
        30.0, above=0, help="seconds that one command of an agent may take", advanced=True
    )
    agents: int = knob(
        8, at_least=1, at_most=1024, help="agents that work at once", advanced=True, identity=False
    )
    agent_retries: int = knob(
        1,
        at_least=0,
        at_most=10,
        help="times that a rollout lost to a crash, a box, a server or a verifier is tried again",
        advanced=True,
    )
    box: Literal["bubblewrap", "container", "process"] = knob(
        "bubblewrap",
        help="what agents and their verifiers run in; process isolates nothing",
        advanced=True,
        identity=False,
    )
