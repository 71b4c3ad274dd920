"""The verb explain-error: what a code, a run, a log, a folder of logs or a piece of text means."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from agent import monitor
from agent.folder import RunFolder, read_document
from agent.hints import Finding, findings, findings_of, hint, hints, logs_of, match
from agent.render import Answer
from agent.request import absolute
from agent.runner import Context
from agent.tracebacks import lines_of, read_lines
from finetune.errors import FinetuneError

_LINES_SHOWN = 20
_OTHERS_SHOWN = 5


def explain_error(what: str, context: Context) -> Answer:
    """Explain an error code, a run that failed, a log, a folder of logs, or a piece of text."""
    if what in hints():
        own = hint(what)
        return _known(own.id, own.cause, {})
    path = Path(absolute(what, context.cwd))
    # os.path and not Path: of a text that no path can be it says no instead of raising
    if os.path.isdir(path):
        return _explain_folder(path)
    if os.path.isfile(path):
        if answer := _answer_in(path):
            return answer
        return _explain_found(findings_of(read_lines(path), path), _tail(path))
    if run := _run_named(what, context):
        return _explain_run(run)
    return _explain_text(what)


def _explain_folder(path: Path) -> Answer:
    """Explain the folder of a run, that of a job, or one of logs."""
    run = RunFolder(path)
    is_job = (path / "request.json").exists()
    if not is_job and any(file.exists() for file in (run.plan, run.manifest, run.state)):
        return _explain_run(run)
    return _answer_in(path / "answer.json") or _explain_logs(path, logs_of(path))


def _answer_in(path: Path) -> Answer | None:
    """Explain the first error of an answer that this program printed; None where the file holds none."""
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        errors = json.loads(path.read_text(encoding="utf-8"))["errors"]
        error = errors[0] if errors else None
        if error is None:
            return Answer("explain-error", "no error", f"{path} is an answer without errors")
        return _known(error["hint_id"], error["cause"], {"evidence": error["evidence"], "fix": error["fix"]})
    except (OSError, ValueError, KeyError, TypeError, FinetuneError):
        return None


def _run_named(what: str, context: Context) -> RunFolder | None:
    """Return the run of this id, if `what` is one."""
    if "/" in what or len(what) > 200 or "\n" in what:
        return None
    try:
        return monitor.find_run(what, context.cwd, context.machine.environ)
    except FinetuneError:
        return None


def _explain_run(run: RunFolder) -> Answer:
    """Explain a run by its manifest, else by its logs, else by what its metrics look like."""
    state = read_document(run.state, "state")
    if state and state.get("errors"):  # of full checks that failed, after whatever earlier attempts did
        first = state["errors"][0]
        return _known(first["hint_id"], first["message"], {"evidence": first["evidence"]}, run.path)
    manifest = read_document(run.manifest, "run")
    if manifest and manifest["error"]:
        error = manifest["error"]
        facts = {"rank": error["rank"], "traceback": error["traceback"]}
        if fix := (error.get("evidence") or {}).get("fix"):
            facts["fix"] = fix
        return _known(error["hint_id"], error["message"], facts, run.path)
    found = findings(logs_of(run.logs))
    if found:
        return _explain_found(found, [], run.path)
    health = monitor.progress(run).get("health") or []
    text = f"{run.path} shows no error" + (f", but: {health[0]['text']}" if health else "")
    return Answer("explain-error", "no error", text, run_dir=run.path, data={"health": health})


def _explain_logs(folder: Path, logs: list[Path]) -> Answer:
    if not logs:
        return Answer("explain-error", "no error", f"{folder} holds no logs")
    found = findings(logs)
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    return _explain_found(found, _tail(newest))


def _tail(path: Path) -> list[str]:
    lines = [line.text for line in read_lines(path) if line.text.strip()]
    return lines[-_LINES_SHOWN:]


def _explain_text(text: str) -> Answer:
    """Explain a text that is no log: any pattern may stand anywhere in it."""
    found = findings_of(lines_of(text))
    if not any(finding.traceback for finding in found) and (known := match(text)):
        found = [Finding(None, 1, "", _line_with(text, known.pattern), text, None, known)]
    return _explain_found(found, text.strip().splitlines()[-_LINES_SHOWN:])


def _line_with(text: str, pattern: Any) -> str:
    return next((line.strip() for line in text.splitlines() if pattern.search(line)), text.strip()[:500])


def _explain_found(found: list[Finding], tail: list[str], run_dir: Path | None = None) -> Answer:
    """Answer with the first of the findings; without one the text is unknown and its end is shown."""
    if not found:
        return _unknown("the text matches nothing in the catalogue", {"text": tail}, run_dir)
    first, *rest = found
    facts: dict[str, Any] = {
        "error": first.error,
        "log": first.file and str(first.file),
        "line": first.line if first.file else None,
        "text": first.text.splitlines()[-_LINES_SHOWN:],
        "others": [_short(finding) for finding in rest[:_OTHERS_SHOWN]],
    }
    if first.known is None:
        assert first.traceback is not None, "a line is found by a pattern"
        facts["last_frame"] = first.traceback.last_frame
        return _unknown(f"nothing in the catalogue explains: {first.error}", facts, run_dir)
    known = first.known
    return _known(known.hint, known.cause, facts | {"pattern": known.id, "fix": first.fix}, run_dir)


def _short(finding: Finding) -> dict[str, Any]:
    return {
        "hint_id": finding.known.hint if finding.known else None,
        "error": finding.error[:300],
        "log": finding.file and finding.file.name,
        "line": finding.line,
    }


def _known(hint_id: str, cause: str, facts: dict[str, Any], run_dir: Path | None = None) -> Answer:
    own = hint(hint_id)
    data = {"hint_id": own.id, "cause": cause, "fix": own.fix, "confirm": own.confirm, **facts}
    return Answer("explain-error", "known", f"{own.id}: {cause}", run_dir=run_dir, data=data)


def _unknown(summary: str, facts: dict[str, Any], run_dir: Path | None) -> Answer:
    return Answer("explain-error", "unknown", summary, run_dir=run_dir, data={"hint_id": None, **facts})
