"""What to do about a failure: one hint per error and warning code and per cause that only logs or metrics tell.

The cause of a failed run is the earliest error over the logs of all ranks, never a launcher's summary; a text that no
pattern knows is called unknown, and nothing is guessed.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.tracebacks import Line, Traceback, first_traceback, read_lines, tracebacks_of
from finetune.errors import FinetuneError
from finetune.knobs import unknown_name

__all__ = ["first_traceback"]

_FOLDER = Path(__file__).parent
# Which of several errors of one moment is the cause: what the user gave, the machine, then what the ranks say of each other.
KINDS = ("data", "template", "config", "hardware", "unknown", "collective")
_WITHOUT_CAUSE = ("training_failed", "rank_died", "preflight_failed")
_LINES_SHOWN = 20
_ENGINE_LOG = "vllm-"


@dataclass(frozen=True)
class Hint:
    """id is an error or warning code, or the name of a cause that only logs or metrics tell."""

    id: str
    cause: str
    fix: str
    confirm: str


@dataclass(frozen=True)
class Pattern:
    """What a piece of log text means. alone: it is also looked for in lines that belong to no traceback."""

    id: str
    kind: str
    hint: str
    pattern: re.Pattern[str]
    cause: str
    alone: bool = False
    fix: str | None = None  # in place of the hint's


@dataclass(frozen=True)
class Finding:
    """One error of a log, or a line that means one. known is None where no pattern finds it and it names no code of ours."""

    file: Path | None
    line: int
    time: str
    error: str
    text: str
    traceback: Traceback | None = None
    known: Pattern | None = None

    @property
    def kind(self) -> str:
        return self.known.kind if self.known else "unknown"

    @property
    def fix(self) -> str | None:
        """The action, where it is known: the pattern's own, else its hint's."""
        return (self.known.fix or hint(self.known.hint).fix) if self.known else None


@functools.cache
def hints() -> dict[str, Hint]:
    entries = tomllib.loads((_FOLDER / "hints.toml").read_text(encoding="utf-8"))
    return {name: Hint(name, **entry) for name, entry in entries.items()}


@functools.cache
def patterns() -> tuple[Pattern, ...]:
    entries = tomllib.loads((_FOLDER / "patterns.toml").read_text(encoding="utf-8"))
    return tuple(
        Pattern(name, **entry | {"pattern": re.compile(entry["pattern"])}) for name, entry in entries.items()
    )


def hint(code: str) -> Hint:
    """Return the hint of a code or cause, or raise FinetuneError(bad_value) with the nearest one."""
    if code not in hints():
        raise FinetuneError("bad_value", f"hint {unknown_name(code, list(hints()))}", hint=code)
    return hints()[code]


def described(error: FinetuneError) -> dict[str, Any]:
    """Return an error as an answer shows it: the message is the cause, fix and confirm come from the hint.

    The hint is that of the code, unless the logs told more (evidence.hint_id, evidence.fix).
    """
    evidence = dict(error.evidence)
    own = hint(evidence.pop("hint_id", error.code))
    return {
        "hint_id": own.id,
        "code": error.code,
        "cause": error.message,
        "fix": evidence.pop("fix", None) or own.fix,
        "confirm": own.confirm,
        "evidence": evidence,
    }


def match(text: str) -> Pattern | None:
    """Return the first pattern, in the order of the catalogue, that a text (an error message, a log) contains."""
    return next((pattern for pattern in patterns() if pattern.pattern.search(text)), None)


def _meaning(error: Traceback) -> Pattern | None:
    """Return what an error means: by the code that it names, else by its exceptions' lines, else by all of its text."""
    if error.ours and error.ours[0] in hints():
        code, message = error.ours
        kind = "collective" if code in ("rank_died", "rank_stuck") else "config"
        return Pattern(f"code:{code}", kind, code, re.compile(re.escape(message)), message)
    texts = (*error.errors, error.text, *error.chain)
    return next((known for text in texts if (known := match(text))), None)


def findings_of(lines: list[Line], file: Path | None = None) -> list[Finding]:
    """Return what a log tells of failures, in the order of its lines: its errors, and lines that mean one by themselves."""
    errors = tracebacks_of(lines, file)
    found = [
        Finding(file, error.line, error.time, error.error, error.text, error, _meaning(error))
        for error in errors
    ]
    inside = {text for error in errors for block in (error.text, *error.chain) for text in block.splitlines()}
    seen: set[str] = set()
    for line in lines:
        if not line.text or line.text in inside:
            continue
        known = next((one for one in patterns() if one.alone and one.pattern.search(line.text)), None)
        if known and known.id not in seen:
            seen.add(known.id)
            found.append(Finding(file, line.number, line.time, line.text.strip(), line.text, None, known))
    return sorted(found, key=lambda finding: finding.line)


def findings(logs: Sequence[Path]) -> list[Finding]:
    """Return what several logs tell, the cause first: by time, then by kind of cause.

    A log without times counts by when it was last written; where one has none, what ranks say of each other comes
    last, for it follows from something. An engine prints errors that it survives: its log comes after all others.
    """
    every = [findings_of(read_lines(path), path) for path in sorted(logs)]
    first = [found[0] for found in every if found]
    are_timed = all(finding.time for finding in first)

    def place(finding: Finding) -> tuple[Any, ...]:
        assert finding.file is not None, "each comes from a log"
        is_engine = finding.file.name.startswith(_ENGINE_LOG)
        is_late = not are_timed and finding.kind == "collective"
        written = 0.0 if finding.time else finding.file.stat().st_mtime
        return is_engine, is_late, finding.time or "9", written, KINDS.index(finding.kind), finding.line

    rest = sorted((finding for found in every for finding in found[1:]), key=place)
    return sorted(first, key=place) + rest


def logs_of(folder: Path) -> list[Path]:
    """Return the logs of a folder and the folders in it; attempt-N holds those of earlier attempts of a run."""
    kinds = (".log", ".out", ".err", ".txt")
    paths = [
        path
        for path in folder.rglob("*")
        if (path.suffix in kinds or path.name in ("stdout", "stderr")) and path.is_file()
    ]
    return sorted(path for path in paths if "attempt-" not in str(path.parent.relative_to(folder)))[:200]


def earliest_traceback(logs: Path) -> Traceback | None:
    """Return the error that came first over the logs of a folder."""
    found: Iterable[Finding] = findings(list(logs.glob("*.log")))
    return next((finding.traceback for finding in found if finding.traceback), None)


def diagnosed(error: FinetuneError, logs: Path) -> FinetuneError:
    """Return a failure that has no cause of its own with what the logs say it is; an unknown one with its first error."""
    if error.code not in _WITHOUT_CAUSE:
        return error
    found = next(iter(findings(list(logs.glob("*.log")))), None)
    if found is None:
        return error
    lines = found.text.splitlines()[-_LINES_SHOWN:]
    facts = error.evidence | {"log": str(found.file), "line": found.line, "traceback": lines}
    if found.known is None:
        text = f"{error.message}; the cause is unknown, the first error is: {found.error}"
        return FinetuneError(error.code, text, **facts)
    known = found.known
    if known.kind == "collective" and error.code == "rank_died":
        return FinetuneError(error.code, error.message, **facts)  # which rank and why is told already
    text = f"{known.cause}: {found.error}"
    return FinetuneError(error.code, text, **facts | {"hint_id": known.hint, "fix": found.fix})
