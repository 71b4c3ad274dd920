"""What a row of proof.jsonl claims: named figures, each with its limit; the row has passed when every one holds."""

from __future__ import annotations

import json
import operator
import subprocess
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


def append(row: str, claims: list[Claim], seconds: float) -> bool:
    """Write the row at the end of proof.jsonl and return whether all its claims hold."""
    passed = bool(claims) and all(claim.holds for claim in claims)
    line = {
        "row": row,
        "figure": {claim.name: _rounded(claim.figure) for claim in claims},
        "limit": {claim.name: f"{claim.relation} {claim.limit:g}" for claim in claims},
        "passed": passed,
        "commit": commit(),
        "seconds": round(seconds),
        "command": f"make proof ROW={row}",
    }
    with LEDGER.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return passed


def _rounded(figure: float | None) -> Any:
    return figure if figure is None or isinstance(figure, int) else float(f"{figure:.4g}")


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
