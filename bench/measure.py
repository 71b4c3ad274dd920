"""Run a training command and measure it from outside, the same way for every side."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("FINETUNE_CACHE", Path.home() / ".cache" / "finetune"))
INTERVAL_S = 0.05


@dataclass(frozen=True)
class Measured:
    """What was seen of a run. ends: when each optimizer step ended, in seconds; peak_bytes: of all processes together."""

    ends: list[float]
    peak_bytes: int

    @property
    def steps(self) -> int:
        return len(self.ends)

    @property
    def seconds(self) -> float:
        """From the end of the first step, which pays for first allocations, to the end of the last one."""
        return self.ends[-1] - self.ends[0]

    @property
    def steady_step_s(self) -> float:
        """Median seconds of a step after the first, everything between two ends included."""
        return statistics.median(after - before for before, after in itertools.pairwise(self.ends))


def measure(command: list[str], metrics: Path, log: Path) -> Measured:
    """Run `command`, which appends a line to `metrics` at the end of each step, and time those lines.

    Raises RuntimeError with the end of the log where the command fails.
    """
    times: list[float] = []
    peak = 0
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            times += [time.perf_counter()] * (lines - len(times))
            time.sleep(INTERVAL_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} left with {process.returncode}:\n{log.read_text()[-2000:]}")
    return Measured(times, peak)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and all its descendants."""
    try:
        root = psutil.Process(pid)
        return sum(_resident(process) for process in [root, *root.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def model_folder() -> Path:
    """Return the folder into which the embedded model was converted."""
    return next((CACHE / "models").glob("smollm2-135m*/config.json")).parent
