"""Which rows are held out, and which rows stand more than once.

Rule: rows that ask the same thing stay on one side, or the held-out loss would measure memory.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def held_out(
    rows: Sequence[T], fraction: float, seed: int, key: Callable[[T], str]
) -> tuple[list[int], list[int]]:
    """Return (train, held-out) places, each in order: at most floor(n * fraction) rows held out, equal keys together.

    Which rows those are depends on seed and keys alone, not on the order of the rows.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        groups[key(row)].append(place)
    room = math.floor(len(rows) * fraction + 1e-9)
    chosen: set[int] = set()
    for name in sorted(groups, key=lambda name: seeded_rank(seed, name)):
        if len(groups[name]) <= room - len(chosen):
            chosen.update(groups[name])
    return [place for place in range(len(rows)) if place not in chosen], sorted(chosen)


def seeded_rank(seed: int, name: str) -> bytes:
    """Return a sort key that shuffles names the same way on every machine."""
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def duplicates(keys: Sequence[str]) -> list[int]:
    """Return the places whose key already stood at an earlier place."""
    seen: set[str] = set()
    return [place for place, key in enumerate(keys) if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def overlap(train: Sequence[str], evaluation: Sequence[str]) -> list[int]:
    """Return the places in `evaluation` whose key stands in `train` too."""
    known = set(train)
    return [place for place, key in enumerate(evaluation) if key in known]
