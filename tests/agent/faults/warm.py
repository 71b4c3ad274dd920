"""The console command from a process that has imported all that its children need: each request is a fork of it.

    python -m tests.agent.faults.warm        one request a line on stdin: {"argv", "cwd", "environ", "root", "out"}

The children are the real ones (finetune.probe, launch, rank), forked in place of started, for importing torch takes
longer than what they do here. out: gets the answer, out.err stderr, out.code the exit code. root: where the machine's
/proc and /dev are looked for.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent import cli, system

MODULES = ("finetune.probe", "finetune.launch", "finetune.rank")
NEEDED = (*MODULES, "finetune.train.sft", "finetune.train.grpo", "transformers", "peft")
_start = subprocess.Popen


class Forked:
    """A child as subprocess.Popen would show it."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] | None = None,
        **rest: Any,
    ) -> None:
        self.args, self.returncode = command, None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            if start_new_session:
                os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(stdout.fileno(), 1)
            os.dup2(1 if stderr == subprocess.STDOUT else stderr.fileno(), 2)
            if preexec_fn:
                preexec_fn()
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            if cwd:
                os.chdir(cwd)
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
            sys.argv = [command[2], *command[3:]]
            code = ended(lambda: runpy.run_module(command[2], run_name="__main__", alter_sys=True))
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None, "poll says so"
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def started(command: Any, *rest: Any, **options: Any) -> Any:
    """Fork where the command is one of our own children; start anything else."""
    is_ours = isinstance(command, list) and command[:2] == [sys.executable, "-m"] and command[2] in MODULES
    return Forked(command, *rest, **options) if is_ours else _start(command, *rest, **options)


def ended(work: Callable[[], Any]) -> int:
    """Return the exit code that a program would end with."""
    try:
        work()
        code: Any = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return int(code)


def answer(asked: dict[str, Any]) -> int:
    """Carry out one command, in the fork."""
    subprocess.Popen = started  # type: ignore[assignment, misc]
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.chdir(asked["cwd"])
    if root := asked["root"]:
        cli.read_machine = lambda: system.read_machine(os.environ, Path(root))  # type: ignore[assignment]
    return ended(lambda: sys.exit(cli.main(asked["argv"])))


def main() -> None:
    for name in NEEDED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            out = Path(asked["out"])
            with open(out, "wb") as stdout, open(f"{out}.err", "wb") as stderr:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
            code = ended(lambda: sys.exit(answer(asked)))  # noqa: B023 (this very request's)
            Path(f"{out}.part").write_text(str(code))
            os.rename(f"{out}.part", f"{out}.code")
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
