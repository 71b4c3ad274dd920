"""The rows of bench.json: {row, unit, ours, peer, ratio, spread, limit}.

ours, peer and ratio are medians over the measurements, spread is (largest - smallest ratio) / median ratio, limit is
what no implementation can beat on this machine. peer, ratio and limit are null where there is none.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def row_of(
    row: str, unit: str, ours: Sequence[float], peer: Sequence[float], limit: float | None = None
) -> dict[str, Any]:
    """Return the row of pairs of measurements, each of ours next to one of the peer's."""
    ratios = [mine / theirs for mine, theirs in zip(ours, peer, strict=True)]
    ratio = statistics.median(ratios)
    numbers = {
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "ratio": ratio,
        "spread": (max(ratios) - min(ratios)) / ratio,
        "limit": limit,
    }
    return {"row": row, "unit": unit, **_rounded(numbers)}


def lone_row(row: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the row of measurements that have no peer; spread is then that of the values themselves."""
    middle = statistics.median(values)
    numbers = {
        "ours": middle,
        "peer": None,
        "ratio": None,
        "spread": (max(values) - min(values)) / middle,
        "limit": None,
    }
    return {"row": row, "unit": unit, **_rounded(numbers)}


def _rounded(numbers: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 4) for name, value in numbers.items()}


def written(row: dict[str, Any]) -> str:
    """Return a row as one line for people."""
    text = f"{row['row']}: ours {row['ours']:.4g}"
    if row["peer"] is None:
        return f"{text} {row['unit']} (spread {row['spread']:.2f})"
    return (
        f"{text}, peer {row['peer']:.4g} {row['unit']}, ratio {row['ratio']:.2f} (spread {row['spread']:.2f})"
    )


def replace_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows` in the place of those of the same name; the rows of parts that were not measured stay."""
    found = json.loads(path.read_text()) if path.exists() else []
    new = {row["row"]: row for row in rows}
    kept = [new.pop(row["row"], row) for row in found]
    path.write_text(json.dumps([*kept, *new.values()], indent=1) + "\n")
