"""Starting a boxed command, watching it, and ending it with all that it started.

Rule: whatever the command does, its result comes in time, with capped output, and nothing of it is left alive; a box
that could not be set up is an error (no_sandbox), never the command's failure.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from finetune.boxes.watching import Watcher
from finetune.errors import FinetuneError

MARKER = "FINETUNE_BOX"  # in the environment of all that a command starts, so that it is found again
_CHUNK = 1 << 16
# The signals that the kernel sends for a limit of one process.
_LIMIT_OF = {"SIGXCPU": "cpu", "SIGXFSZ": "file_size"}
_ENTRY = Path(__file__).with_name("entry.py")


@dataclass(frozen=True)
class Limits:
    """What one command may use; None is no limit.

    memory_bytes is the address space of each process (programs that reserve much more than they use, such as Bun, need
    None). processes counts the threads of all processes of the box's user. file_bytes is the size of one file, and of
    /tmp and of HOME where these are the box's own. output_bytes is kept of stdout and of stderr each; the rest is
    read and thrown away. total_memory_bytes is what all processes of the box hold together (files in its /tmp and
    HOME aside), workspace_bytes what lies in the workspace: a watcher looks some times a second, and once at the end.
    """

    seconds: float = 10.0
    cpu_seconds: int | None = None
    memory_bytes: int | None = 2 << 30
    processes: int | None = 64
    file_bytes: int | None = 64 << 20
    output_bytes: int = 1 << 20
    total_memory_bytes: int | None = None
    workspace_bytes: int | None = None


@dataclass(frozen=True)
class BoxResult:
    """How a command ended. exit_code is None where it was stopped by us; killed_by names the signal that ended it.

    over_limit is the limit that ended it, or that it was found to have passed at its end: time, cpu, memory (of all
    processes together), workspace or file_size. A limit that the command itself met as an error (no memory, no process,
    no room in /tmp) is not told apart from its other failures.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    timed_out: bool = False
    killed_by: str | None = None
    truncated: bool = False
    seconds: float = 0.0
    over_limit: str | None = None


@dataclass(frozen=True)
class Launch:
    """How a box starts a command. argv is given the descriptor on which the command's start is told.

    start_line: where no descriptor leads into the box, the start is told by this line on stderr, before anything that
    the command writes; stdin is then a pipe that ends when we do. clean_up ends what is not our child.
    """

    argv: Callable[[int], list[str]]
    environment: dict[str, str]
    marker: str
    pass_fds: tuple[int, ...] = ()
    signal_base: int = 0  # a box that tells signals as exit codes has 128 here
    start_line: str | None = None
    clean_up: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Entry:
    """How a command is entered: as which user, in which folder, dying with which parent.

    folder: where only that user may enter it; else the working directory stays. running: threads that the user has
    already, on top of which the limit counts. endpoint: the socket as the box sees it, and the port for it (0: a free
    one). stdin: the file to read, where the command is the child of a container's first process.
    """

    python: str
    uid: int | None = None
    folder: str | None = None
    parent: int | None = None
    running: int = 0
    endpoint: tuple[str, int] | None = None
    stdin: str | None = None


def entering(
    entry: Entry,
    command: Sequence[str],
    limits: Limits,
    started_fd: int | None,
    start_line: str | None = None,
) -> list[str]:
    """Return the argv that takes on user and limits, tells that it did on started_fd, and becomes the command."""
    others = entry.running + (entry.endpoint is not None) + (entry.stdin is not None)
    values = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NPROC": None if limits.processes is None else limits.processes + others,
    }
    told = {
        "limits": {name: value for name, value in values.items() if value is not None},
        "uid": entry.uid,
        "folder": entry.folder,
        "parent": entry.parent,
        "endpoint": entry.endpoint,
        "stdin": entry.stdin,
        "fd": started_fd,
        "start_line": start_line,
    }
    return [entry.python, "-I", "-S", "-c", _ENTRY.read_text(), json.dumps(told), *command]


class _NotTaken(Exception):
    """The kernel takes no such command: it holds a zero byte, or is too long."""


@dataclass
class _Capped:
    """The first `room` bytes of a stream."""

    room: int
    content: bytearray = field(default_factory=bytearray)
    is_cut: bool = False

    def add(self, data: bytes) -> None:
        kept = data[: self.room - len(self.content)]
        self.content += kept
        self.is_cut = self.is_cut or len(kept) < len(data)

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


def supervised(launch: Launch, workspace: Path, limits: Limits, stdin: bytes) -> BoxResult:
    """Start what `launch` says, read its output, end it when it passes a limit and all of its group in any case.

    A command that the kernel does not take has failed with 126, as shells say it.
    """
    told_read, told_write = os.pipe()
    try:
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            began = time.monotonic()
            child = _started(launch, workspace, given, told_write)
            os.close(told_write)
            told_write = -1
            watcher = _watcher(child, launch.marker, workspace, limits)
            outputs = (_Capped(limits.output_bytes), _Capped(limits.output_bytes))
            try:
                over = _watched(child, outputs, began + limits.seconds, watcher)
            finally:
                _ended(child, launch)
            seconds = time.monotonic() - began
        told = _told(told_read) if launch.start_line is None else _told_by(outputs[1], launch.start_line)
    except _NotTaken as error:
        return BoxResult(126, "", f"the command cannot be started: {error}")
    finally:
        os.close(told_read)
        if told_write >= 0:
            os.close(told_write)
    end = _End(child.returncode, over, seconds, bool(told), watcher.is_workspace_over())
    outputs[1].add(told[1:])
    return _result(end, outputs, launch.signal_base)


@dataclass(frozen=True)
class _End:
    """How a command came to its end: over is the limit for which we ended it, is_full what its workspace looks like."""

    returncode: int
    over: str | None
    seconds: float
    was_started: bool
    is_full: bool


def _result(end: _End, outputs: tuple[_Capped, _Capped], signal_base: int) -> BoxResult:
    stdout, stderr = outputs
    if not end.was_started and end.over is None:
        text = f"the box could not be set up (exit code {end.returncode}): {stderr.text.strip()[-500:]}"
        raise FinetuneError("no_sandbox", text)
    code, killer = (None, "SIGKILL") if end.over else _exit_of(end.returncode, signal_base)
    return BoxResult(
        code,
        stdout.text,
        stderr.text,
        end.over == "time",
        killer,
        stdout.is_cut or stderr.is_cut,
        end.seconds,
        end.over or _LIMIT_OF.get(killer or "") or ("workspace" if end.is_full else None),
    )


def _watcher(child: subprocess.Popen[bytes], marker: str, workspace: Path, limits: Limits) -> Watcher:
    mark = f"{MARKER}={marker}".encode()
    return Watcher(child.pid, mark, limits.total_memory_bytes, workspace, limits.workspace_bytes)


def _started(launch: Launch, workspace: Path, given: IO[bytes], told_fd: int) -> subprocess.Popen[bytes]:
    is_child = launch.start_line is None
    try:
        return subprocess.Popen(
            launch.argv(told_fd),
            env=launch.environment,
            cwd=workspace,
            stdin=given if is_child else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(told_fd, *launch.pass_fds) if is_child else (),
        )
    except ValueError as error:
        raise _NotTaken(str(error)) from error
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise _NotTaken(error.strerror) from error
        raise FinetuneError("no_sandbox", f"the box could not be started: {error}") from error


def _watched(
    child: subprocess.Popen[bytes], outputs: tuple[_Capped, _Capped], end: float, watcher: Watcher
) -> str | None:
    """Read both streams until the child has ended; return the limit that was passed before: time (`end`), or a watched one.

    What the child left running may hold the streams open: its own end counts, not theirs.
    """
    assert child.stdout is not None
    assert child.stderr is not None
    with selectors.DefaultSelector() as selector:
        for stream, kept in zip((child.stdout, child.stderr), outputs, strict=True):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, kept)
        while time.monotonic() < end:
            has_ended = child.poll() is not None
            wait_s = 0 if has_ended else max(0.0, min(0.05, end - time.monotonic()))
            events = selector.select(wait_s) if selector.get_map() else _waited(child, wait_s)
            for key, _ in events:
                data = os.read(key.fd, _CHUNK)
                key.data.add(data)
                if not data:
                    selector.unregister(key.fileobj)
            if has_ended and not events:
                return None
            if not has_ended and (over := watcher.over()) is not None:
                return over
    return None if child.poll() is not None else "time"


def _waited(child: subprocess.Popen[bytes], seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
    return []


def _ended(child: subprocess.Popen[bytes], launch: Launch) -> None:
    if child.poll() is None or child.returncode < 0:
        launch.clean_up()
    end_group(child, launch.marker)
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            stream.close()


def new_marker() -> str:
    """Return a value of MARKER for one command. What runs in a marked process is marked as part of it."""
    return f"{os.environ.get(MARKER, '')}/{uuid.uuid4().hex}"


def end_group(child: subprocess.Popen[bytes], marker: str) -> None:
    """Kill a child that leads a session, its process group, and all that carries the marker; collect the child.

    It returns when none is left: the processes of a bubblewrap box die with it, but some milliseconds later.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    end = time.monotonic() + 2.0
    while _kill_marked(marker) and time.monotonic() < end:
        time.sleep(0.002)


def _kill_marked(marker: str) -> int:
    """Kill every process with the marker in its environment, also one that left its session; return how many there were."""
    wanted = f"{MARKER}={marker}".encode()
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            # The descriptor is of this very process, even where its pid is given to another one meanwhile.
            fd = os.pidfd_open(int(name))
            try:
                if any(entry.startswith(wanted) for entry in _environment_of(name)):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    count += 1
            finally:
                os.close(fd)
    return count


def _environment_of(pid: str) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _told(fd: int) -> bytes:
    """Return what the way into the box said: nothing (not set up), a dot (command started), a dot and a failure."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return b""


def _told_by(stderr: _Capped, line: str) -> bytes:
    """Take from stderr what came before the line and the line itself; nothing is told where it never came."""
    _, found, own = bytes(stderr.content).partition(line.encode())
    if found:
        stderr.content[:] = own
    return b"." if found else b""


def _exit_of(returncode: int, signal_base: int) -> tuple[int, str | None]:
    number = -returncode if returncode < 0 else returncode - signal_base if signal_base else 0
    try:
        return returncode, signal.Signals(number).name
    except ValueError:
        return returncode, None
