"""The pages that people and agents read: their commands, the answers shown after them, and the flags that they name."""

import json
import re
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

from agent.states import UNFINISHED
from scripts.make_docs import ROOT, SKILL_PAGES

PAGES = ("README.md", "SKILL.md", *SKILL_PAGES)
GENERATED = re.compile(r"<!-- begin .*?<!-- end [\w-]+ -->", re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# What a page writes where a reader puts a value of their own.
PLACEHOLDERS = ("RUN", "PLAN_ID", "JOB_ID")


@dataclass(frozen=True)
class Shown:
    """An answer that a page shows after a command."""

    page: str
    answer: dict[str, Any]


@cache
def page_text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """Return a page without its generated tables."""
    return GENERATED.sub("", page_text(page))


def tables() -> str:
    """Return all generated tables together."""
    return "\n".join(found[0] for page in PAGES for found in GENERATED.finditer(page_text(page)))


@cache
def commands() -> dict[str, list[Shown]]:
    """Return each command of the pages' shell blocks, as a reader types it, with the answers shown after it."""
    found: dict[str, list[Shown]] = {}
    for page in PAGES:
        text, last, end = prose(page), "", 0
        for block in _BLOCK.finditer(text):
            follows = not text[end : block.start()].strip()
            kind, content = block.groups()
            end = block.end()
            if kind == "json" and last and follows:
                found[last].append(Shown(page, json.loads(content)))
            last = ""
            if kind == "sh":
                for line in lines_of(content):
                    found.setdefault(line, [])
                    last = line
    return found


def lines_of(block: str) -> list[str]:
    """Return the commands of a shell block without their comments, the program as `finetune`."""
    lines = [line.split("  #")[0].strip() for line in block.splitlines()]
    return [re.sub(r"^\.venv/bin/", "", line) for line in lines if line]


def filled_in(command: str, values: dict[str, str]) -> list[str]:
    """Return the argv of a command with the reader's own values in it."""
    return [values.get(word, word) for word in shlex.split(command)]


def differences(shown: Any, real: Any, place: str = "answer") -> list[str]:
    """Return where a real answer lacks what a page shows: keys and kinds of values; ok, command and status as they are.

    An empty list or object shown says nothing, of a list its first item is compared, and a null may be any value. A run
    under way may have any of the states before its end.
    """
    if isinstance(shown, dict) and isinstance(real, dict):
        found = [f"{place}.{key} is not there" for key in shown if key not in real]
        for key in (key for key in shown if key in real):
            found += differences(shown[key], real[key], f"{place}.{key}")
        return found
    if isinstance(shown, list) and isinstance(real, list):
        if shown and not real:
            return [f"{place} is empty"]
        return differences(shown[0], real[0], f"{place}[0]") if shown else []
    if place in ("answer.ok", "answer.command", "answer.status"):
        is_same = shown == real or {shown, real} <= set(UNFINISHED)
        return [] if is_same else [f"{place} is {real!r} and not {shown!r}"]
    if shown is None or real is None or _kind(shown) is _kind(real):
        return []
    return [f"{place} is {real!r}, of another kind than {shown!r}"]


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)
