"""What is measured while training runs: time, tokens, memory; and the tracker that repeats metrics.jsonl elsewhere."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of this process: allocated on its device, or resident in main memory (Linux counts in KiB)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def read(self) -> float:
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds


class Tracker:
    """Repeats the numbers of a step in tensorboard files; without a tracker asked for it does nothing.

    The import happens at the start of a run: a missing package must not show itself after hours.
    """

    def __init__(self, kind: str, run_dir: Path) -> None:
        self._writer: Any = None
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, values: dict[str, Any]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
