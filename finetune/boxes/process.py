"""What a box is, for commands that are not trusted: limits, a clean environment, a folder of its own; and the plain kind.

Rule: a command finds in its environment what its box put there and what it was given, nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
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
from finetune.errors import FinetuneError

WORKSPACE = "/workspace"  # what a box that isolates calls the workspace
_OWN_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "proc", "dev", "workspace")


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
        endpoint: Path | None = None,
        reads: Mapping[str, Path] | None = None,
    ) -> BoxResult:
        """Run a command in the folder `workspace`, its working directory and the one that it shares with us.

        The environment is the box's own (PATH, HOME, LANG, TMPDIR) and what is given, nothing else. endpoint: a unix
        socket of ours that the command reaches as http://127.0.0.1:8000, its only network; the folder of the socket
        keeps others away, not its mode. reads: what else the command may read, at absolute places of its own. Raises
        no_sandbox where the box cannot be set up. The command dies with the THREAD that called, so that thread must
        outlive it.
        """
        ...


class ProcessBox:
    """A plain child process: limits, a clean environment, its end with all that it started. It is no isolation.

    The command reads and writes what our user may, and reaches the network. Started by root, `processes` does not
    bind; else it counts on top of what runs under our user already. Words of the command and values of its environment
    that name /workspace, a place of `reads` or the endpoint are told the real ones (the endpoint has a free port).
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
        endpoint: Path | None = None,
        reads: Mapping[str, Path] | None = None,
    ) -> BoxResult:
        marker = new_marker()
        places = {WORKSPACE: workspace, **checked_places(reads or {})}
        given = {name: _real(value, places) for name, value in (environment or {}).items()}
        own = box_environment(str(workspace), str(workspace)) | given | {MARKER: marker}
        words = [_real(word, places) for word in command]
        running = num_threads_of(os.getuid()) if limits.processes is not None else 0
        way = None if endpoint is None else (str(endpoint), 0)
        entry = Entry(self.python, parent=os.getpid(), running=running, endpoint=way)
        launch = Launch(lambda fd: entering(entry, words, limits, fd), own, marker=marker)
        return supervised(launch, workspace, limits, stdin)


def checked_places(reads: Mapping[str, Path]) -> dict[str, Path]:
    """Return the places with the real paths of what is to be read there; raises bad_value and file_missing."""
    found = {}
    for place, path in reads.items():
        parts = Path(place).parts
        if not place.startswith("/") or ".." in parts or len(parts) < 2 or parts[1] in _OWN_FOLDERS:
            text = f"{place}: no place for something to read in a box: an absolute one outside {', '.join(_OWN_FOLDERS)}"
            raise FinetuneError("bad_value", text)
        if not path.exists():
            raise FinetuneError("file_missing", f"{path}, to be read in a box as {place}, is not there")
        found[str(Path(place))] = path.resolve()
    return found


def _real(text: str, places: Mapping[str, Path]) -> str:
    """Return a text in which each place of a box is told by its real path."""
    for place in sorted(places, key=len, reverse=True):
        path = str(places[place]).replace("\\", r"\\")
        text = re.sub(rf"(?<![\w./-]){re.escape(place)}(?![\w.-])", path, text)
    return text


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
def new_workspace(files: Mapping[str, str | bytes], place: Path | None = None) -> Iterator[Path]:
    """Make a folder with these files (name -> content), which is gone afterwards with what a command left in it.

    place: the folder that it is made in, instead of the temporary one.
    """
    folder = Path(tempfile.mkdtemp(prefix="finetune-box-", dir=place))
    try:
        for path, content in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        yield folder
    finally:
        remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder that a command has filled: folders may be closed, or nested deeper than Python's own removal goes."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run(
                [*command, "--", str(folder)], stdin=subprocess.DEVNULL, capture_output=True, check=False
            )


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
