"""What --data names -> rows: files, folders, Hub ids, tasks and the builtin rows, with weights and renamed columns.

Rule: the same sources give the same rows in the same order, on every rank and wherever the files lie; the digest of
a file is of the very bytes that were parsed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from finetune.data.arguments import column_names
from finetune.data.formats import READERS, Faults, numbered, reader_of
from finetune.data.reasoning import PREFIX, eval_side, is_reasoning, puzzles_of, reasoning_rows
from finetune.data.task_files import read_task, task_folders
from finetune.errors import FinetuneError, Problems, boundary
from finetune.knobs import unknown_name
from finetune.records import Row
from finetune.rules import TASKS

ARITHMETIC = "builtin:arithmetic"
ARITHMETIC_EVAL = "builtin:arithmetic:eval"
ARITHMETIC_SIZES = {ARITHMETIC: 1600, ARITHMETIC_EVAL: 500}
_WEIGHTED = re.compile(r"(?P<source>.+):(?P<weight>\d+(?:\.\d+)?)")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(\?.*)?")
_HUB_OPTIONS = ("config", "split", "revision")


@dataclass(frozen=True)
class DataFile:
    """One file as it was read: rows are the rows in it, blank its empty lines."""

    path: str
    sha256: str
    bytes: int
    rows: int
    blank: int = 0


@dataclass(frozen=True)
class RowSet:
    """The rows of all sources in the order read; left_out are those that a weight below 1 did not take."""

    rows: list[Row]
    files: list[DataFile]
    columns: list[str]
    left_out: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class _Source:
    """One entry of --data: the files (or the one id) that it stands for, its weight and how its parts are read."""

    parts: list[str]
    weight: float
    read: Callable[[str, Faults], tuple[list[Row], DataFile]]


def read_rows(sources: Sequence[str], column_map: Sequence[str] = ()) -> RowSet:
    """Read all sources, in order, and rename columns as `column_map` says ("prompt=question").

    A weight w behind a source (a.jsonl:0.7) takes every row floor(w) times, and for the rest of w a share of the rows
    that depends on their number alone. Raises Problems: file_missing, no_rows, bad_row, duplicate_key, ...
    """
    names = column_names(column_map)
    faults = Faults()
    empty: list[FinetuneError] = []
    kept: list[Row] = []
    left_out: list[Row] = []
    files: list[DataFile] = []
    for source in _resolved(sources):
        rows: list[Row] = []
        for part in source.parts:
            known = len(faults)
            found, file = source.read(part, faults)
            files.append(file)
            rows += found
            if not found and len(faults) == known:
                empty.append(
                    FinetuneError("no_rows", f"{file.path}: holds no rows", file=file.path, blank=file.blank)
                )
        taken, rest = _weighted(rows, source.weight)
        kept += taken
        left_out += rest
    if empty or faults:
        raise Problems([*empty, *faults.errors()])
    kept = _renamed(kept, names)
    return RowSet(kept, files, columns_of(kept), left_out)


def data_digest(sources: Sequence[str]) -> list[dict[str, Any]]:
    """Return path, sha256, bytes, rows and weight of each file, without parsing JSONL.

    Nothing is fetched: a Hub id has null where only the Hub knows; a file that does not parse has null rows.
    """
    return [_digest(part, source) for source in _resolved(sources) for part in source.parts]


def eval_sources(sources: Sequence[str]) -> list[str]:
    """Return the held-out side of the sources where all of them bring one; else nothing."""
    sides = [_eval_side(source_name(source)) for source in sources]
    return list(dict.fromkeys(side for side in sides if side)) if sides and all(sides) else []


def _eval_side(name: str) -> str | None:
    if is_reasoning(name):
        return eval_side(name)
    return ARITHMETIC_EVAL if name == ARITHMETIC else None


def source_name(source: str) -> str:
    """Return an entry of --data without its weight."""
    return _split_weight(source)[0]


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of all columns in the order in which they are first met."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def arithmetic_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of builtin:arithmetic or of its held-out side: distinct questions, in no row of the other side."""
    numbers = range(2, 51)
    questions = [(a, sign, b) for a in numbers for sign in "+-" for b in numbers]
    drawn = random.Random(0).sample(questions, sum(ARITHMETIC_SIZES.values()))
    num_train = ARITHMETIC_SIZES[ARITHMETIC]
    side = drawn[:num_train] if name == ARITHMETIC else drawn[num_train:]
    return [
        {
            "prompt": f"What is {a} {sign} {b}? Answer with just the number.",
            "answer": str(a + b if sign == "+" else a - b),
        }
        for a, sign, b in side
    ]


def _renamed(rows: list[Row], names: dict[str, str]) -> list[Row]:
    if not names:
        return rows
    columns = columns_of(rows)
    if missing := [name for name in names if name not in columns]:
        text = f"map: no row has the column {missing[0]!r}; the columns are {', '.join(columns)}"
        raise FinetuneError("unknown_columns", text, columns_found=columns, setting="map")
    faults = Faults()
    for row in rows:
        for ours in (ours for theirs, ours in names.items() if theirs in row.values):
            if ours in row.values and ours not in names:
                text = f"map: the row already has a column {ours!r}"
                faults.add("unknown_columns", row.file, row.line, text, columns_found=columns)
    faults.raise_any()
    return [
        replace(row, values={names.get(name, name): value for name, value in row.values.items()})
        for row in rows
    ]


def _weighted(rows: list[Row], weight: float) -> tuple[list[Row], list[Row]]:
    """Return the rows that `weight` takes, in order, and those that it takes not once.

    Which rows make the share depends on their number alone, so that a file that was moved gives the same rows.
    """
    times = int(weight)
    num_extra = math.floor((weight - times) * len(rows) + 1e-9)
    extra = set(random.Random(0).sample(range(len(rows)), num_extra))
    taken = [row for place, row in enumerate(rows) for _ in range(times + (place in extra))]
    return taken, [row for place, row in enumerate(rows) if not times and place not in extra]


def _resolved(sources: Sequence[str]) -> list[_Source]:
    """Return what each entry stands for; raises Problems naming all that stand for nothing."""
    found: list[_Source] = []
    problems: list[FinetuneError] = []
    for source in sources:
        try:
            found.append(_resolve(source))
        except FinetuneError as error:
            problems.append(error)
    if problems:
        raise Problems(problems)
    return found


def _resolve(entry: str) -> _Source:
    name, weight = _split_weight(entry)
    if name.startswith(TASKS):
        return _Source(list(map(str, task_folders(name.removeprefix(TASKS)))), weight, _read_task)
    if name.startswith("builtin:"):
        if is_reasoning(name):
            puzzles_of(name)  # raises where the name is none
            return _Source([name], weight, _read_reasoning)
        if name not in ARITHMETIC_SIZES:
            text = (
                f"data: {name}: no such builtin rows; there are {', '.join(ARITHMETIC_SIZES)}, {PREFIX}TASK"
            )
            raise FinetuneError("bad_value", text, setting="data")
        return _Source([name], weight, _read_arithmetic)
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if path.is_dir():
        return _Source(_files_of(path), weight, _read_file)
    if path.is_file():
        if reader_of(name) is None:
            text = f"data: {path}: files of this kind are not read; give one of {', '.join(READERS)}"
            raise FinetuneError("bad_value", text, setting="data")
        return _Source([str(path)], weight, _read_file)
    if _HUB_ID.fullmatch(name) and reader_of(name) is None:
        return _Source([name], weight, _read_hub)
    raise FinetuneError("file_missing", f"data: {path}: no such file or folder", file=str(path))


def _split_weight(entry: str) -> tuple[str, float]:
    match = _WEIGHTED.fullmatch(entry)
    if match is None or os.path.exists(os.path.expanduser(entry)):
        return entry, 1.0
    weight = float(match["weight"])
    if not 0 < weight <= 1000:
        raise FinetuneError(
            "bad_value", f"data: {entry}: a weight is above 0 and at most 1000", setting="data"
        )
    return match["source"], weight


def _files_of(folder: Path) -> list[str]:
    """Return the data files right in the folder, sorted by name (by code point, hence the same on every machine)."""
    names = sorted(
        entry.name for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith(".")
    )
    files = [str(folder / name) for name in names if reader_of(name)]
    if not files:
        text = f"data: {folder}: no file in this folder ends in {', '.join(READERS)}"
        raise FinetuneError("file_missing", text, file=str(folder))
    return files


def _digest(part: str, source: _Source) -> dict[str, Any]:
    if source.read is _read_hub:
        return {"path": part, "sha256": None, "bytes": None, "rows": None, "weight": source.weight}
    if part.lower().endswith((".jsonl", ".ndjson")):
        content = _content(part)
        num_rows = sum(1 for line in content.split(b"\n") if line.strip())
        sha256 = hashlib.sha256(content).hexdigest()
        return {
            "path": part,
            "sha256": sha256,
            "bytes": len(content),
            "rows": num_rows,
            "weight": source.weight,
        }
    faults = Faults()
    facts = asdict(source.read(part, faults)[1])
    del facts["blank"]
    return facts | {"rows": None if faults else facts["rows"], "weight": source.weight}


def _content(path: str) -> bytes:
    with boundary("file_missing", path):
        return Path(path).read_bytes()


def _read_file(path: str, faults: Faults) -> tuple[list[Row], DataFile]:
    content = _content(path)
    read = reader_of(path)
    assert read is not None, "resolved sources have a reader"
    lines = list(read(content, path, faults))
    rows = [Row(values, path, line) for line, values in lines if values is not None]
    return rows, DataFile(
        path, hashlib.sha256(content).hexdigest(), len(content), len(rows), len(lines) - len(rows)
    )


def _read_arithmetic(name: str, faults: Faults) -> tuple[list[Row], DataFile]:
    return _made_rows(name, [Row(values, name, line) for line, values in enumerate(arithmetic_rows(name), 1)])


def _read_reasoning(name: str, faults: Faults) -> tuple[list[Row], DataFile]:
    return _made_rows(name, [Row(values, name, line) for line, values in enumerate(reasoning_rows(name), 1)])


def _read_task(folder: str, faults: Faults) -> tuple[list[Row], DataFile]:
    task = read_task(Path(folder))
    if isinstance(task, list):
        raise Problems(task)
    path = str(task.folder / "task.md")
    row = Row({"prompt": task.prompt, "task": task.folder.name, "folder": folder}, path, 1)
    return [row], DataFile(path, task.digest, len(task.prompt.encode()), 1)


def _read_hub(source: str, faults: Faults) -> tuple[list[Row], DataFile]:
    """Read a Hub data set: owner/name, or owner/name?config=C&split=S&revision=R (split train unless given)."""
    import datasets

    name, _, query = source.partition("?")
    options = dict(parse_qsl(query))
    if unknown := [option for option in options if option not in _HUB_OPTIONS]:
        raise FinetuneError(
            "bad_value", f"data: {source}: {unknown_name(unknown[0], list(_HUB_OPTIONS))}", setting="data"
        )
    try:
        with boundary("file_missing", f"data: {source}"):
            table = datasets.load_dataset(
                name,
                options.get("config"),
                split=options.get("split", "train"),
                revision=options.get("revision"),
            )
    except FinetuneError as error:
        raise FinetuneError(_hub_code(error, name), error.message, **error.evidence) from error
    return _made_rows(
        source, [Row(values, source, line) for line, values in numbered(iter(table)) if values is not None]
    )


def _hub_code(error: FinetuneError, name: str) -> str:
    """Return the code of what the Hub's client said of `name`: out of reach, not allowed, or not there."""
    # Without the name: what is called rows-403 or offline-rows is none of these for it.
    kind, text = str(error.evidence.get("exception")), error.message.replace(name, "").lower()
    if "gated" in text or "401" in text or "403" in text:
        return "access_denied"
    is_offline = (
        "offline" in text or "couldn't reach" in text or kind in ("ConnectionError", "OfflineModeIsEnabled")
    )
    return "offline" if is_offline else error.code


def _made_rows(name: str, rows: list[Row]) -> tuple[list[Row], DataFile]:
    """Return rows that stand in no file of ours, with the digest of their JSON text."""
    content = "\n".join(json.dumps(row.values, ensure_ascii=False, default=str) for row in rows).encode()
    return rows, DataFile(name, hashlib.sha256(content).hexdigest(), len(content), len(rows))
