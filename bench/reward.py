"""A reward for runs of which only the work matters: it differs within almost every group, so that all of it is trained."""

from __future__ import annotations

from typing import Any


def odd_share(row: dict[str, Any], completion: str) -> float:
    """Return the share of characters with an odd code."""
    return sum(ord(letter) % 2 for letter in completion) / max(len(completion), 1)


def right(row: dict[str, Any]) -> str:
    """Return a completion that deserves the full reward."""
    return "aceg"
