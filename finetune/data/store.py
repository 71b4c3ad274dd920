"""Prepared data on disk: examples as Arrow tables that ranks map into memory, the rest as JSON beside them.

Rule: a folder is written whole under another name and renamed, so what has its final name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

from finetune.errors import FinetuneError, boundary
from finetune.records import Example, Ledger, Row, current_umask, to_json, write_atomically

FORMAT_VERSION = 2
_SIDES = ("train", "eval")


@dataclass(frozen=True)
class Prepared:
    """What a run needs of its data. The `row` of a held-out example is the place of its row in eval_rows.

    grpo: examples are prompts, of which nothing is learned; the `row` of one to train on is its place in train_rows.
    """

    train: Sequence[Example]
    eval: Sequence[Example]
    eval_rows: list[Row]
    ledger: Ledger
    report: dict[str, Any]
    warnings: list[tuple[str, str]]
    train_rows: list[Row] = field(default_factory=list)


class StoredExamples(Sequence[Example]):
    """Examples of an Arrow table in mapped memory, made when they are asked for."""

    def __init__(self, table: Any) -> None:
        self._columns = {name: table[name] for name in table.column_names}
        self._length = table.num_rows

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> list[Example]: ...
    def __getitem__(self, place: int | slice) -> Example | list[Example]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return Example(**{name: column[place % len(self)].as_py() for name, column in self._columns.items()})


def prepared_folder(key: str) -> Path:
    """Return where prepared data of this key are kept for all runs of the user."""
    return Path(os.environ.get("FINETUNE_CACHE", "~/.cache/finetune")).expanduser() / "prepared" / key


def store_prepared(prepared: Prepared, folder: Path) -> None:
    """Write `prepared` to `folder`; where the folder is there already, it is left as it is."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for side in _SIDES:
            _write_table(getattr(prepared, side), temporary / f"{side}.arrow")
        facts = {
            "version": FORMAT_VERSION,
            "eval_rows": [asdict(row) for row in prepared.eval_rows],
            "train_rows": [asdict(row) for row in prepared.train_rows],
            "ledger": asdict(prepared.ledger),
            "report": prepared.report,
            "warnings": prepared.warnings,
        }
        write_atomically(temporary / "prepared.json", to_json(facts))
        temporary.chmod(0o777 & ~current_umask())
        if not folder.exists():
            os.rename(temporary, folder)
    except FileExistsError:
        return  # another process has written the same content first
    except OSError as error:
        if not folder.exists():
            raise FinetuneError("disk_full", f"{folder}: prepared data cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_prepared(folder: Path) -> Prepared:
    """Return what store_prepared wrote; raises file_missing where there is nothing whole of this version."""
    with boundary("file_missing", f"{folder}: prepared data"):
        facts = json.loads((Path(folder) / "prepared.json").read_text(encoding="utf-8"))
        if facts["version"] != FORMAT_VERSION:
            raise ValueError(f"written in version {facts['version']} of the format, this is {FORMAT_VERSION}")
        train, held_out = (StoredExamples(_mapped_table(Path(folder) / f"{side}.arrow")) for side in _SIDES)
        return Prepared(
            train=train,
            eval=held_out,
            eval_rows=[Row(**row) for row in facts["eval_rows"]],
            train_rows=[Row(**row) for row in facts["train_rows"]],
            ledger=Ledger(**facts["ledger"]),
            report=facts["report"],
            warnings=[(code, text) for code, text in facts["warnings"]],
        )


def _write_table(examples: Sequence[Example], path: Path) -> None:
    import pyarrow

    kinds = {
        "input_ids": pyarrow.list_(pyarrow.int32()),
        "weights": pyarrow.list_(pyarrow.float64()),  # a weight of 0.7 comes back as 0.7
        "row": pyarrow.int64(),
        "file": pyarrow.string(),
        "line": pyarrow.int64(),
    }
    columns = {
        name: pyarrow.array([getattr(one, name) for one in examples], type=kind)
        for name, kind in kinds.items()
    }
    table = pyarrow.table(columns)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _mapped_table(path: Path) -> Any:
    import pyarrow

    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
