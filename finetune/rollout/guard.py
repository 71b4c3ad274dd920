"""Run a command that must not outlive the process that wanted it.

    python guard.py PARENT_PID GRACE_S COMMAND...

Rule: when the parent is gone, however it went, the command and all its children are killed at once. The parent is
watched by its process id: the kernel's own parent-death signal follows the thread that started a child, not the process.
To be started as leader of a process group, in which the command stays: who started it can kill the whole group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

POLL_S = 0.1
_PR_SET_PDEATHSIG = 1


def guard(parent: int, grace_s: float, command: list[str]) -> int:
    """Run `command` and return its exit code; SIGTERM to this process ends it and its children within `grace_s`."""
    was_told: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        was_told.append(time.monotonic())

    signal.signal(signal.SIGTERM, note)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    has_passed_on = False
    while child.poll() is None:
        is_late = bool(was_told) and time.monotonic() - was_told[0] > grace_s
        if os.getppid() != parent or is_late:
            os.killpg(0, signal.SIGKILL)  # this process too
        if was_told and not has_passed_on:
            has_passed_on = True
            child.terminate()
        time.sleep(POLL_S)
    return child.returncode


def _die_with_parent() -> None:
    """Have the kernel kill the command when this guard is killed; the guard has one thread, so that is the same."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    exit_code = guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
    if os.getppid() != int(sys.argv[1]):
        os.killpg(0, signal.SIGKILL)
    sys.exit(exit_code if exit_code >= 0 else 128 - exit_code)
