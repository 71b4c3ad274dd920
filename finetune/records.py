"""The dataclasses that flow between parts, and the Journal through which a run tells what it does.

Everything written here is strict JSON: a number that is not finite becomes null, and its name is listed beside it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row as it was read: its columns, and where it stands."""

    values: dict[str, Any]
    file: str
    line: int  # 1-based line of a text file, 1-based record of a table

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Example:
    """One row as tokens. weights[t] is the loss weight of input_ids[t] as a target (0 = not learned); weights[0] is 0."""

    input_ids: list[int]
    weights: list[float]
    row: int  # index of the row in the order read, over all files
    file: str
    line: int

    @property
    def num_supervised(self) -> int:
        return sum(weight > 0 for weight in self.weights)


@dataclass
class Ledger:
    """Where every row went: read = trained + held_out + sum(dropped); truncated rows are among the trained."""

    read: int = 0
    trained: int = 0
    held_out: int = 0
    dropped: dict[str, list[str]] = field(default_factory=dict)  # reason -> places ("file:line")
    truncated: dict[str, list[str]] = field(default_factory=dict)  # prompt | answer -> places
    notes: dict[str, int] = field(default_factory=dict)  # counted facts, e.g. reasoning_dropped, duplicates

    def drop(self, reason: str, row: Row) -> None:
        self.dropped.setdefault(reason, []).append(row.place)

    def note(self, name: str, count: int = 1) -> None:
        self.notes[name] = self.notes.get(name, 0) + count

    @property
    def num_dropped(self) -> int:
        return sum(len(places) for places in self.dropped.values())

    @property
    def balances(self) -> bool:
        return self.read == self.trained + self.held_out + self.num_dropped


@dataclass(frozen=True)
class EvalResult:
    """A policy on held-out rows. scores[i] is the verifier's score of row i, None where it could not score."""

    loss: float | None  # mean over supervised tokens of all rows
    num_tokens: int
    num_rows: int
    accuracy: float | None = None  # mean of the scores that are not None
    scores: list[float | None] = field(default_factory=list)
    row_losses: list[float] = field(default_factory=list)  # mean nll of each row
    sampled_accuracy: float | None = None  # grpo: of answers at the training's temperature


@dataclass(frozen=True)
class TrainResult:
    """What a finished (or stopped) training reports; the runner copies it into run.json."""

    status: str  # succeeded | stopped
    steps: int
    train_loss: float | None
    eval_before: dict[str, Any] | None
    eval_after: dict[str, Any] | None
    lift: dict[str, Any] | None
    facts: dict[str, Any]  # parallel kind, parameter bytes per rank, peak memory per rank, tokens/s, ...


def jsonable(value: Any) -> Any:
    """Return `value` as strict JSON values: dataclasses to dicts, numpy to numbers and lists, NaN and infinity to None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    value = _without_numpy(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _without_numpy(value: Any) -> Any:
    """Return numpy's numbers and arrays as Python's. Looked up, not imported: where numpy is not loaded there are none."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return value
    if isinstance(value, numpy.generic):
        return value.item()
    return value.tolist() if isinstance(value, numpy.ndarray) else value


def to_json(value: dict[str, Any], indent: int | None = None) -> str:
    """Return strict JSON; the names of top-level numbers that were not finite are listed under "non_finite"."""
    plain = {name: _without_numpy(item) for name, item in value.items()}
    lost = [name for name, item in plain.items() if isinstance(item, float) and not math.isfinite(item)]
    clean = jsonable(value) | ({"non_finite": lost} if lost else {})
    return json.dumps(clean, ensure_ascii=False, allow_nan=False, indent=indent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a whole file or none: a temporary name beside it, fsync, rename, fsync of the folder. Text is UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~current_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def folder_written_whole(target: Path) -> Iterator[Path]:
    """Give a temporary folder beside `target` that takes its name when the block ends well, and vanishes otherwise.

    Raises OSError where `target` exists by then and is not empty.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                # safetensors makes files that their owner alone can read
                os.chmod(path, 0o666 & ~current_umask())
            sync_folder(path)
        os.chmod(temporary, 0o777 & ~current_umask())
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Wait until a folder's names (or a file's bytes) are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file that this program wrote; a half-written last line is left out.

    Split at line feeds only: U+2028 and the like may stand inside a JSON string.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]


class Journal:
    """Where a rank writes what happens: events and metrics (rank 0 alone) and its own heartbeat."""

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self.run_dir = Path(run_dir)
        self.rank = rank
        (self.run_dir / "heartbeat").mkdir(parents=True, exist_ok=True)
        self._step = 0

    def event(self, kind: str, **facts: Any) -> None:
        if self.rank == 0:
            self._append("events.jsonl", {"time": time.time(), "kind": kind, **facts})

    def metrics(self, step: int, **values: Any) -> None:
        if self.rank == 0:
            self._append("metrics.jsonl", {"step": step, **values})

    def heartbeat(self, operation: str, step: int | None = None, **facts: Any) -> None:
        """Say what this rank is doing now; the file is replaced whole, so a reader never sees half of it."""
        self._step = self._step if step is None else step
        beat = {
            "rank": self.rank,
            "step": self._step,
            "operation": operation,
            "time": time.time(),
            "pid": os.getpid(),
            **facts,
        }
        path = self.run_dir / "heartbeat" / f"rank{self.rank}"
        temporary = path.with_name(f".{path.name}.{threading.get_ident()}")  # several threads may sample
        temporary.write_text(to_json(beat))
        os.replace(temporary, path)

    def rewind(self, step: int) -> None:
        """Forget the metrics of steps after `step`, which a resumed run makes again, and mend a half-written last line."""
        if self.rank != 0:
            return
        path = self.run_dir / "metrics.jsonl"
        kept = [to_json(line) for line in read_lines(path) if line["step"] <= step]
        write_atomically(path, "".join(line + "\n" for line in kept))
        events = self.run_dir / "events.jsonl"
        if events.exists():
            write_atomically(events, "".join(to_json(line) + "\n" for line in read_lines(events)))

    def _append(self, name: str, value: dict[str, Any]) -> None:
        with open(self.run_dir / name, "a", encoding="utf-8") as file:
            file.write(to_json(value) + "\n")


class StopFlag:
    """Set by SIGTERM or SIGINT, which may come more than once; the step under way is finished first."""

    def __init__(self) -> None:
        self.is_set = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, number: int, frame: Any) -> None:
        self.is_set = True
