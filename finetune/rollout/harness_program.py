"""What every harness gives back, and how an agent program is run in a box against the endpoint of its rollout.

Rule: how a rollout ended is one of STATUSES, told from what the box, the endpoint and the program say; never a guess
from the program's output alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from finetune.boxes.launching import BoxResult, Limits
from finetune.boxes.process import Box
from finetune.errors import FinetuneError
from finetune.rollout.bridge import POLICY, Session

Status = Literal["finished", "step_limit", "timeout", "crashed", "sandbox", "server"]
LOG_CHARACTERS = 20_000


@dataclass(frozen=True)
class HarnessOutcome:
    """How an agent ended.

    finished: by itself; step_limit: it used up its calls or its context; timeout: the time of the box; crashed: the
    program failed, or asked the policy nothing; sandbox: the box could not run it; server: the engine had no answer.
    steps: policy calls that were answered.
    """

    status: Status
    exit_code: int | None
    log: str
    steps: int


@dataclass(frozen=True)
class HarnessSettings:
    """What harnesses are made with; each reads what it needs.

    program: where an agent program lies (opencode: its executable; mini: the folder of a virtual environment; command: a
    file or folder that its box sees as /opt/agent). command: argv of `command`. agent, config: of the agent program: the
    name of an agent, and a file of the user's own. denied: patterns of shell commands that opencode refuses.
    """

    context: int
    max_new_tokens: int
    max_steps: int = 20
    program: Path | None = None
    command: tuple[str, ...] = ()
    agent: str | None = None
    config: Path | None = None
    denied: tuple[str, ...] = ()
    tool_timeout_s: float = 30.0


class Harness(Protocol):
    """A way to have the policy work on a task. helper_prompts: patterns of system prompts of calls that only serve display."""

    @property
    def name(self) -> str: ...

    @property
    def helper_prompts(self) -> tuple[str, ...]: ...

    def check(self) -> None:
        """Raise missing_package or bad_value where what the settings name is not there."""
        ...

    def run(
        self, task_prompt: str, workspace: Path, session: Session, box: Box, limits: Limits
    ) -> HarnessOutcome:
        """Work on the task in the workspace until the agent ends or the limits do. The calling thread must outlive it."""
        ...


@dataclass(frozen=True)
class Program:
    """An agent program: how it is called, and what it finds in its box."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, Path] = field(default_factory=dict)
    stdin: bytes = b""


def endpoint_environment(session: Session) -> dict[str, str]:
    """Return the variables by which programs find an OpenAI-compatible endpoint."""
    names = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
    return dict.fromkeys(names, session.url) | {"OPENAI_API_KEY": session.token, "OPENAI_MODEL": POLICY}


def run_program(
    program: Program,
    workspace: Path,
    session: Session,
    box: Box,
    limits: Limits,
    is_step_limit: Callable[[BoxResult], bool] = lambda result: False,
) -> HarnessOutcome:
    """Run an agent program in a box and say how it ended; is_step_limit: whether it says that its own budget was used up."""
    try:
        result = box.run(
            program.command,
            workspace,
            limits,
            program.environment,
            program.stdin,
            endpoint=session.socket,
            reads=program.reads,
        )
    except FinetuneError as error:
        if error.code != "no_sandbox":
            raise
        return HarnessOutcome("sandbox", None, error.message[-LOG_CHARACTERS:], session.num_calls)
    status, reason = _ending(result, session, is_step_limit)
    log = f"{result.stdout}\n{result.stderr}".strip()[-LOG_CHARACTERS:]
    return HarnessOutcome(status, result.exit_code, f"{log}\n{reason}".strip(), session.num_calls)


def _ending(
    result: BoxResult, session: Session, is_step_limit: Callable[[BoxResult], bool]
) -> tuple[Status, str]:
    """Return the status and why. What was done to the program comes first: it explains how the program itself ended."""
    if (fault := session.fault) is not None:  # some programs ask again until their time is over
        return "server", f"the engine had no answer: {fault}"
    if result.timed_out:
        return "timeout", ""
    if session.is_over_limit or is_step_limit(result):
        return "step_limit", "the calls of this rollout were used up"
    if session.is_out_of_context:
        return "step_limit", "the conversation no longer fitted the context"
    if result.over_limit is not None:
        return "crashed", f"ended for its limit of {result.over_limit}"
    if result.exit_code != 0:
        killed = f", {result.killed_by}" if result.killed_by else ""
        return "crashed", f"exit code {result.exit_code}{killed}"
    if session.num_calls == 0:
        return "crashed", "the program asked the policy nothing"
    return "finished", ""


def needed_path(path: Path | None, what: str) -> Path:
    """Return the path of a program's setting; raises missing_package where nothing is there."""
    if path is None or not path.exists():
        where = "its place is not given" if path is None else f"{path}: nothing is there"
        raise FinetuneError("missing_package", f"{what}: {where}", setting="harness")
    return path.resolve()
