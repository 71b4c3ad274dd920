"""Run a training command and measure it from outside, the same way for every side."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

INTERVAL_S = 0.05


@dataclass(frozen=True)
class Measured:
    """seconds: from the end of the first optimizer step to the end of the last one; bytes: of all processes together."""

    seconds: float
    peak_bytes: int
    steps: int


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
    return Measured(times[-1] - times[0], peak, len(times))


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


def read_json(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text()))
