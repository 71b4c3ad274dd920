"""What a row of proof.jsonl claims: named figures, each with its limit; the row has passed when every one holds.

A fact is a figure without a limit: it says what was measured besides, and no row passes by facts alone.
"""

from __future__ import annotations

import json
import operator
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEDGER = ROOT / "proof.jsonl"
RELATIONS = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge, ">": operator.gt}


class NotHere(Exception):
    """What the row needs (a data file, a git commit) is not on this machine."""


@dataclass(frozen=True)
class Claim:
    """One figure and what is claimed of it: Claim("seconds", 301.2, "<", 480)."""

    name: str
    figure: float | None
    relation: str
    limit: float

    @property
    def holds(self) -> bool:
        return self.figure is not None and bool(RELATIONS[self.relation](self.figure, self.limit))


@dataclass(frozen=True)
class Fact:
    """One figure of which nothing is claimed: Fact("device", "cpu")."""

    name: str
    figure: float | str | None


Figure = Claim | Fact


def append(row: str, figures: Sequence[Figure], seconds: float) -> bool:
    """Write the row at the end of proof.jsonl and return whether all its claims hold."""
    claims = [figure for figure in figures if isinstance(figure, Claim)]
    passed = bool(claims) and all(claim.holds for claim in claims)
    line = {
        "row": row,
        "figure": {figure.name: _rounded(figure.figure) for figure in figures},
        "limit": {claim.name: f"{claim.relation} {claim.limit:g}" for claim in claims},
        "passed": passed,
        "commit": commit(),
        "seconds": round(seconds),
        "command": f"make proof ROW={row}",
    }
    with LEDGER.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return passed


def _rounded(figure: float | str | None) -> Any:
    return float(f"{figure:.4g}") if isinstance(figure, float) else figure


def commit() -> str:
    """Return the commit that was measured; "+" says that files differed from it. proof.jsonl itself does not count."""
    head = _git("rev-parse", "--short=12", "HEAD").strip()
    return head + (
        "+" if _git("status", "--porcelain", "--", ".", ":!proof.jsonl", ":!bench.json").strip() else ""
    )


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise NotHere(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
