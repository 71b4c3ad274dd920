"""Processes: who one is (pid and start time), starting children that never outlive us, ending them.

A pid alone is never trusted: the kernel gives it to another process later, so its start time goes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agent import detaching

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ProcessId:
    """A process for certain: its pid, its start in clock ticks after boot, and which boot."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        start = _start_time(pid)
        return None if start is None else cls(pid, start, boot_id())

    @property
    def is_alive(self) -> bool:
        return self.boot == boot_id() and _start_time(self.pid) == self.start

    @classmethod
    def of_self(cls) -> ProcessId:
        me = cls.of(os.getpid())
        assert me is not None
        return me

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this very process, or to none."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks after boot; None where there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[19])


def start_child(
    argv: Sequence[str], environment: Mapping[str, str], log: IO[bytes], pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, which the kernel kills when we die; it reads nothing and writes to `log`."""
    parent = os.getpid()

    def die_with_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # we died before prctl
            os._exit(1)

    return subprocess.Popen(
        list(argv),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        preexec_fn=die_with_parent,
    )


@dataclass(frozen=True)
class Streams:
    """Where a detached process works and writes; it reads nothing."""

    folder: Path
    output: Path
    log: Path


def start_detached(
    argv: Sequence[str], environment: Mapping[str, str], streams: Streams, pass_fds: Sequence[int] = ()
) -> ProcessId | None:
    """Start a process that is nobody's child: it outlives us, our process group, our terminal. None: it has ended already.

    It holds none of our files but those of pass_fds. Raises OSError where it could not be started.
    """
    places = [str(streams.folder), str(streams.output), str(streams.log)]
    done = subprocess.run(
        [sys.executable, "-IS", detaching.__file__, *places, *argv],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        check=False,
    )
    if done.returncode or not done.stdout.strip():
        raise OSError(f"no process could be started (exit code {done.returncode})")
    return ProcessId.of(int(done.stdout))


def kill_session(leader: int) -> None:
    """Kill a process that start_child or start_detached made, with its whole process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class Interrupts:
    """Within it SIGTERM, SIGINT and SIGHUP do not end this process: the first is remembered, to be acted on where it is safe."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._former[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: Any) -> None:
        self.received = self.received or signal.Signals(number)


def wait_until(condition: Callable[[], bool], seconds: float, every: float = 0.1) -> bool:
    """Wait until condition() holds, at most so many seconds; return whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(every)
    return True
