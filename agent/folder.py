"""The run folder: its files, its lock, and the documents in it.

A document is whole or absent, free of secrets, and checked against its schema when it is written and when it is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from agent.environment import scrub
from finetune.errors import FinetuneError
from finetune.records import to_json, write_atomically

SCHEMA_VERSION = "1"
SCHEMAS = Path(__file__).with_name("schemas")
_FIRST_FREE = 3  # below it a child's own streams would take the lock's place


@dataclass(frozen=True)
class RunFolder:
    """The places in a run folder."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def stop_request(self) -> Path:
        return self.path / ".stop"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def start_request(self) -> Path:
        return self.path / ".start.json"

    @property
    def supervisor_log(self) -> Path:
        return self.logs / "supervisor.log"

    def last_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint; its manifest is written last."""
        found = [path.parent for path in (self.path / "checkpoints").glob("step-*/manifest.json")]
        return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)

    def num_bytes(self) -> int:
        """Return the bytes of all files in the folder; those that vanish meanwhile are left out."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    def tell(self, kind: str, **facts: Any) -> None:
        """Append an event; training appends its own to the same file, each a line in one write."""
        line = to_json(scrub({"time": time.time(), "kind": kind, **facts})) + "\n"
        handle = os.open(self.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


def new_run_id(method: str) -> str:
    """Return an id that no other run has, however many start in the same second."""
    return f"{method}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


@contextlib.contextmanager
def locked(folder: RunFolder, wait_s: float = 1.0) -> Iterator[int | None]:
    """Hold the lock of a run folder and yield its file descriptor, which a child may inherit; None where it is taken.

    A reader that looks whether the folder is locked holds the lock for an instant, hence the short wait.
    """
    handle = _open_lock(folder, wait_s)
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def _open_lock(folder: RunFolder, wait_s: float) -> int | None:
    end = time.monotonic() + wait_s
    while True:
        folder.path.mkdir(parents=True, exist_ok=True)
        low = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        handle = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
        os.close(low)
        # Who held the lock may have taken the folder away meanwhile: then we hold the lock of a file that is gone.
        if _take(handle, fcntl.LOCK_EX, end - time.monotonic()) and _is_file(handle, folder.lock):
            return handle
        os.close(handle)
        if time.monotonic() >= end:
            return None


def _is_file(handle: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(handle), os.stat(path))


def is_locked(folder: RunFolder) -> bool:
    try:
        handle = os.open(folder.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _take(handle, fcntl.LOCK_SH, 0.0)
    finally:
        os.close(handle)


def _take(handle: int, kind: int, wait_s: float) -> bool:
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)


@cache
def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema answer, plan, run or state, as it ships in the package."""
    return json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))


def check_against_schema(name: str, value: Any) -> None:
    """Raise jsonschema.ValidationError unless `value` is what the schema of that name describes."""
    jsonschema.Draft202012Validator(schema(name)).validate(value)


def write_document(path: Path, kind: str, value: dict[str, Any]) -> None:
    """Write one of our JSON documents: scrubbed of secrets, checked, whole or not at all."""
    text = to_json(scrub(value), indent=1)
    check_against_schema(kind, json.loads(text))
    write_atomically(path, text + "\n")


def read_document(path: Path, kind: str) -> dict[str, Any] | None:
    """Return a document of ours, None where there is none; raise FinetuneError(run_missing) where it is not one of ours."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        check_against_schema(kind, value)
    except FileNotFoundError:
        return None
    except (ValueError, OSError, jsonschema.ValidationError) as error:
        reason = str(error).splitlines()[0][:300]
        raise FinetuneError(
            "run_missing", f"{path} is no {kind} document of this program: {reason}", file=str(path)
        ) from error
    return value
