"""A run folder as a report reads it: documents, metrics, events, attempts and what its logs say; nothing is written.

Whatever a run has not written yet is left out, so that a run under way, a failed one and one made by hand all can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.folder import RunFolder, read_document
from agent.health import health
from agent.hints import findings, hints
from agent.states import judged
from finetune.errors import FinetuneError

_BAD_ENDS = ("failed", "lost")


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds; a document that is not there is {}. unreadable: lines left out, by file."""

    folder: RunFolder
    manifest: dict[str, Any]
    plan: dict[str, Any]
    state: dict[str, Any]
    outcome: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    unreadable: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.manifest.get("run_id") or self.state.get("run_id") or self.folder.path.name)

    @property
    def method(self) -> str:
        return str(self.manifest.get("method") or self.plan.get("method") or "unknown")

    @property
    def status(self) -> str:
        return str(self.state.get("state") or self.manifest.get("status") or "unknown")

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        found = self.manifest.get("settings") or self.plan.get("settings") or {}
        return {name: item for name, item in found.items() if isinstance(item, dict) and "value" in item}

    @property
    def model(self) -> dict[str, Any]:
        known = self.manifest.get("model") or self.plan.get("model") or {}
        return known if isinstance(known, dict) else {}

    @property
    def data(self) -> dict[str, Any]:
        return self.manifest.get("data") or self.plan.get("data") or {}

    @property
    def result(self) -> dict[str, Any]:
        """What training reported at its end; of a folder without a manifest, from outcome.json."""
        return self.manifest.get("result") or self.outcome.get("result") or {}

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.get("facts") or self.result.get("facts") or {}

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return self.manifest.get("attempts") or []

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") == kind]

    def last(self, name: str) -> Any:
        """Return the newest value of a metric, None where it was never known."""
        return next((line[name] for line in reversed(self.metrics) if line.get(name) is not None), None)


def read_run(folder: RunFolder, host: str) -> RunRecord:
    """Return what the folder holds; raise FinetuneError(run_missing) where it is no run folder."""
    manifest = read_document(folder.manifest, "run") or {}
    state = read_document(folder.state, "state") or {}
    plan, outcome = _object(folder.plan), _object(folder.outcome)
    if not (manifest or state or plan):
        text = f"{folder.path} is no run folder: it has no plan.json, run.json or state.json"
        raise FinetuneError("run_missing", text, run=str(folder.path))
    if state:
        state = judged(state, folder, host)
    unreadable: dict[str, int] = {}
    metrics = [line for line in _lines(folder.metrics, unreadable) if isinstance(line.get("step"), int)]
    events = _lines(folder.path / "events.jsonl", unreadable)
    return RunRecord(folder, manifest, plan, state, outcome, metrics, events, unreadable)


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, {} where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _lines(path: Path, unreadable: dict[str, int]) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file; the last line may be half written, any other that is no object is counted."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[:-1]:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            unreadable[path.name] = unreadable.get(path.name, 0) + 1
    return found


def error_of(run: RunRecord) -> dict[str, Any] | None:
    """Return what went wrong with its hint: the manifest's error, else of a failed or lost run what its logs say first."""
    error = run.manifest.get("error")
    if error:
        facts = {name: error.get(name) for name in ("code", "message", "rank", "traceback")}
        own_fix = (error.get("evidence") or {}).get("fix")
        return facts | _hint(error.get("hint_id") or error.get("code"), own_fix)
    if run.status not in _BAD_ENDS:
        return None
    found = next(iter(findings(list(run.folder.logs.glob("*.log")))), None)
    if found is None:
        nothing = "no log holds an error; the process was ended from outside"
        return {"code": run.status, "message": nothing, "rank": None, "traceback": None} | _hint(None)
    message = f"{found.file.name if found.file else 'log'}, line {found.line}: {found.error}"
    hint = _hint(found.known.hint if found.known else None, found.fix)
    return {"code": run.status, "message": message, "rank": None, "traceback": found.text[-4000:]} | hint


def _hint(hint_id: Any, own_fix: Any = None) -> dict[str, Any]:
    """Return a hint as a page shows it; own_fix: in place of its own, where more was known."""
    own = hints().get(str(hint_id))
    if own is None:
        return {"hint_id": None, "cause": None, "fix": own_fix, "confirm": None}
    return {"hint_id": own.id, "cause": own.cause, "fix": own_fix or own.fix, "confirm": own.confirm}


def warnings_of(run: RunRecord) -> list[dict[str, str]]:
    """Return the warnings of plan, preparation and training, and the rules that the last steps break; each once."""
    planned = [(item.get("hint_id"), item.get("text")) for item in _dicts(run.manifest.get("warnings"))]
    told = [(event.get("code"), event.get("text")) for event in run.events_of("warning")]
    broken = [(item.get("hint_id"), item.get("text")) for item in _dicts(health(run.metrics))]
    unreadable = [("bad_row", f"{name}: {count} lines are no JSON") for name, count in run.unreadable.items()]
    every = dict.fromkeys((str(code), str(text)) for code, text in (*planned, *told, *broken, *unreadable))
    return [{"code": code, "text": text, "fix": str(_hint(code)["fix"] or "")} for code, text in every]


def _dicts(items: Iterable[Any] | None) -> list[dict[str, Any]]:
    return [item for item in items or () if isinstance(item, dict)]
