"""Reading a run from outside: state, progress, health, logs. A reader writes nothing, and believes files and pids only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.environment import scrub_text, secret_values
from agent.folder import RunFolder, read_document
from agent.health import health
from agent.plan import home
from agent.states import judged
from finetune.errors import FinetuneError
from finetune.records import read_lines, write_atomically

_TAIL_BYTES = 256_000
_WINDOW = 20  # steps that a mean is of
_ENDS = 5  # steps of which a first and a last reward are the mean
_SHOWN_ELSEWHERE = (
    "step num_steps loss eval_loss learning_rate grad_norm tokens_per_s peak_memory_bytes step_s"
).split()


class Tail:
    """Reads the lines that were added to a JSONL file since the last look; a file that was replaced is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = (path.stat().st_ino, path.stat().st_size) if path.exists() else (0, 0)

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            content = file.read()
        whole = content.rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.split(b"\n") if line.strip()]


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects at the end of a JSONL file."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    whole = lines[:-1] if size <= _TAIL_BYTES else lines[1:-1]
    return [json.loads(line) for line in whole if line.strip()]


def read_state(folder: RunFolder, host: str) -> dict[str, Any]:
    """Return the state of a run as it must be judged now; raise FinetuneError(run_missing) where there is no run."""
    state = read_document(folder.state, "state")
    if state is None:
        raise FinetuneError(
            "run_missing", f"{folder.path} is no run folder: it has no state.json", run=str(folder.path)
        )
    return judged(state, folder, host)


def heartbeats(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the last sign of life of each rank: rank, step, operation, seconds ago."""
    beats = []
    for path in sorted((folder.path / "heartbeat").glob("rank*")):
        if path.suffix:
            continue
        try:
            beat = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        age = round(max(0.0, time.time() - beat["time"]), 1)
        beats.append(
            {
                "rank": beat["rank"],
                "step": beat["step"],
                "operation": beat["operation"],
                "pid": beat["pid"],
                "age_s": age,
            }
        )
    return sorted(beats, key=lambda beat: int(beat["rank"]))


def warnings_of(folder: RunFolder, since: float = 0.0) -> list[tuple[str, str]]:
    """Return the warnings that training wrote into events.jsonl."""
    events = [event for event in read_lines(folder.path / "events.jsonl") if event["time"] >= since]
    return [(event["code"], event["text"]) for event in events if event["kind"] == "warning"]


def resumed_from(folder: RunFolder, since: float) -> int | None:
    """Return the step from which the attempt that began at `since` went on; None where it began anew."""
    events = [
        event
        for event in read_lines(folder.path / "events.jsonl")
        if event["kind"] == "resumed" and event["time"] >= since
    ]
    return int(events[-1]["step"]) if events else None


def progress(folder: RunFolder) -> dict[str, Any]:
    """Return the figures of the last steps: loss, speed, memory and the time that is left."""
    lines = last_lines(folder.metrics)
    if not lines:
        return {"step": 0, "num_steps": None}
    last, recent = lines[-1], lines[-_WINDOW:]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    evaluated = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None]
    seconds = [line["step_s"] for line in recent if line.get("step_s") is not None]
    left = max(0, (last.get("num_steps") or last["step"]) - last["step"])
    return {
        "step": last["step"],
        "num_steps": last.get("num_steps"),
        "loss": {
            "last": last.get("loss"),
            "mean": _mean(losses[-_WINDOW:]),
            "lowest": min(losses, default=None),
        },
        "eval_loss": evaluated[-1] if evaluated else None,
        "learning_rate": last.get("learning_rate"),
        "grad_norm": last.get("grad_norm"),
        "tokens_per_s": _mean(
            [line["tokens_per_s"] for line in recent if line.get("tokens_per_s") is not None]
        ),
        "peak_memory_bytes": last.get("peak_memory_bytes"),
        "eta_s": round(left * (_mean(seconds) or 0.0), 1) if seconds else None,
        "health": health(lines),
    } | _of_rollouts(lines)


def _of_rollouts(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how the reward goes, and every other number of the last step; nothing for a method without rewards."""
    rewards = [line["reward_mean"] for line in lines if line.get("reward_mean") is not None]
    if not rewards:
        return {}
    figures = {
        name: value
        for name, value in lines[-1].items()
        if isinstance(value, int | float) and name not in _SHOWN_ELSEWHERE
    }
    reward = {"last": rewards[-1], "mean": _mean(rewards[-_WINDOW:]), "highest": max(rewards)}
    return {"reward": reward, "figures": figures}


def reward_course(folder: RunFolder) -> dict[str, float | None] | None:
    """Return the mean reward of the first and of the last steps of a run; None where its method has no rewards."""
    rewards = [
        line["reward_mean"] for line in read_lines(folder.metrics) if line.get("reward_mean") is not None
    ]
    return {"first": _mean(rewards[:_ENDS]), "last": _mean(rewards[-_ENDS:])} if rewards else None


def _mean(values: list[float]) -> float | None:
    return round(math.fsum(values) / len(values), 6) if values else None


def poll_seconds(eta_s: float | None) -> int:
    """Return after how many seconds another look is worth it."""
    return int(min(60.0, max(5.0, (eta_s or 0.0) / 4)))


def log_files(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.logs.glob("*.log"))


def log_lines(folder: RunFolder, name: str, environ: Mapping[str, str]) -> list[str]:
    """Return the lines of one log, without secrets; raise FinetuneError(file_missing) naming those that exist."""
    known = log_files(folder)
    if name not in known:
        raise FinetuneError(
            "file_missing",
            f"{folder.logs / name} is not there; there are: {', '.join(known) or 'none'}",
            files=known,
        )
    text = (folder.logs / name).read_bytes().decode("utf-8", "replace")
    return scrub_text(text.replace("\r\n", "\n").replace("\r", "\n"), secret_values(environ)).split("\n")


def remember_run(run_id: str, run_dir: Path, environ: Mapping[str, str]) -> None:
    """Put a run into the index of this user's runs, one file each."""
    write_atomically(
        home(environ) / "runs" / f"{run_id}.json", json.dumps({"run_id": run_id, "run_dir": str(run_dir)})
    )


def known_runs(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the runs of the index whose folders still are there, newest first."""
    runs = []
    for path in (home(environ) / "runs").glob("*.json"):
        entry = _entry(path)
        if entry is None:
            continue
        with contextlib.suppress(OSError):  # gone, or another user's
            changed = RunFolder(Path(entry["run_dir"])).state.stat().st_mtime
            runs.append(entry | {"changed": changed})
    return sorted(runs, key=lambda entry: entry["changed"], reverse=True)


def _entry(path: Path) -> dict[str, Any] | None:
    """Return an entry of the index; None where it is missing or damaged, which costs that entry alone."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return entry if isinstance(entry["run_dir"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_run(name: str, cwd: Path, environ: Mapping[str, str]) -> RunFolder:
    """Return the run that a path or a run id names; raise FinetuneError(run_missing)."""
    folder = Path(os.path.abspath(cwd / os.path.expanduser(name)))
    if os.path.isdir(folder):
        return RunFolder(folder)
    entry = _entry(home(environ) / "runs" / f"{os.path.basename(name)}.json")
    if "/" not in name and entry:
        return RunFolder(Path(entry["run_dir"]))
    raise FinetuneError(
        "run_missing",
        f"{name}: neither a run folder nor the id of a run; `finetune list` shows them",
        run=name,
    )
