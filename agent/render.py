"""The answer: the one JSON object that every script and verb prints, bounded, clean, and in step with the exit code.

ok is true exactly when the exit code is 0. Text from data, logs and models is untrusted: capped, without control codes.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.environment import scrub
from agent.folder import SCHEMA_VERSION
from agent.hints import described, hint
from finetune.errors import DONE, FinetuneError
from finetune.records import jsonable

MOST_CHARACTERS = 8000
_MOST_OF_A_PAGE = 7000  # the status of a job says some more around the page that is its result
_MOST_OF_A_COMMAND = 400
_MOST_SUMMARY = 400
# C0 but tab and line feed, DEL and C1, lone surrogates, and the marks that reorder text on a screen.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)")
# Tried in turn until the answer fits: the longest string, the longest list.
_LIMITS = ((2000, 100), (1000, 50), (500, 20), (300, 10), (200, 5), (120, 3), (60, 2))


@dataclass
class Answer:
    """What a verb answers. exit_code is not printed: ok says whether it is 0.

    pages names the list in data that may be long: what fits of it is printed, and next_offset tells where to go on.
    """

    command: str
    status: str = "done"
    summary: str = ""
    run_id: str | None = None
    run_dir: Path | None = None
    data: dict[str, Any] = field(default_factory=dict)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    errors: list[FinetuneError] = field(default_factory=list)
    next_actions: list[tuple[str, list[str]]] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    pages: str | None = None
    offset: int = 0
    total: int | None = None  # items in all, where data holds not all that follow the offset

    @property
    def exit_code(self) -> int:
        return self.errors[0].exit_code if self.errors else DONE


def refusal(command: str, errors: Iterable[FinetuneError], **about: Any) -> Answer:
    """Return the answer to a request that cannot be met."""
    found = list(errors)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Answer(command, "refused", found[0].message + more, errors=found, **about)


def clean(text: str, most: int) -> str:
    """Return untrusted text without control codes, capped."""
    text = _CONTROL.sub("", _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
    return text if len(text) <= most else text[: most - 3] + "..."


def document(answer: Answer) -> dict[str, Any]:
    """Return the answer as the JSON object of agent/schemas/answer.json, at most MOST_CHARACTERS long."""
    if answer.pages:
        return _paged(answer)
    return _fitted(_object(answer), False, None)


def text_of(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _object(answer: Answer) -> dict[str, Any]:
    warnings = [{"hint_id": hint(code).id, "text": text} for code, text in dict.fromkeys(answer.warnings)]
    value = {
        "schema_version": SCHEMA_VERSION,
        "ok": answer.exit_code == DONE,
        "command": answer.command,
        "status": answer.status,
        "run_id": answer.run_id,
        "run_dir": None if answer.run_dir is None else str(answer.run_dir),
        "summary": clean(" ".join(answer.summary.split()), _MOST_SUMMARY),
        "data": answer.data,
        "warnings": warnings,
        "errors": [described(error) for error in answer.errors],
        "next_actions": [{"why": why, "argv": argv} for why, argv in answer.next_actions],
        "artifacts": answer.artifacts,
        "truncated": False,
        "next_offset": None,
    }
    return scrub(jsonable(value))


def _paged(answer: Answer) -> dict[str, Any]:
    """Fit as many items of the paged list as there is room for, at least one."""
    items = answer.data[str(answer.pages)]
    least, most = min(1, len(items)), min(len(items), _LIMITS[0][1])
    while least < most:
        middle = (least + most + 1) // 2
        if len(text_of(_page(answer, items, middle))) <= _MOST_OF_A_PAGE:
            least = middle
        else:
            most = middle - 1
    page = _page(answer, items, least)
    return _fitted(page, page["truncated"], page["next_offset"])


def _page(answer: Answer, items: list[Any], count: int) -> dict[str, Any]:
    shown = answer.data | {str(answer.pages): items[:count]}
    value = _clean(_object(replace(answer, data=shown)), *_LIMITS[0])
    end = answer.offset + count
    is_cut = end < (answer.offset + len(items) if answer.total is None else answer.total)
    return value | {"truncated": is_cut, "next_offset": end if is_cut else None}


def _fitted(value: dict[str, Any], truncated: bool, next_offset: int | None) -> dict[str, Any]:
    whole = _clean(value, sys.maxsize, sys.maxsize)
    for most_text, most_items in _LIMITS:
        fitted = _clean(value, most_text, most_items)
        fitted |= {"truncated": truncated or fitted != whole, "next_offset": next_offset}
        if len(text_of(fitted)) <= MOST_CHARACTERS:
            return fitted
    return fitted | {"data": {}, "next_actions": [], "artifacts": [], "truncated": True}


def _clean(value: Any, most_text: int, most_items: int, key: str = "") -> Any:
    if isinstance(value, str):
        return value if key == "argv" else clean(value, most_text)
    if isinstance(value, dict):
        if key == "job" and "argv" in value:
            value = value | {"argv": _beginning(value["argv"])}
        return {clean(name, 200): _clean(item, most_text, most_items, name) for name, item in value.items()}
    if isinstance(value, list):
        kept = value if key == "argv" else value[:most_items]
        return [_clean(item, most_text, most_items, key) for item in kept]
    return value


def _beginning(argv: list[str]) -> list[str]:
    """Return as much of a job's command as says what it is: prompts in it would take the room of its result."""
    kept: list[str] = []
    for argument in argv:
        room = _MOST_OF_A_COMMAND - sum(map(len, kept))
        kept.append(clean(argument, max(room, 3)))
        if room < len(argument):
            break
    return kept


def for_people(value: dict[str, Any]) -> str:
    """Return the short text that a terminal shows in place of the JSON object."""
    lines = [
        f"{value['command']}: {value['status']}" + (f" - {value['summary']}" if value["summary"] else "")
    ]
    for error in value["errors"]:
        lines += [
            f"error {error['code']}: {error['cause']}",
            f"  fix: {error['fix']}",
            f"  confirm: {error['confirm']}",
        ]
    lines += [f"warning {warning['hint_id']}: {warning['text']}" for warning in value["warnings"]]
    if value["run_dir"]:
        lines.append(f"run folder: {value['run_dir']}")
    lines += _shown(value["data"])
    lines += [f"{artifact['kind']}: {artifact['path']}" for artifact in value["artifacts"]]
    lines += [f"next: {action['why']}: {shlex.join(action['argv'])}" for action in value["next_actions"]]
    return "\n".join(lines)


def _shown(data: dict[str, Any]) -> list[str]:
    """Return simple values of an answer's data, and the lines of lists of text, as people read them."""
    lines = [
        f"{name.replace('_', ' ')}: {item}"
        for name, item in data.items()
        if isinstance(item, str | int | float) and item != ""
    ]
    for name, items in data.items():
        if isinstance(items, list) and items and all(isinstance(item, str) for item in items):
            lines += [f"{name}:", *(f"  {item}" for item in items)]
    return lines
