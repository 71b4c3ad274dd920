"""Tasks for agents: which there are, the workspace that an agent gets, and what its work is worth.

Rule: verifier and oracle never lie in an agent's box; what the agent left is judged in a fresh box on a sealed copy; and a
reward is what the verifier said, or none: nothing that went wrong becomes a zero.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.boxes.bubblewrap import open_box
from finetune.boxes.folders import TooLarge, encodable, lay_over, make_folder, sealed_copy
from finetune.boxes.launching import BoxResult, Limits
from finetune.boxes.process import Box, new_workspace
from finetune.data.task_files import SETUP, Program, TaskFile, read_task, task_folders
from finetune.errors import FinetuneError, Problems

_JUDGE = Path(__file__).with_name("task_judge.py")
_LOG_BYTES = 20_000
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)  # of what float() reads
# No module of the workspace is imported by a verifier's Python in place of one of Python's own.
_JUDGE_ENVIRONMENT = {
    "WORKSPACE": "/workspace",
    "VERIFIER": "/verifier",
    "PROGRAMS": "/programs",
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
}


@dataclass(frozen=True)
class Task:
    """digest: of all its files; problem: of what the agent sees (prompt and environment), by which tasks are kept apart.

    limits are those of the agent's box: seconds is timeout_s.
    """

    name: str
    folder: Path
    digest: str
    problem: str
    prompt: str
    timeout_s: float
    verifier_timeout_s: float
    limits: Limits
    max_steps: int | None
    script: str
    reward: str
    programs: tuple[Program, ...] = ()


@dataclass(frozen=True)
class TaskScore:
    """What work is worth: reward is None where status is not scored.

    status: scored; verifier (it failed, or told no proper reward); timeout (of the verifier); limit (the workspace is too
    large to be judged); sandbox (no box could be set up).
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    status: str = "scored"
    log: str = ""


def load_tasks(spec: str) -> list[Task]:
    """Return the tasks that `spec` names: a folder of task folders, one task folder, builtin:desk, or a list.

    A list is a text file with a spec a line (relative to its folder), or builtin:desk/NAME; # begins a comment. Raises
    Problems with all that is wrong with any of them (bad_task, file_missing).
    """
    found: list[Task] = []
    errors: list[FinetuneError] = []
    for folder in task_folders(spec):
        read = read_task(folder)
        if isinstance(read, list):
            errors += read
        else:
            found.append(_task(read))
    seen: dict[str, Task] = {}
    for task in found:
        same = seen.setdefault(task.name, task)
        if same is not task:
            text = f"{task.folder}: another task is called {task.name} too: {same.folder}"
            errors.append(FinetuneError("bad_task", text, task=task.name))
    if errors:
        raise Problems(errors)
    return found


def _task(file: TaskFile) -> Task:
    numbers, resources = file.numbers, file.resources
    limits = Limits(
        seconds=float(numbers["timeout_s"]),
        cpu_seconds=resources["cpu_s"],
        memory_bytes=None,  # of one process: programs that reserve much would not start
        processes=resources["processes"],
        file_bytes=resources["file_mb"] << 20,
        total_memory_bytes=resources["memory_mb"] << 20,
        workspace_bytes=resources["workspace_mb"] << 20,
    )
    return Task(
        file.folder.name,
        file.folder,
        file.digest,
        file.problem,
        file.prompt,
        float(numbers["timeout_s"]),
        float(numbers["verifier_timeout_s"]),
        limits,
        numbers["max_steps"],
        file.script,
        file.reward,
        file.programs,
    )


def require_apart(train: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Raise task_overlap where a held-out task asks what a training task asks: the same prompt on the same files.

    Names, timeouts and verifiers make no difference.
    """
    trained = {task.problem: task.name for task in train}
    shared = [(trained[task.problem], task.name) for task in held_out if task.problem in trained]
    if shared:
        shown = ", ".join(f"{name} is {other}" for other, name in shared[:5])
        text = f"{len(shared)} held-out tasks are trained on as well (held out {shown} of the training tasks)"
        raise FinetuneError("task_overlap", text, shared=shared)


def prepare_workspace(task: Task, folder: Path, box: Box | None = None) -> None:
    """Fill an empty folder with the task's environment, and run its setup.sh there in a box (default: bubblewrap).

    setup.sh itself is not left in the folder. Raises bad_task where it fails, and no_sandbox.
    """
    environment = task.folder / "environment"
    if environment.is_dir():
        sealed_copy(environment, folder)
    (folder / SETUP).unlink(missing_ok=True)
    if (environment / SETUP).is_file():
        with new_workspace({SETUP: (environment / SETUP).read_bytes()}, folder.parent) as apart:
            (apart / SETUP).chmod(0o644)
            limits = replace(task.limits, seconds=task.verifier_timeout_s)
            command = ["sh", f"/{SETUP}"]
            result = (box or open_box()).run(command, folder, limits, reads={f"/{SETUP}": apart / SETUP})
        if result.exit_code != 0:
            how = result.over_limit or f"exit code {result.exit_code}"
            text = f"{environment / SETUP} failed ({how}): {result.stderr.strip()[-500:]}"
            raise FinetuneError("bad_task", text, task=task.name)


def verify(task: Task, workspace: Path, box: Box) -> TaskScore:
    """Return what the work in `workspace` is worth; no process may write to it any more. It is not changed.

    Programs of the agent that the task names are run first, each in a box of its own; a verifier that runs code of the
    agent itself has it in its own box, where that code may meddle with the verdict. What is judged lies beside the
    workspace meanwhile.
    """
    limits = replace(task.limits, seconds=task.verifier_timeout_s)
    place = workspace.parent
    with new_workspace({}, place) as sealed, new_workspace({}, place) as apart:
        try:
            notes = sealed_copy(workspace, sealed, task.limits.workspace_bytes)
            sealed_copy(task.folder / "verifier", apart / "verifier")
            _run_programs(task, sealed, apart, box)
            told = {"script": f"/verifier/{task.script}", "is_shell": task.script.endswith(".sh")}
            command = [box.python, "-I", "-S", "-B", "-c", _JUDGE.read_text(), json.dumps(told)]
            reads = {"/verifier": apart / "verifier", "/programs": apart / "programs"}
            result = box.run(command, sealed, limits, _JUDGE_ENVIRONMENT, reads=reads)
        except TooLarge as error:
            return TaskScore(None, {}, "limit", f"the workspace cannot be judged: {error}")
        except FinetuneError as error:
            if error.code != "no_sandbox":
                raise
            return TaskScore(None, {}, "sandbox", error.message)
    log = result.stderr[-_LOG_BYTES:] + "".join(f"left out of what is judged: {note}\n" for note in notes)
    return _scored(task, result, log)


def _run_programs(task: Task, sealed: Path, apart: Path, box: Box) -> None:
    """Run the agent's programs and keep what they print under programs/NAME: stdout, stderr, and exit_code (or the limit)."""
    make_folder(apart / "programs")
    for program in task.programs:
        with new_workspace({}, sealed.parent) as folder:
            sealed_copy(sealed, folder)
            if program.files is not None:
                lay_over(apart / "verifier" / program.files, folder)
            given = b"" if program.stdin is None else (apart / "verifier" / program.stdin).read_bytes()
            limits = replace(task.limits, seconds=program.timeout_s)
            result = box.run(["sh", "-c", program.command], folder, limits, stdin=given)
        ended = result.over_limit or str(result.exit_code)
        place = apart / "programs" / program.name
        make_folder(place)
        for name, text in {"stdout": result.stdout, "stderr": result.stderr, "exit_code": ended}.items():
            (place / name).write_text(text)
            (place / name).chmod(0o644)


class _NoReward(Exception):
    """A verifier told no proper reward."""


def _scored(task: Task, result: BoxResult, log: str) -> TaskScore:
    if result.over_limit == "time":
        return TaskScore(None, {}, "timeout", f"{log}the verifier took over {task.verifier_timeout_s:g} s\n")
    try:
        if result.over_limit is not None or result.exit_code != 0:
            raise _NoReward(f"the verifier ended with {result.over_limit or result.exit_code}")
        found = _verdict(result.stdout)
        reward, parts = _of_script(task, found) if "exit_code" in found else _of_tests(task, found["tests"])
    except _NoReward as error:
        return TaskScore(None, {}, "verifier", encodable(f"{log}no reward: {error}\n"))
    return TaskScore(reward, {encodable(name): part for name, part in parts.items()}, "scored", log)


def _verdict(text: str) -> dict[str, Any]:
    """Return what the judge printed; raises where code that a verifier runs has printed something else in its place."""
    match found := _json(text, "what the verifier's box printed"):
        case {"exit_code": int(), "files": {"reward.txt": str() | None, "reward.json": str() | None}}:
            return found
        case {"tests": dict(tests)} if all(isinstance(is_passed, bool) for is_passed in tests.values()):
            return found
    raise _NoReward(f"the verifier's box printed no verdict: {text[:200]}")


def _of_tests(task: Task, tests: dict[str, bool]) -> tuple[float, dict[str, float]]:
    if not tests:
        raise _NoReward("test_outputs.py has no function test_*")
    parts = {name: float(is_passed) for name, is_passed in tests.items()}
    share = math.fsum(parts.values()) / len(parts)
    return (share if task.reward == "share_of_tests" else float(share == 1.0)), parts


def _of_script(task: Task, found: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """A script that ends with another code than 0 or 1 has failed, whatever it wrote before."""
    code, text, as_json = found["exit_code"], found["files"]["reward.txt"], found["files"]["reward.json"]
    if code not in (0, 1):
        raise _NoReward(f"test.sh ended with {code}; 0 and 1 are verdicts, all else is a failure")
    if task.reward == "exit_code":
        if text is not None or as_json is not None:
            raise _NoReward("test.sh wrote a reward file, but the task says that its exit code is the reward")
        return 1.0 - code, {}
    if as_json is not None:
        return _of_json(_json(as_json, "reward.json"))
    if text is None:
        raise _NoReward(f"test.sh wrote neither reward.txt nor reward.json (exit code {code})")
    if _NUMBER.fullmatch(text) is None:
        raise _NoReward(f"reward.txt holds no number: {text[:100]!r}")
    return _number(float(text), "reward.txt"), {}


def _of_json(value: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(value, dict):
        return _number(value, "reward.json"), {}
    if "reward" not in value:
        raise _NoReward("reward.json has no key reward")
    parts = {name: _number(part, f"reward.json: {name}") for name, part in value.items() if name != "reward"}
    return _number(value["reward"], "reward.json: reward"), parts


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _NoReward(f"{where} is no JSON: {error}") from error


def _number(value: Any, where: str) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer past all floats
        pass
    raise _NoReward(f"{where}: {str(value)[:100]!r} is no finite number")
