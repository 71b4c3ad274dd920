"""What to do about a failure: one hint per error and warning code, and what the text of an unknown traceback means.

The cause of a failed run is the earliest traceback over the logs of all ranks; a launcher's summary is never the cause.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.knobs import unknown_name

_FOLDER = Path(__file__).parent
_LAUNCHER = re.compile(
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|torch\.multiprocessing\.spawn"
)
_TRACEBACK = "Traceback (most recent call last):"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_MOST_BYTES = 2_000_000  # of one log
_LINES_SHOWN = 20
_ENGINE_LOG = "vllm-"


@dataclass(frozen=True)
class Hint:
    """id is the error or warning code."""

    id: str
    cause: str
    fix: str
    confirm: str


@dataclass(frozen=True)
class Pattern:
    """What a piece of log text means; `sample` is a text that it must find."""

    hint: str
    pattern: re.Pattern[str]
    cause: str
    sample: str


@dataclass(frozen=True)
class Traceback:
    """The first traceback of one log: its text, and the line and time at which it stands."""

    file: Path
    line: int
    time: str  # "" where the log has no times before it
    text: str

    @property
    def error(self) -> str:
        """Return the line that names the exception: the last one that is not indented."""
        lines = [line for line in self.text.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
        return lines[-1] if lines else ""


@functools.cache
def hints() -> dict[str, Hint]:
    entries = tomllib.loads((_FOLDER / "hints.toml").read_text(encoding="utf-8"))
    return {name: Hint(name, **entry) for name, entry in entries.items()}


@functools.cache
def patterns() -> tuple[Pattern, ...]:
    entries = tomllib.loads((_FOLDER / "patterns.toml").read_text(encoding="utf-8"))["pattern"]
    return tuple(
        Pattern(entry["hint"], re.compile(entry["pattern"]), entry["cause"], entry["sample"])
        for entry in entries
    )


def hint(code: str) -> Hint:
    """Return the hint of a code, or raise FinetuneError(bad_value) with the nearest one."""
    if code not in hints():
        raise FinetuneError("bad_value", f"hint {unknown_name(code, list(hints()))}", hint=code)
    return hints()[code]


def described(error: FinetuneError) -> dict[str, Any]:
    """Return an error as an answer shows it: the message is the cause, fix and confirm come from the hint.

    The hint is that of the code, unless the logs told more (evidence.hint_id).
    """
    evidence = dict(error.evidence)
    own = hint(evidence.pop("hint_id", error.code))
    return {
        "hint_id": own.id,
        "code": error.code,
        "cause": error.message,
        "fix": own.fix,
        "confirm": own.confirm,
        "evidence": evidence,
    }


def first_traceback(path: Path) -> Traceback | None:
    """Return the first traceback of a log that is no launcher's summary."""
    with open(path, "rb") as file:
        text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    lines = (
        text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    )  # progress bars hide errors behind carriage returns
    last_time = ""
    for number, line in enumerate(lines):
        if found := _TIME.search(line):
            last_time = " ".join(found.groups())
        if _TRACEBACK in line:
            block = _block(lines, number)
            if not _LAUNCHER.search(block):
                return Traceback(path, number + 1, last_time, block)
    return None


def _block(lines: list[str], start: int) -> str:
    """Return the traceback that begins at a line: up to the exception's own lines, chained ones not included."""
    block = [lines[start]]
    for line in lines[start + 1 : start + 400]:
        if _TRACEBACK in line:
            break
        if not line.strip() and not block[-1].startswith((" ", "\t")):
            break
        block.append(line)
    return "\n".join(block)


def earliest_traceback(logs: Path) -> Traceback | None:
    """Return the earliest traceback over the logs of a run: by the time before it, else by when its log was last written.

    An engine prints tracebacks that it survives, and one that dies is told by the rank that asked it: its log comes last.
    """
    found = _tracebacks(path for path in logs.glob("*.log") if not path.name.startswith(_ENGINE_LOG))
    found = found or _tracebacks(logs.glob(f"{_ENGINE_LOG}*.log"))
    return min(
        found, key=lambda traceback: (traceback.time or "9", traceback.file.stat().st_mtime), default=None
    )


def _tracebacks(paths: Iterable[Path]) -> list[Traceback]:
    return [traceback for path in sorted(paths) if (traceback := first_traceback(path))]


def match(text: str) -> Pattern | None:
    """Return the first pattern, in the order of the catalogue, that a text (an error message, a log) contains."""
    return next((pattern for pattern in patterns() if pattern.pattern.search(text)), None)


def diagnosed(error: FinetuneError, logs: Path) -> FinetuneError:
    """Return a failure that has no cause of its own with what the logs say it is; an unknown one with its first traceback."""
    if error.code not in ("training_failed", "rank_died", "preflight_failed"):
        return error
    traceback = earliest_traceback(logs)
    if traceback is None:
        return error
    known = match(traceback.error) or match(traceback.text)
    lines = traceback.text.splitlines()[-_LINES_SHOWN:]
    found = error.evidence | {"log": str(traceback.file), "line": traceback.line, "traceback": lines}
    if known is None:
        return FinetuneError(
            error.code,
            f"{error.message}; the cause is unknown, the first error is: {traceback.error}",
            **found,
        )
    return FinetuneError(error.code, f"{known.cause}: {traceback.error}", **found | {"hint_id": known.hint})
