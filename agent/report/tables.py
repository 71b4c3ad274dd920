"""The tables of a report: data ledger, settings with sources, environment, attempts, events, files, and runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.report.figures import duration, figures, held_out_of, moment, number, size
from agent.report.reading import RunRecord

_SOURCES = ("user", "file", "profile", "checkpoint", "plan", "default")  # the chosen ones first
_MOST_PLACES = 20  # of dropped rows
_MOST_EVENTS = 400
_QUIET_EVENTS = ("warning", "sync")  # shown elsewhere, or as many as steps


def data_of(run: RunRecord) -> dict[str, Any]:
    """Return the files with their digests, and the ledger: every row that was read stands in one line of it."""
    files = [
        {
            "use": use,
            "path": str(item.get("path")),
            "rows": number(item.get("rows")),
            "bytes": size(item.get("bytes")),
            "weight": number(item.get("weight")),
            "sha256": str(item.get("sha256") or "–"),
        }
        for use, name in (("training", "files"), ("held out", "eval_files"))
        for item in run.data.get(name) or []
    ]
    ledger = run.data.get("ledger") or (run.plan.get("report") or {}).get("ledger")
    return {"files": files, "ledger": _ledger(ledger) if ledger else None}


def _ledger(ledger: dict[str, Any]) -> dict[str, Any]:
    dropped = _reasons(ledger.get("dropped"))
    parts = [ledger.get("trained", 0), ledger.get("held_out", 0), *(item["count"] for item in dropped)]
    return {
        "read": ledger.get("read", 0),
        "trained": ledger.get("trained", 0),
        "held_out": ledger.get("held_out", 0),
        "dropped": dropped,
        "truncated": _reasons(ledger.get("truncated")),
        "notes": ledger.get("notes") or {},
        "balances": ledger.get("read", 0) == sum(parts),
    }


def _reasons(found: Any) -> list[dict[str, Any]]:
    """Return reason, number of rows and some of their places; a manifest may hold the number alone."""
    reasons = []
    for reason, places in (found or {}).items():
        known = places if isinstance(places, list) else []
        count = len(known) if isinstance(places, list) else int(places or 0)
        reasons.append(
            {"reason": reason, "count": count, "places": [str(place) for place in known[:_MOST_PLACES]]}
        )
    return reasons


def settings_of(run: RunRecord) -> list[dict[str, Any]]:
    """Return the settings with their sources, those that somebody chose first."""
    order = {source: place for place, source in enumerate(_SOURCES)}
    rows = [
        {"name": name, "value": shown_value(item.get("value")), "source": str(item.get("source", "?"))}
        for name, item in run.settings.items()
    ]
    return sorted(rows, key=lambda row: order.get(row["source"], len(order)))


def shown_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def environment_of(run: RunRecord) -> dict[str, list[tuple[str, str]]]:
    """Return tables of name and value: where the run ran, on what, with which packages and source."""
    source, parallel = (
        run.manifest.get("source") or {},
        run.manifest.get("parallel") or run.plan.get("parallel") or {},
    )
    commit = source.get("commit")
    run_rows = [
        ("run folder", str(run.folder.path)),
        ("plan", str(run.manifest.get("plan_id") or run.plan.get("plan_id") or "–")),
        ("host", str(run.manifest.get("host") or run.state.get("host") or "–")),
        (
            "source commit",
            f"{commit}{' with uncommitted changes' if source.get('dirty') else ''}" if commit else "–",
        ),
        ("created", moment(run.manifest.get("created"))),
        ("started", moment(run.manifest.get("started"))),
        ("ended", moment(run.manifest.get("ended"))),
        ("again", str(run.manifest.get("cmd_replay") or "–")),
        ("gives the same run", _yes(run.manifest.get("ok_to_replay"))),
    ]
    model = {name: value for name, value in run.model.items() if not isinstance(value, dict | list)}
    facts = {name: value for name, value in run.facts.items() if not isinstance(value, dict)}
    return {
        "Run": run_rows,
        "Model": [(name.replace("_", " "), number(value)) for name, value in model.items()],
        "Parallel": [(name.replace("_", " "), _plain(value)) for name, value in (parallel | facts).items()],
        "Packages": [(name, str(version)) for name, version in (run.manifest.get("packages") or {}).items()],
    }


def _yes(value: Any) -> str:
    return (
        "–"
        if value is None
        else "yes"
        if value
        else "not surely: the source had no commit, or changes beside it"
    )


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{name}={_plain(item)}" for name, item in value.items())
    return number(value)


def attempts_of(run: RunRecord) -> list[dict[str, str]]:
    """Return the attempts of a run, and what was another when it was taken up again."""
    rows, before = [], None
    for attempt in run.attempts:
        end = attempt.get("ended")
        taken_up = attempt.get("resumed_from")
        rows.append(
            {
                "started": moment(attempt.get("started")),
                "took": duration(end - attempt["started"]) if end and attempt.get("started") else "–",
                "status": str(attempt.get("status")),
                "exit_code": number(attempt.get("exit_code")),
                "from": "the beginning" if taken_up is None else f"step {taken_up}",
                "where": f"{attempt.get('host')}, {attempt.get('num_gpus')} x {attempt.get('device')}",
                "changed": _changed(before, attempt),
            }
        )
        before = attempt
    return rows


def _changed(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    if before is None:
        return ""
    names = [name for name in ("num_gpus", "device", "host", "source") if before.get(name) != now.get(name)]
    old, new = before.get("packages") or {}, now.get("packages") or {}
    names += sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return ", ".join(names)


def events_of(run: RunRecord) -> dict[str, Any]:
    """Return what happened besides steps and syncs, the newest of it, and how much older there is."""
    wanted = [event for event in run.events if event.get("kind") not in _QUIET_EVENTS]
    rows = [
        {
            "time": moment(event.get("time")),
            "kind": str(event.get("kind")),
            "facts": _plain({name: value for name, value in event.items() if name not in ("time", "kind")}),
        }
        for event in wanted[-_MOST_EVENTS:]
    ]
    return {"rows": rows, "num_older": len(wanted) - len(rows), "num_syncs": len(run.events_of("sync"))}


def artifacts_of(run: RunRecord) -> list[dict[str, str]]:
    """Return the files that the run left, with the digests that were taken when it ended, and whether they still are there."""
    rows = []
    for item in run.manifest.get("outputs") or []:
        path = Path(str(item.get("path")))
        found = path.stat().st_size if path.is_file() else None
        digest = str(item.get("sha256") or "–")
        there = size(found) if found is not None else "is not there any more"
        rows.append({"kind": str(item.get("kind")), "path": str(path), "sha256": digest, "size": there})
    checkpoint = run.folder.last_checkpoint()
    if checkpoint is not None:
        kind = {"kind": "checkpoint", "path": str(checkpoint), "sha256": "in its manifest.json"}
        rows.append(kind | {"size": f"the newest of {_checkpoints(run)}"})
    return rows


def _checkpoints(run: RunRecord) -> int:
    return len(list((run.folder.path / "checkpoints").glob("step-*/manifest.json")))


def comparison(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the rows of the table that puts runs side by side: a name, and one value for each run."""
    columns = [_summary(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [{"name": name, "values": [column.get(name, "–") for column in columns]} for name in names]
    return [row for row in rows if any(value != "–" for value in row["values"])]


def _summary(run: RunRecord) -> dict[str, str]:
    held_out = held_out_of(run)
    found = {
        "status": run.status,
        "method": run.method,
        "model": str(run.model.get("id") or shown_value((run.settings.get("model") or {}).get("value"))),
        "started": moment(run.manifest.get("started")),
    }
    for figure in figures(run):
        found[figure["label"]] = figure["value"]
    if held_out["lift"]:
        lift = held_out["lift"]
        found[f"lift of {lift['of']}"] = f"{lift['mean']} ({lift['interval']}; {lift['judged']})"
    found["source commit"] = str((run.manifest.get("source") or {}).get("commit") or "–")[:12]
    found["data"] = ", ".join(item["sha256"][:12] for item in data_of(run)["files"]) or "–"
    return found


def differences(runs: Sequence[RunRecord], table: str) -> list[dict[str, Any]]:
    """Return what differs between runs, of their settings or packages: a name, and one value for each run."""
    columns = []
    for run in runs:
        if table == "settings":
            columns.append({name: shown_value(item.get("value")) for name, item in run.settings.items()})
        else:
            columns.append({name: str(value) for name, value in (run.manifest.get("packages") or {}).items()})
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [{"name": name, "values": [column.get(name, "–") for column in columns]} for name in names]
    return [row for row in rows if len(set(row["values"])) > 1]
