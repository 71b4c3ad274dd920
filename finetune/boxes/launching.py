"""Starting a boxed command, watching it, and ending it with all that it started.

Rule: whatever the command does, its result comes in time, with capped output, and nothing of it is left alive; a box
that could not be set up is an error (no_sandbox), never the command's failure.
"""

from __future__ import annotations

import contextlib
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

from finetune.errors import FinetuneError

MARKER = "FINETUNE_BOX"  # in the environment of all that a command starts, so that it is found again
_CHUNK = 1 << 16
# Runs between us and the command, in the box: sets the limits on itself and becomes the command. No preexec_fn: that
# would fork a process with threads. Limits come after setuid, which a process limit of the new user could stop, and
# so does the death signal, which setuid resets. Python ignores two signals, which the command would inherit.
_ENTER = """
import ctypes, json, os, resource, signal, sys
told = json.loads(sys.argv[1])
if told["uid"] is not None:
    os.setgroups([])
    os.setresgid(told["uid"], told["uid"], told["uid"])
    os.setresuid(told["uid"], told["uid"], told["uid"])
if told["parent"] is not None:
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != told["parent"]:
        os._exit(1)
for name, value in told["limits"].items():
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    wanted = value + 1 if name == "RLIMIT_CPU" else value
    top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (min(value, top), top))
if told["folder"] is not None:
    os.chdir(told["folder"])
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
os.set_inheritable(told["fd"], False)
os.write(told["fd"], b".")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    os.write(told["fd"], f"{sys.argv[2]}: {error.strerror}".encode())
    os._exit(127)
"""


@dataclass(frozen=True)
class Limits:
    """What one command may use; None is no limit.

    memory_bytes is the address space of each process (programs that reserve much more than they use, such as Bun, need
    None). processes counts the threads of all processes of the box's user. file_bytes is the size of one file, and of
    /tmp and of HOME where these are the box's own. output_bytes is kept of stdout and of stderr each; the rest is
    read and thrown away.
    """

    seconds: float = 10.0
    cpu_seconds: int | None = None
    memory_bytes: int | None = 2 << 30
    processes: int | None = 64
    file_bytes: int | None = 64 << 20
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class BoxResult:
    """How a command ended. exit_code is None where it was stopped for time; killed_by names the signal that ended it."""

    exit_code: int | None
    stdout: str
    stderr: str
    timed_out: bool = False
    killed_by: str | None = None
    truncated: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Launch:
    """How a box starts a command. argv is given the descriptor on which the command's start is told."""

    argv: Callable[[int], list[str]]
    environment: dict[str, str]
    marker: str
    pass_fds: tuple[int, ...] = ()
    signal_base: int = 0  # a box that tells signals as exit codes has 128 here


@dataclass(frozen=True)
class Entry:
    """How a command is entered: as which user, in which folder, dying with which parent.

    folder: where only that user may enter it; else the working directory stays. running: threads that the user has
    already, on top of which the limit counts.
    """

    python: str
    uid: int | None = None
    folder: str | None = None
    parent: int | None = None
    running: int = 0


def entering(entry: Entry, command: Sequence[str], limits: Limits, started_fd: int) -> list[str]:
    """Return the argv that takes on user and limits, tells that it did on started_fd, and becomes the command."""
    values = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NPROC": None if limits.processes is None else limits.processes + entry.running,
    }
    given = {name: value for name, value in values.items() if value is not None}
    told = {
        "limits": given,
        "uid": entry.uid,
        "folder": entry.folder,
        "parent": entry.parent,
        "fd": started_fd,
    }
    return [entry.python, "-I", "-S", "-c", _ENTER, json.dumps(told), *command]


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
    """Start what `launch` says, read its output, end it when time is up and all of its group in any case."""
    told_read, told_write = os.pipe()
    try:
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            began = time.monotonic()
            child = _started(launch, workspace, given, told_write)
            os.close(told_write)
            told_write = -1
            outputs = (_Capped(limits.output_bytes), _Capped(limits.output_bytes))
            try:
                in_time = _watched(child, outputs, began + limits.seconds)
            finally:
                _ended(child, launch.marker)
            seconds = time.monotonic() - began
        told = _told(told_read)
    finally:
        os.close(told_read)
        if told_write >= 0:
            os.close(told_write)
    stdout, stderr = outputs
    if not told and in_time:
        text = f"the box could not be set up (exit code {child.returncode}): {stderr.text.strip()[-500:]}"
        raise FinetuneError("no_sandbox", text)
    if told[1:]:
        stderr.add(told[1:])
    code, killer = _exit_of(child.returncode, launch.signal_base)
    return BoxResult(
        code if in_time else None,
        stdout.text,
        stderr.text,
        not in_time,
        killer if in_time else "SIGKILL",
        stdout.is_cut or stderr.is_cut,
        seconds,
    )


def _started(launch: Launch, workspace: Path, given: IO[bytes], told_fd: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            launch.argv(told_fd),
            env=launch.environment,
            cwd=workspace,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(told_fd, *launch.pass_fds),
        )
    except OSError as error:
        raise FinetuneError("no_sandbox", f"the box could not be started: {error}") from error


def _watched(child: subprocess.Popen[bytes], outputs: tuple[_Capped, _Capped], end: float) -> bool:
    """Read both streams until the child has ended; return whether it did before `end` (monotonic seconds).

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
            events = selector.select(0 if has_ended else max(0.0, min(0.05, end - time.monotonic())))
            for key, _ in events:
                data = os.read(key.fd, _CHUNK)
                key.data.add(data)
                if not data:
                    selector.unregister(key.fileobj)
            if has_ended and not events:
                return True
            if not selector.get_map():
                return _waited(child, end)
    return child.poll() is not None


def _waited(child: subprocess.Popen[bytes], end: float) -> bool:
    try:
        child.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _ended(child: subprocess.Popen[bytes], marker: str) -> None:
    end_group(child, marker)
    for stream in (child.stdout, child.stderr):
        assert stream is not None
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


def _exit_of(returncode: int, signal_base: int) -> tuple[int, str | None]:
    number = -returncode if returncode < 0 else returncode - signal_base if signal_base else 0
    try:
        return returncode, signal.Signals(number).name
    except ValueError:
        return returncode, None
