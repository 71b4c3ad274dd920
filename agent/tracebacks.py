"""Reading any log: its lines as they were meant, and the errors in it in the order in which they came.

Lines of several processes in one file are told apart by what stands before them (torchrun's [rank0]:, vLLM's
(EngineCore pid=7)). A launcher's summary is never an error of its own, and neither is what Python ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOST_BYTES = 2_000_000  # of the beginning of a log, and of its end
_MOST_LINES = 400  # of one traceback
_MOST_MESSAGE = 20  # lines of an exception's text
_HEAD = "Traceback (most recent call last):"
_CHAINED = re.compile(
    r"During handling of the above exception|The above exception was the direct cause of the following"
)
_IGNORED = re.compile(r"^Exception ignored in|^--- Logging error ---|^Exception in thread .*pin_memory")
_LAUNCHER = re.compile(
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|torch\.multiprocessing\.spawn"
    r"|CalledProcessError: Command '?\[?'?[^\n]*python|Engine core initialization failed|See root cause above"
    r"|Caught \w+ in DataLoader worker|ExceptionGroup: [^\n]* sub-exception"
)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# The time that a container puts before each line; the process; level, time and place of vLLM's own lines.
_PREFIX = re.compile(
    r"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)? ?)?"
    r"(?P<process>\[(?:rank|default)?\d+\]:? ?|\(\w+(?: pid=\d+)?\) ?|\d{1,4}: )?"
    r"(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
    r"(?: +\| )?"  # of the exceptions in a group
)
_CODE = re.compile(r"^error code: (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """One line without what stood before it; time is the last one seen up to it, "" where there is none."""

    number: int
    time: str
    process: str
    text: str


@dataclass(frozen=True)
class Traceback:
    """One error of a log: the traceback that came first, and in `chain` those that followed from it."""

    file: Path | None
    line: int
    time: str
    text: str
    chain: tuple[str, ...] = ()

    @property
    def error(self) -> str:
        """The line that names the exception: the first behind the frames, which are indented."""
        return _error_line(self.text)

    @property
    def errors(self) -> list[str]:
        """The exceptions' own lines, from the first cause on."""
        return [_error_line(text) for text in (self.text, *self.chain)]

    @property
    def last_frame(self) -> str:
        frames = [line.strip() for line in self.text.splitlines() if line.lstrip().startswith('File "')]
        return frames[-1] if frames else ""

    @property
    def ours(self) -> tuple[str, str] | None:
        """The code that an error of ours names in its traceback, and its message."""
        for text in (*reversed(self.chain), self.text):
            if found := _CODE.search(text):
                return found[1], _error_line(text).partition(": ")[2]
        return None


def _error_line(text: str) -> str:
    lines = [line for line in text.splitlines()[1:] if line.strip()]
    plain = [line for line in lines if not line.startswith((" ", "\t"))]
    return (plain or [line.strip() for line in lines[-1:]] or [text.strip()])[0]


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a log; of a long one those of its beginning and of its end."""
    return [line for start, text in _parts(path) for line in lines_of(text, start)]


def _parts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, text) of the beginning of a file, and of its end where they do not meet."""
    with open(path, "rb") as file:
        first = file.read(_MOST_BYTES)
        yield 1, first.decode("utf-8", "replace")
        size = file.seek(0, 2)
        if size <= len(first):
            return
        begin = max(len(first), size - _MOST_BYTES)
        passed = first.count(b"\n")
        file.seek(len(first))
        for place in range(len(first), begin, _MOST_BYTES):
            passed += file.read(min(_MOST_BYTES, begin - place)).count(b"\n")
        yield passed + 1, file.read().decode("utf-8", "replace")


def lines_of(text: str, first: int = 1) -> list[Line]:
    """Return the lines of a text; a carriage return ends a line too, for progress bars hide errors behind it."""
    plain = _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    lines, time = [], ""
    for number, raw in enumerate(plain.split("\n"), first):
        if found := _TIME.search(raw):
            time = " ".join(found.groups())
        prefix = _PREFIX.match(raw)
        assert prefix is not None, "every part of it may be missing"
        process = (prefix["process"] or "").strip()
        lines.append(Line(number, time, process, raw[prefix.end() :]))
    return lines


def tracebacks_of(lines: list[Line], file: Path | None = None) -> list[Traceback]:
    """Return the errors of a log in the order of its lines, without summaries of launchers and what was ignored."""
    processes: dict[str, list[Line]] = {}
    for line in lines:
        processes.setdefault(line.process, []).append(line)
    found = [error for own in processes.values() for error in _of_process(own, file)]
    return sorted(found, key=lambda error: error.line)


def _of_process(lines: list[Line], file: Path | None) -> Iterator[Traceback]:
    """Yield the errors of one process; a traceback that followed from the one before it belongs to that error."""
    blocks: list[tuple[int, int]] = []
    for start, line in enumerate(lines):
        if _HEAD in line.text and not (blocks and start < blocks[-1][1]):
            blocks.append((start, _end(lines, start)))
    errors: list[Traceback] = []
    for start, end in blocks:
        text = "\n".join([_HEAD, *(line.text for line in lines[start + 1 : end])]).rstrip()
        before = [line.text for line in lines[max(0, start - 3) : start]]
        if errors and any(_CHAINED.search(one) for one in before):
            last = errors[-1]
            errors[-1] = Traceback(last.file, last.line, last.time, last.text, (*last.chain, text))
        elif not (before and _IGNORED.search(before[-1])):
            errors.append(Traceback(file, lines[start].number, lines[start].time, text))
    yield from (error for error in errors if not _LAUNCHER.search(error.text))


def _end(lines: list[Line], start: int) -> int:
    """Return where the traceback that begins at `start` ends: behind the exception's text, before a blank line or another."""
    place = start + 1
    last = min(len(lines), start + _MOST_LINES)
    while place < last and _is_frame(lines[place].text):
        place += 1
    last = min(last, place + _MOST_MESSAGE)
    while place < last and lines[place].text.strip() and _HEAD not in lines[place].text:
        place += 1
    return place


def _is_frame(text: str) -> bool:
    return _HEAD not in text and text.startswith((" ", "\t"))


def first_traceback(path: Path) -> Traceback | None:
    """Return the first error of a log."""
    return next(iter(tracebacks_of(read_lines(path), path)), None)
