"""Verifiers for runs in tests."""

import time
from typing import Any


def even(row: dict[str, Any], completion: str) -> float:
    """The share of characters with an even code, so that rewards differ within a group."""
    return sum(ord(letter) % 2 == 0 for letter in completion) / max(len(completion), 1)


def slowly_even(row: dict[str, Any], completion: str) -> float:
    """As even, and a batch is scored for so long that a kill falls into it."""
    time.sleep(0.02)
    return even(row, completion)


def constant(row: dict[str, Any], completion: str) -> float:
    return 1.0


def nothing(row: dict[str, Any], completion: str) -> None:
    return None


def fails_on_row_three(row: dict[str, Any], completion: str) -> float:
    if row["answer"] == "3":
        raise KeyError("no such key")
    return even(row, completion)


def always_fails(row: dict[str, Any], completion: str) -> float:
    raise RuntimeError("the scorer is down")
