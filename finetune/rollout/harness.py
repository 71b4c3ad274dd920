"""The harnesses by name: loop (our own), mini (mini-swe-agent), opencode, and command (any program that is given).

Rule: what an agent program finds is an OpenAI-compatible endpoint and the task, whatever program it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finetune.boxes.launching import Limits
from finetune.boxes.process import Box
from finetune.errors import FinetuneError
from finetune.rollout.bridge import Session
from finetune.rollout.harness_loop import LoopHarness
from finetune.rollout.harness_mini import MiniHarness
from finetune.rollout.harness_opencode import OpencodeHarness
from finetune.rollout.harness_program import (
    Harness,
    HarnessOutcome,
    HarnessSettings,
    Program,
    endpoint_environment,
    needed_path,
    run_program,
)

__all__ = ["HARNESSES", "Harness", "HarnessOutcome", "HarnessSettings", "open_harness"]
_PROGRAM = "/opt/agent"


@dataclass(frozen=True)
class CommandHarness:
    """Any program, given OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and the task in TASK_PROMPT and on stdin.

    settings.command: its argv; settings.program, if given, is what the box has as /opt/agent.
    """

    settings: HarnessSettings
    name: str = "command"
    helper_prompts: tuple[str, ...] = ()

    def check(self) -> None:
        if not self.settings.command:
            raise FinetuneError("bad_value", "the harness command needs the command", setting="harness")
        if self.settings.program is not None:
            needed_path(self.settings.program, "the program of the harness command")

    def run(
        self, task_prompt: str, workspace: Path, session: Session, box: Box, limits: Limits
    ) -> HarnessOutcome:
        self.check()
        environment = endpoint_environment(session) | {
            "TASK_PROMPT": task_prompt,
            "MAX_STEPS": str(self.settings.max_steps),
        }
        reads = {}
        if self.settings.program is not None:
            reads[_PROGRAM] = needed_path(self.settings.program, "the program of the harness command")
        program = Program(self.settings.command, environment, reads, task_prompt.encode())
        return run_program(program, workspace, session, box, limits)


HARNESSES: dict[str, Callable[[HarnessSettings], Harness]] = {
    "loop": LoopHarness,
    "mini": MiniHarness,
    "opencode": OpencodeHarness,
    "command": CommandHarness,
}


def open_harness(name: str, settings: HarnessSettings) -> Harness:
    """Return the harness of this name; raises bad_value for another name."""
    if name not in HARNESSES:
        text = f"harness: {name}: no such harness; there are {', '.join(HARNESSES)}"
        raise FinetuneError("bad_value", text, setting="harness")
    return HARNESSES[name](settings)
