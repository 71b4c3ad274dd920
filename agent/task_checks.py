"""The verb `tasks check`: are these tasks fit to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.render import Answer
from agent.request import absolute
from agent.runner import Context
from finetune.boxes.bubblewrap import open_box
from finetune.data.task_files import BUILTIN
from finetune.domains.task_checking import TaskCheck, check_tasks
from finetune.domains.tasks import load_tasks
from finetune.errors import FinetuneError


def check(spec: str, box_name: str, context: Context) -> Answer:
    """Check each task of `spec` in boxes of this kind: its oracle is worth 1, doing nothing 0, its verifier hidden.

    Answers with an error task_check_failed for each task that is not fit. Raises Problems where a folder is no task, and
    no_sandbox where the box does not work here.
    """
    tasks = load_tasks(spec if spec.startswith(BUILTIN) else absolute(spec, context.cwd))
    box = _opened(box_name)
    checks = check_tasks(tasks, box)
    errors = [
        FinetuneError("task_check_failed", f"{item.task.name}: {problem}", task=item.task.name)
        for item in checks
        for problem in item.problems
    ]
    num_bad = sum(bool(item.problems) for item in checks)
    text = f"{len(checks)} tasks in box {box.name}: {len(checks) - num_bad} fit, {num_bad} not"
    data = {"box": box.name, "box_isolates": box.isolates, "tasks": [_row(item) for item in checks]}
    return Answer("tasks", "failed" if errors else "done", text, data=data, errors=errors, pages="tasks")


def _opened(name: str) -> Any:
    try:
        return open_box(name)
    except FinetuneError as error:
        if error.code == "bad_value":
            raise FinetuneError("bad_value", error.message, setting="box") from error
        raise


def _row(item: TaskCheck) -> dict[str, Any]:
    task = item.task
    return {
        "name": task.name,
        "folder": str(Path(task.folder)),
        "digest": task.digest,
        "problem_digest": task.problem,
        "oracle": {"status": item.oracle.status, "reward": item.oracle.reward, "parts": item.oracle.parts},
        "idle": {"status": item.idle.status, "reward": item.idle.reward},
        "problems": list(item.problems),
        "seconds": round(item.seconds, 2),
    }
