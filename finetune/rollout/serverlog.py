"""What a server's log says about its failure: the kind of it, and the traceback that came first.

Rule: the earliest traceback is the cause. vLLM's processes each report the failure of the one below them, so the last
one only says that something failed.
"""

from __future__ import annotations

import re
from pathlib import Path

from finetune.errors import FinetuneError

_MOST_BYTES = 2_000_000
_LINES_SHOWN = 20
# (EngineCore pid=123) ERROR 11-29 21:09:13 [core.py:1100] before a line that another process passed on
_PREFIX = re.compile(r"^(\(\w+(?: pid=\d+)?\) ?)?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_TRACEBACK = "Traceback (most recent call last):"
_PORT = re.compile(r"[Aa]ddress already in use|Errno 98")
# In order of rank: what is said by a later pattern may follow from what an earlier one says.
_KINDS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    (
        "engine_missing",
        "the Python for the engine has no vLLM",
        re.compile(r"No module named '?vllm|No module named 'torch'"),
    ),
    (
        "bad_value",
        "vllm_args: the engine refuses an argument",
        re.compile(r"error: (unrecognized arguments|argument |ambiguous option)"),
    ),
    (
        "engine_out_of_memory",
        "the engine has too little memory",
        re.compile(
            r"out of memory|OutOfMemoryError|No available memory for the cache blocks|Free memory on device"
            r"|available KV cache memory|larger than the (maximum|available)[^\n]{0,60}(KV cache|memory)|MemoryError"
            r"|Cannot allocate memory|not enough memory|std::bad_alloc|is larger than the available"
        ),
    ),
    (
        "engine_model",
        "vLLM cannot serve this model as asked",
        re.compile(
            r"architectures? [^\n]{0,80}(not supported|cannot be)|failed to be inspected|does not recognize this architecture"
            r"|max_model_len[^\n]{0,60}(is greater than|larger than)|no module or parameter named|Unrecognized model"
            r"|Cannot find any model weights|Unknown quantization|LoRA[^\n]{0,40}not (yet )?supported"
            r"|does not support LoRA|trust_remote_code|chat template|Can't load tokenizer"
            r"|Couldn't instantiate the backend tokenizer"
            r"|size mismatch|unexpected (weight|key)|following weights were not initialized"
        ),
    ),
)


def read_since(log: Path, start: int) -> str:
    """Return a log from byte `start` on; of a long one the first and the last part."""
    with open(log, "rb") as file:
        file.seek(start)
        first = file.read(_MOST_BYTES)
        rest = file.tell()
        size = file.seek(0, 2)
        file.seek(max(rest, size - _MOST_BYTES // 10))
        last = file.read()
    return (first + last).decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def plain_lines(text: str) -> list[str]:
    """Return the lines of a log without the names of processes, levels and times before them."""
    return [_PREFIX.sub("", line, count=1) for line in text.split("\n")]


def first_traceback(lines: list[str]) -> list[str]:
    """Return the earliest traceback, with the lines that name the exception; none: an empty list."""
    for start, line in enumerate(lines):
        if _TRACEBACK in line:
            end = start + 1
            while end < len(lines) and _is_inside(lines[end]):
                end += 1
            end += 1  # the exception; what is indented after it belongs to its text
            while end < len(lines) and lines[end].startswith((" ", "\t")):
                end += 1
            return lines[start:end]
    return []


def _is_inside(line: str) -> bool:
    return not line or line.startswith((" ", "\t"))


def is_port_taken(text: str) -> bool:
    return bool(_PORT.search(text))


def start_failure(code: str | None, what: str, text: str, log: Path) -> FinetuneError:
    """Return the error that the log of a failed start tells: of the given code, else of the kind that the log shows.

    what: how it was noticed. Evidence: the traceback that came first (or the log's end), and the log.
    """
    lines = plain_lines(text)
    block = first_traceback(lines)
    shown = [line for line in block or lines if line.strip()][-_LINES_SHOWN:]
    found, cause = code or "engine_failed", what
    # The traceback tells more surely than the rest of the log, which also holds warnings.
    for part in ("\n".join(block), "\n".join(lines)):
        kind = next((kind for kind in _KINDS if kind[2].search(part)), None)
        if kind is not None and code is None:
            found, cause = kind[0], f"{kind[1]} ({what})"
            shown = _around(part, kind[2]) if not block else shown
            break
    return FinetuneError(found, f"{cause}: {_last_words(shown)}; log: {log}", log=str(log), traceback=shown)


def _last_words(shown: list[str]) -> str:
    """Return the line that names the exception, with what is indented after it."""
    plain = [index for index, line in enumerate(shown) if not line.startswith((" ", "\t"))]
    words = " ".join(line.strip() for line in shown[plain[-1] if plain else 0 :])
    return words[:500] or "its log is empty"


def _around(part: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the line that was found, at the end of those before it."""
    lines = [line for line in part.split("\n") if line.strip()]
    place = next(index for index, line in enumerate(lines) if pattern.search(line))
    return lines[max(0, place + 1 - _LINES_SHOWN) : place + 1]
