"""The bytes of one file -> its rows, for each kind of file; and the list of what was wrong with them.

Rule: what stands in the file is what is read. No type is guessed, no key is chosen among equal ones, and no line is
left out unless it is blank; whatever cannot be read is named with its file and line.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError, Problems

PLACES_LISTED = 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(r"\s*")

# A reader yields (line, values) of each row, and (line, None) for a blank line.
Lines = Iterator[tuple[int, dict[str, Any] | None]]


class Faults:
    """Faulty rows gathered by error code, so that a user meets all of them at once, each code with its first places."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[str, int, str, dict[str, Any]]]] = {}

    def __len__(self) -> int:
        return sum(len(found) for found in self._found.values())

    def add(self, code: str, file: str, line: int, text: str, **evidence: Any) -> None:
        self._found.setdefault(code, []).append((file, line, text, evidence))

    def errors(self) -> list[FinetuneError]:
        """Return one error per code: its message tells the first place in full and lists PLACES_LISTED at most."""
        return [_joined(code, found) for code, found in self._found.items()]

    def raise_any(self) -> None:
        if self._found:
            raise Problems(self.errors())


def _joined(code: str, found: list[tuple[str, int, str, dict[str, Any]]]) -> FinetuneError:
    file, line, text, evidence = found[0]
    places = [f"{file}:{line}" for file, line, _, _ in found]
    message = f"{file}:{line}: {text}"
    if len(found) > 1:
        more = ", ".join(places[1:PLACES_LISTED]) + (", ..." if len(found) > PLACES_LISTED else "")
        message += f" (and {len(found) - 1} more: {more})"
    where = {"file": file, "line": line, "count": len(found), "places": places[:PLACES_LISTED]}
    return FinetuneError(code, message, **(evidence | where))


class _DuplicateKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} stands twice in one object; which of its values is meant?")
        self.key = key


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKey(next(name for name in names if names.count(name) > 1))
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text; raises ValueError, also for equal keys, NaN and half surrogates."""
    return _checked(_DECODER.decode, text)


def _checked(decode: Callable[[str], Any], text: str) -> Any:
    """Return what `decode` makes of `text`, with everything that a JSON text can do to us as a ValueError."""
    try:
        value = decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("an escape \\uD800 to \\uDFFF without its other half is no character") from error
    return value


def json_row(value: Any) -> dict[str, Any]:
    """Return `value` where it is a row; raises ValueError where it is another JSON value."""
    if not isinstance(value, dict):
        raise ValueError(f"a row is a JSON object {{...}}, not {type(value).__name__}")
    return value


def _report(error: ValueError, path: str, line: int, faults: Faults) -> None:
    if isinstance(error, _DuplicateKey):
        faults.add("duplicate_key", path, line, str(error), key=error.key)
    elif isinstance(error, json.JSONDecodeError):
        faults.add(
            "bad_row",
            path,
            line,
            f"no JSON: {error.msg} at character {error.pos + 1} of the line",
            column=error.pos + 1,
        )
    else:
        faults.add("bad_row", path, line, str(error))


def _decoded(content: bytes, path: str, faults: Faults, line: int | None = None) -> str | None:
    """Return UTF-8 bytes as text. `line` is the line that they are; without it they are a whole file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        place = line or content.count(b"\n", 0, error.start) + 1
        is_utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        text = "the file is UTF-16" if is_utf16 else f"byte 0x{content[error.start]:02x} is no UTF-8"
        faults.add("bad_row", path, place, f"{text}; save the file as UTF-8")
        return None


def jsonl_lines(content: bytes, path: str, faults: Faults) -> Lines:
    """Split at line feeds only: U+2028, U+0085 and the like may stand inside a JSON string."""
    lines = content.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    if not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            yield number, None
            continue
        text = _decoded(line, path, faults, number)
        if text is None:
            continue
        try:
            row = json_row(parsed_json(text))
        except ValueError as error:
            _report(error, path, number, faults)
        else:
            yield number, row


def json_lines(content: bytes, path: str, faults: Faults) -> Lines:
    """Read a list of objects, an object that holds one such list, a single object, or JSON lines under this ending."""
    text = _decoded(content.removeprefix(BYTE_ORDER_MARK), path, faults)
    if text is None or not text.strip():
        return
    if text.lstrip().startswith("["):
        yield from _json_items(text, text.index("[") + 1, path, faults)
        return
    try:
        whole = parsed_json(text)
    except ValueError:
        yield from jsonl_lines(content, path, faults)
        return
    held = list(whole.values()) if isinstance(whole, dict) else []
    if len(held) == 1 and isinstance(held[0], list) and all(isinstance(item, dict) for item in held[0]):
        yield from _json_items(text, text.index("[") + 1, path, faults)
    elif isinstance(whole, dict):
        yield 1, whole
    else:
        faults.add("bad_row", path, 1, "a JSON file holds a list of objects")


def _json_items(text: str, position: int, path: str, faults: Faults) -> Lines:
    """Read the items of a JSON list one by one, so that a bad one is named by the line on which it starts."""
    line, seen = 1, 0
    position = _after_space(text, position)
    while text[position : position + 1] != "]":
        line, seen = line + text.count("\n", seen, position), position
        try:
            value, end = _checked_item(text, position)
            row = json_row(value)
        except ValueError as error:
            _report(error, path, line, faults)
            return
        yield line, row
        position = _after_space(text, end)
        if text[position : position + 1] == ",":
            position = _after_space(text, position + 1)
        elif text[position : position + 1] != "]":
            faults.add("bad_row", path, line, "no JSON: a comma or the closing ] is missing after this item")
            return
    rest = text[position + 1 :].strip()
    if rest and text.lstrip().startswith("["):
        faults.add("bad_row", path, line, f"no JSON: something stands behind the list: {rest[:40]!r}")


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _checked_item(text: str, position: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    _checked(lambda _: value, text[position:end])
    return value, end


def table_lines(content: bytes, path: str, faults: Faults) -> Lines:
    """Read CSV or TSV; every cell stays the text that it is (00501 is no number, an empty cell is empty text)."""
    text = _decoded(content.removeprefix(BYTE_ORDER_MARK), path, faults)
    if text is None:
        return
    limit = csv.field_size_limit(max(len(text), 1))  # a setting of the module, put back below
    try:
        delimiter = "\t" if path.lower().endswith(".tsv") else ","
        yield from _table_rows(
            csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), path, faults
        )
    except csv.Error as error:
        faults.add("bad_row", path, text.count("\n") + 1, f"no table: {error} (is a quote left open?)")
    finally:
        csv.field_size_limit(limit)


def _table_rows(reader: Any, path: str, faults: Faults) -> Lines:
    header: list[str] | None = None
    last = 0
    for cells in reader:
        line, last = last + 1, reader.line_num
        if not cells:
            yield line, None
        elif header is None:
            header = cells
            if twice := [name for name in cells if cells.count(name) > 1]:
                faults.add(
                    "duplicate_key",
                    path,
                    line,
                    f"the column {twice[0]!r} stands twice in the header",
                    key=twice[0],
                )
                return
        elif len(cells) != len(header):
            faults.add("bad_row", path, line, f"{len(cells)} cells under a header of {len(header)}")
        else:
            yield line, dict(zip(header, cells, strict=True))


def parquet_lines(content: bytes, path: str, faults: Faults) -> Lines:
    """Read Parquet as plain Python values; its line is the record, counted from 1."""
    import pyarrow
    from pyarrow import parquet

    try:
        tables = parquet.ParquetFile(pyarrow.BufferReader(content)).iter_batches()
        yield from numbered(values for table in tables for values in table.to_pylist())
    except pyarrow.ArrowException as error:
        faults.add("bad_row", path, 1, f"no Parquet: {str(error)[:300]}")


def numbered(records: Iterator[dict[str, Any]]) -> Lines:
    """Yield Arrow records as rows.

    An Arrow struct gives every record the keys of all others, with null. Inside a cell a null is therefore no value:
    without this rule one tool would own the parameters of another.
    """
    for number, record in enumerate(records, 1):
        yield number, {name: _plain(value) for name, value in record.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value) if isinstance(value, decimal.Decimal) else value


READERS: dict[str, Callable[[bytes, str, Faults], Lines]] = {
    ".jsonl": jsonl_lines,
    ".ndjson": jsonl_lines,
    ".json": json_lines,
    ".csv": table_lines,
    ".tsv": table_lines,
    ".parquet": parquet_lines,
}


def reader_of(path: str) -> Callable[[bytes, str, Faults], Lines] | None:
    """Return the reader that the file's ending asks for, if there is one."""
    return READERS.get(Path(path).suffix.lower())
