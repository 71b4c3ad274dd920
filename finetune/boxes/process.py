"""What a box is, for commands that are not trusted: limits, a clean environment, a folder of its own; and the plain kind.

Rule: a command finds in its environment what its box put there and what it was given, nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from finetune.boxes.launching import (
    MARKER,
    BoxResult,
    Entry,
    Launch,
    Limits,
    entering,
    new_marker,
    supervised,
)


class Box(Protocol):
    """A way to run commands. isolates: whether a command is kept from files, network and processes outside its workspace."""

    name: str
    isolates: bool
    python: str  # a Python interpreter, as commands in the box call it

    def run(
        self,
        command: Sequence[str],
        workspace: Path,
        limits: Limits,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> BoxResult:
        """Run a command in the folder `workspace`, its working directory and the one that it shares with us.

        The environment is the box's own (PATH, HOME, LANG, TMPDIR) and what is given, nothing else. Raises no_sandbox
        where the box cannot be set up. The command dies with the THREAD that called, so that thread must outlive it.
        """
        ...


class ProcessBox:
    """A plain child process: limits, a clean environment, its end with all that it started. It is no isolation.

    The command reads and writes what our user may, and reaches the network. Started by root, `processes` does not
    bind; else it counts on top of what runs under our user already.
    """

    name = "process"
    isolates = False

    def __init__(self) -> None:
        self.python = _base_python()

    def run(
        self,
        command: Sequence[str],
        workspace: Path,
        limits: Limits,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> BoxResult:
        marker = new_marker()
        own = box_environment(str(workspace), str(workspace)) | dict(environment or {}) | {MARKER: marker}
        running = num_threads_of(os.getuid()) if limits.processes is not None else 0
        entry = Entry(self.python, parent=os.getpid(), running=running)
        launch = Launch(lambda fd: entering(entry, command, limits, fd), own, marker=marker)
        return supervised(launch, workspace, limits, stdin)


def box_environment(home: str, temporary: str) -> dict[str, str]:
    """Return what every command finds in its environment; threads are held at one, since boxes share the processors."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": temporary,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _base_python() -> str:
    """Return the interpreter that our environment stands on: boxes see the standard library, not our packages."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = Path(sys.base_prefix) / "bin" / name
    return str(found) if found.exists() else os.path.realpath(sys.executable)


def num_threads_of(uid: int) -> int:
    """Return how many threads the user runs: what the kernel compares with the process limit."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == uid:
                    total += sum(1 for _ in (folder / "task").iterdir())
    return total


@contextlib.contextmanager
def new_workspace(files: Mapping[str, str | bytes]) -> Iterator[Path]:
    """Make a folder with these files (name -> content), which is gone afterwards with what a command left in it."""
    with tempfile.TemporaryDirectory(prefix="finetune-box-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for path, content in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        yield folder


def read_back(workspace: Path, name: str, limit: int = 1 << 20) -> bytes | None:
    """Return the first `limit` bytes of a file that a command left; None where there is none.

    A link is not followed: the command could have pointed it at a file of ours.
    """
    try:
        fd = os.open(workspace / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(limit)
