"""Start the ranks of a training, watch over them, and say how it ended.

    python -m finetune.launch RUN_DIR

How it ended stands in RUN_DIR/outcome.json before this process leaves. A rank that fails or dies ends all others, and
the outcome names the rank and what it was doing. Nothing heavy is imported here: the ranks do the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.records import StopFlag, to_json, write_atomically

POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
SETTLE_S = (
    0.5  # in which the peers of a failed rank notice; their errors tell the cause from its consequences
)


@dataclass
class Rank:
    """A rank as its parent sees it."""

    number: int
    process: subprocess.Popen[bytes]
    run_dir: Path
    was_told_to_stop: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def beat(self) -> dict[str, Any]:
        return _read(self.run_dir / "heartbeat" / f"rank{self.number}")

    @property
    def error(self) -> dict[str, Any]:
        return _read(self.run_dir / "heartbeat" / f"rank{self.number}.error.json")

    @property
    def has_failed(self) -> bool:
        """A rank that dies after it is done, while the group is being left, has not failed."""
        return not self.is_alive and not self.beat.get("done", False)

    @property
    def doing(self) -> str:
        return f"{self.beat.get('operation', 'starting')}, step {self.beat.get('step', 0)}"


def launch(run_dir: Path, stop: StopFlag) -> int:
    """Train as RUN_DIR/plan.json says, write the outcome and return the exit code."""
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    _clear(run_dir)
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        ranks = _start_ranks(
            run_dir, plan["settings"]["num_gpus"]["value"], os.path.join(folder, "rendezvous")
        )
        error = _wait(ranks, stop)
    result = None if error else _read(run_dir / "heartbeat" / "result.json")
    # A rank that was told to stop before there was anything to save leaves with an error of this code.
    was_stopped = error is not None and error["code"] == "stopped"
    status = result["status"] if result else "stopped" if was_stopped else "failed"
    outcome = {"status": status, "result": result, "error": error}
    write_atomically(run_dir / "outcome.json", to_json(outcome, indent=1))
    if error:
        return FinetuneError(error["code"], "").exit_code
    return 10 if status == "stopped" else 0


def _clear(run_dir: Path) -> None:
    """Take away what an earlier attempt said of itself."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "heartbeat").mkdir(exist_ok=True)
    (run_dir / "outcome.json").unlink(missing_ok=True)
    for path in (run_dir / "heartbeat").iterdir():
        path.unlink()


def _start_ranks(run_dir: Path, size: int, rendezvous: str) -> list[Rank]:
    ranks = []
    for number in range(size):
        command = [sys.executable, "-m", "finetune.rank", str(run_dir), str(number), str(size), rendezvous]
        with open(run_dir / "logs" / f"rank{number}.log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_dying_with(os.getpid())
            )
        ranks.append(Rank(number, process, run_dir))
    return ranks


def _dying_with(parent: int) -> Callable[[], None]:
    """Return what a child does before it begins: it has the kernel kill it when we die, and leaves if we have already."""

    def die_with_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return die_with_parent


def _wait(ranks: list[Rank], stop: StopFlag) -> dict[str, Any] | None:
    """Wait for all ranks; at the first that fails end the others and return the error of the one that caused it."""
    while any(rank.is_alive for rank in ranks):
        if stop.is_set:
            _hand_on(ranks)
        if any(rank.has_failed for rank in ranks):
            time.sleep(SETTLE_S)
            error = _culprit(ranks)
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()
            return error
        time.sleep(POLL_S)
    return _culprit(ranks) if any(rank.has_failed for rank in ranks) else None


def _hand_on(ranks: list[Rank]) -> None:
    """Tell each rank once to stop, as soon as it listens: its first heartbeat says so."""
    for rank in ranks:
        if not rank.was_told_to_stop and rank.is_alive and rank.beat:
            rank.process.send_signal(signal.SIGTERM)
            rank.was_told_to_stop = True


def _culprit(ranks: list[Rank]) -> dict[str, Any]:
    """Return the error that came first: of a rank ended from outside, else the earliest of its own, else of a stuck rank."""
    for rank in ranks:
        if rank.has_failed and not rank.error:
            return _death(rank)
    errors = sorted((rank.error for rank in ranks if rank.error), key=lambda error: error["time"])
    own = [error for error in errors if not error["is_collective"]]
    if own or "imed out" not in errors[0]["message"]:
        return (own or errors)[0]
    silent = [rank for rank in ranks if not rank.error] or ranks  # one that waited in vain says so itself
    late = min(silent, key=lambda rank: (rank.beat.get("step", -1), rank.beat.get("time", 0.0)))
    message = f"rank {late.number} stopped taking part ({late.doing}); the others waited in vain"
    return errors[0] | {"code": "rank_stuck", "rank": late.number, "message": message}


def _death(rank: Rank) -> dict[str, Any]:
    exit_code = rank.process.returncode
    how = (
        f"was killed by {signal.Signals(-exit_code).name}"
        if exit_code < 0
        else f"left with exit code {exit_code}"
    )
    return {
        "code": "rank_died",
        "message": f"rank {rank.number} {how} ({rank.doing})",
        "evidence": {"exit_code": exit_code, "pid": rank.process.pid},
        "rank": rank.number,
        "traceback": None,
        "time": time.time(),
        "is_collective": False,
    }


def _read(path: Path) -> dict[str, Any]:
    """Return the object of a file that is always replaced whole, or {} before there is one."""
    with contextlib.suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return {}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m finetune.launch RUN_DIR")
    stop = StopFlag()
    stop.listen()
    sys.exit(launch(Path(sys.argv[1]).resolve(), stop))


if __name__ == "__main__":
    main()
