"""Whether tasks can be trusted with a run: what the oracle's work and no work are worth, and what an agent could find.

Rule: a task that pays for nothing, or does not pay for the right thing, or shows its verifier, is named before a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.boxes.folders import make_folder, sealed_copy
from finetune.boxes.launching import Limits
from finetune.boxes.process import Box, new_workspace
from finetune.data.task_files import hidden_files
from finetune.domains.tasks import Task, TaskScore, prepare_workspace, verify
from finetune.errors import FinetuneError

# Looks through all that a box shows for files of the content that is to be hidden, and for the real folders. Of the
# system and of Python (hundreds of thousands of files) it reads those alone that bear the name of a hidden file.
_SEARCH = """
import hashlib, json, os, sys
told = json.loads(sys.stdin.read())
found = {path: path for path in told["paths"] if os.path.exists(path)}
names, sizes = set(told["names"]), set(told["sizes"])
folders = ["/"] if told["walks"] else []
while folders:
    folder = folders.pop()
    is_system = folder.startswith(("/usr", "/opt/python"))
    try:
        entries = list(os.scandir(folder))
    except OSError:
        continue
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if entry.path not in ("/proc", "/sys", "/dev"):
                    folders.append(entry.path)
            elif is_system and entry.name not in names:
                continue
            elif entry.is_file(follow_symlinks=False) and entry.stat().st_size in sizes:
                with open(entry.path, "rb") as file:
                    digest = hashlib.sha256(file.read()).hexdigest()
                if digest in told["digests"]:
                    found[digest] = entry.path
        except OSError:
            continue
print(json.dumps(found))
"""


@dataclass(frozen=True)
class TaskCheck:
    """What a check found: the worth of the oracle's work and of none, and what is wrong, a sentence each.

    Beside those of TaskScore there are two more statuses: setup and oracle, where setup.sh or solve.sh failed.
    """

    task: Task
    oracle: TaskScore
    idle: TaskScore
    problems: tuple[str, ...]
    seconds: float


def check_tasks(tasks: Sequence[Task], box: Box) -> list[TaskCheck]:
    """Solve each task by its oracle and by doing nothing, and look in an agent's box for verifiers and oracles."""
    visible = _visible(tasks, box)
    checks = []
    for task in tasks:
        began = time.monotonic()
        oracle, idle = _worth(task, box, is_solved=True), _worth(task, box, is_solved=False)
        problems = [*_wrong_with(oracle, 1.0, "the oracle's work"), *_wrong_with(idle, 0.0, "doing nothing")]
        problems += visible[task.name]
        checks.append(TaskCheck(task, oracle, idle, tuple(problems), time.monotonic() - began))
    return checks


def _wrong_with(score: TaskScore, wanted: float, what: str) -> list[str]:
    if score.status != "scored":
        end = score.log.strip()[-400:]
        return [f"{what} got no reward (status {score.status}): {end}"]
    return [] if score.reward == wanted else [f"{what} is worth {score.reward:g} and should be {wanted:g}"]


def _worth(task: Task, box: Box, is_solved: bool) -> TaskScore:
    with new_workspace({}) as workspace:
        try:
            prepare_workspace(task, workspace, box)
        except FinetuneError as error:
            return TaskScore(None, {}, "sandbox" if error.code == "no_sandbox" else "setup", error.message)
        if is_solved:
            with new_workspace({}) as apart:
                sealed_copy(task.folder / "oracle", apart / "oracle")
                reads = {"/oracle": apart / "oracle"}
                result = box.run(["sh", "/oracle/solve.sh"], workspace, task.limits, reads=reads)
            if result.exit_code != 0:
                how = result.over_limit or f"exit code {result.exit_code}"
                return TaskScore(None, {}, "oracle", f"solve.sh failed ({how}): {result.stderr[-400:]}")
        return verify(task, workspace, box)


def _visible(tasks: Sequence[Task], box: Box) -> dict[str, list[str]]:
    """Return task -> what of its verifier and oracle an agent's box shows. What its environment holds as well is meant."""
    given = {
        _digest(path) for task in tasks for path in (task.folder / "environment").rglob("*") if path.is_file()
    }
    hidden = {path: task.name for task in tasks for path in hidden_files(task.folder) if path.stat().st_size}
    owners = {_digest(path): name for path, name in hidden.items()}
    owners = {digest: name for digest, name in owners.items() if digest not in given}
    paths = {str(task.folder / name): task.name for task in tasks for name in ("verifier", "oracle")}
    told = {
        "paths": list(paths),
        "names": [path.name for path in hidden],
        "sizes": [path.stat().st_size for path in hidden],
        "digests": list(owners),
        "walks": box.isolates,  # else it would be all of this machine
    }
    with new_workspace({}) as workspace, new_workspace({}) as apart:
        reads = {}
        for task in tasks:
            place = apart / task.name
            make_folder(place)
            with contextlib.suppress(FinetuneError):  # told of the task itself
                prepare_workspace(task, place, box)
            reads[f"/tasks/{task.name}"] = place
        limits = replace(Limits(), seconds=120.0, memory_bytes=None, output_bytes=1 << 22)
        command = [box.python, "-I", "-S", "-c", _SEARCH]
        result = box.run(command, workspace, limits, stdin=json.dumps(told).encode(), reads=reads)
    if result.exit_code != 0:
        raise FinetuneError("no_sandbox", f"looking through a box failed: {result.stderr.strip()[-500:]}")
    found: dict[str, list[str]] = {task.name: [] for task in tasks}
    for key, place in json.loads(result.stdout).items():
        name = owners.get(key) or paths[key]
        found[name].append(f"the agent's box shows what is to be hidden: {place}")
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
