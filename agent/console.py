"""Live progress on stderr: a bar on a terminal, plain lines elsewhere. stdout is never touched.

The one place where rich is used, and it is imported only when a bar is drawn.
"""

from __future__ import annotations

import sys
import time
from typing import IO, Any, Protocol

_LINE_EVERY_S = 5.0
_GIB = 2**30


class Display(Protocol):
    """Shows how a run goes on."""

    def note(self, text: str) -> None: ...

    def step(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_display(stream: IO[str] = sys.stderr) -> Display:
    return Bar(stream) if stream.isatty() else Lines(stream)


class Clock:
    """Estimates the time that is left from the steps seen."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def eta_s(self, line: dict[str, Any]) -> float | None:
        if line.get("step_s") is not None:
            self._seconds = [*self._seconds[-19:], line["step_s"]]
        if not self._seconds or line.get("num_steps") is None:
            return None
        return (line["num_steps"] - line["step"]) * sum(self._seconds) / len(self._seconds)


def figures(line: dict[str, Any]) -> str:
    """Return the numbers of a step as people read them."""
    parts = []
    if line.get("reward_mean") is not None:
        parts.append(f"reward {line['reward_mean']:.3f}")
    if line.get("eval_accuracy") is not None:
        parts.append(f"held-out {line['eval_accuracy']:.3f}")
    if line.get("truncated_share"):
        parts.append(f"cut {line['truncated_share']:.0%}")
    if line.get("loss") is not None:
        parts.append(f"loss {line['loss']:.4f}")
    if line.get("eval_loss") is not None:
        parts.append(f"eval {line['eval_loss']:.4f}")
    if line.get("tokens_per_s") is not None:
        parts.append(f"{line['tokens_per_s']:.0f} tok/s")
    if line.get("peak_memory_bytes") is not None:
        parts.append(f"{line['peak_memory_bytes'] / _GIB:.1f} GiB")
    return "  ".join(parts)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


class Lines:
    """One plain line every few seconds, and always for the first and the last step."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._clock = Clock()
        self._next = 0.0

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def step(self, line: dict[str, Any]) -> None:
        left = duration(self._clock.eta_s(line))
        if time.monotonic() >= self._next or line["step"] == line.get("num_steps"):
            self._next = time.monotonic() + _LINE_EVERY_S
            self.note(f"step {line['step']}/{line.get('num_steps') or '?'}  {figures(line)}  ETA {left}")

    def close(self) -> None:
        pass


class Bar:
    """A bar that moves."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
        )
        self._progress = Progress(*columns, console=Console(file=stream))
        self._clock = Clock()
        self._task = self._progress.add_task("training", total=None, figures="")
        self._progress.start()

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def step(self, line: dict[str, Any]) -> None:
        left = duration(self._clock.eta_s(line))
        self._progress.update(
            self._task,
            completed=line["step"],
            total=line.get("num_steps"),
            figures=f"{figures(line)}  ETA {left}",
        )

    def close(self) -> None:
        self._progress.stop()
