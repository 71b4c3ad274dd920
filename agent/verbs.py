"""The verbs that only look: status, logs, list, explain-error. They write nothing and change no run."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agent import handles, monitor
from agent.attempt import NOTHING_SPENT
from agent.budgets import left
from agent.folder import RunFolder, read_document
from agent.hints import described, hint
from agent.manifest import file_digest
from agent.plan import read_plan
from agent.render import Answer
from agent.request import absolute
from agent.runner import Context
from agent.standing import finished_answer, handle, our_command, stored_errors
from agent.states import UNFINISHED
from agent.system import free_disk
from agent.verifying import first_function
from finetune.errors import STOPPED, FinetuneError
from finetune.records import read_lines, to_json, write_atomically

_PAGE = 50
_TAIL_CHARACTERS = 5000
_SEARCH_S = 4.0  # a call of a tool has five
_EVENT_CHARACTERS = 3500
_LONGEST_WAIT_S = 3600.0


def status(name: str, wait_s: float, since: int | None, context: Context) -> Answer:
    """Say how a run or a job stands; with a wait, return when it has ended, or told more than `since`, or the wait is over."""
    if job := handles.find_job(name, context.machine.environ):
        return handles.job_status(job, min(wait_s, _LONGEST_WAIT_S), context)
    folder = monitor.find_run(name, context.cwd, context.machine.environ)
    end = time.monotonic() + min(wait_s, _LONGEST_WAIT_S)
    state = monitor.read_state(folder, context.machine.host)
    while state["state"] in UNFINISHED and time.monotonic() < end and not _has_news(folder, since):
        time.sleep(min(0.5, max(0.0, end - time.monotonic())))
        state = monitor.read_state(folder, context.machine.host)
    answer = _standing(folder, state)
    figures = monitor.progress(folder)
    known = {"num_steps": state["num_steps"]} if state["num_steps"] else {}  # also before the first step
    answer.data |= figures | known
    answer.data |= {
        "operation": state["operation"],
        "checkpoint": state["checkpoint"],
        "ranks": monitor.heartbeats(folder),
        "free_disk_bytes": free_disk(folder.path),
        "hint_id": state["hint_id"],
    }
    plan = read_plan(folder.plan)
    if plan is not None and (remaining := left(plan, state.get("spent") or NOTHING_SPENT)):
        answer.data["budget"] = remaining
    if since is not None:
        answer.data |= _events(folder, since)
    if state["state"] in UNFINISHED:
        answer.warnings += [(item["code"], item["text"]) for item in state.get("warnings", [])]
        answer.data["suggested_poll_s"] = monitor.poll_seconds(figures.get("eta_s"))
        if wait_s > 0 and not _has_news(folder, since):
            answer.errors = [
                FinetuneError(
                    "still_running",
                    f"the run is still {state['state']} after {wait_s:g} s, step {state['step']}",
                )
            ]
    return answer


def _has_news(folder: RunFolder, since: int | None) -> bool:
    return since is not None and len(read_lines(folder.events)) > since


def _events(folder: RunFolder, since: int) -> dict[str, Any]:
    """Return the events after number `since` (the first is 1), as many as an answer has room for."""
    events, room = read_lines(folder.events), _EVENT_CHARACTERS
    shown: list[dict[str, Any]] = []
    for number, event in enumerate(events[since:], since + 1):
        room -= len(to_json(event))
        if shown and room < 0:
            break
        shown.append({"number": number, **event})
    last = shown[-1]["number"] if shown else min(since, len(events))
    return {"events": shown, "last_event": last, "more_events": last < len(events)}


def _standing(folder: RunFolder, state: dict[str, Any]) -> Answer:
    """Return the answer about a run in any state; its own error is a fact in data, the look at it has succeeded."""
    manifest = read_document(folder.manifest, "run")
    errors = stored_errors(state)
    # What the manifest tells of another end is of an attempt before this one, which was stopped in its checks.
    is_told = manifest is not None and manifest["status"] == state["state"]
    if state["state"] in UNFINISHED or state["state"] == "lost" or manifest is None or errors or not is_told:
        answer = handle(folder, state)
        if state["state"] in ("stopped", "preempted"):
            answer.data |= {"exit_code": STOPPED, "error": None}
        if state["state"] not in UNFINISHED:
            resume = [("go on", our_command("resume", str(folder.path)))]
            answer.next_actions = resume if folder.plan.exists() else []
        if errors:
            answer.summary = f"{state['state']} before it trained: {errors[0].message}"
            told = [described(error) for error in errors]
            answer.data |= {"exit_code": errors[0].exit_code, "error": told[0], "errors": told}
            answer.next_actions.insert(0, ("read its log", our_command("logs", str(folder.path))))
        return answer
    answer = finished_answer("status", folder, state["state"], None, [])
    error = manifest["error"]
    answer.data["exit_code"] = manifest["exit_code"]
    answer.data["error"] = error and error | {
        "fix": hint(error["hint_id"]).fix,
        "confirm": hint(error["hint_id"]).confirm,
    }
    if error:
        answer.summary = f"{state['state']} at step {state['step']}: {error['message']}"
    elif state["state"] != "succeeded":
        answer.summary = f"{state['state']} after step {state['step']} of {state['num_steps'] or '?'}"
    return answer


def logs(
    name: str, file: str | None, pattern: str | None, offset: int | None, limit: int, context: Context
) -> Answer:
    """Show lines of a log: the last ones, or those from an offset on."""
    folder = monitor.find_run(name, context.cwd, context.machine.environ)
    known = monitor.log_files(folder)
    usual = ("rank0.log", "launch.log", "supervisor.log")
    file = file or next((name for name in usual if name in known), usual[0])
    lines = monitor.log_lines(folder, file, context.machine.environ)
    if pattern is not None:
        lines = _matching(lines, pattern)
    start = _tail_start(lines, limit) if offset is None else max(0, offset)
    data = {
        "file": str(folder.logs / file),
        "files": known,
        "first_line": start,
        "lines": lines[start : start + limit],
    }
    summary = f"{file}: {len(lines)} lines"
    return Answer(
        "logs", "done", summary, None, folder.path, data, pages="lines", offset=start, total=len(lines)
    )


def _tail_start(lines: list[str], limit: int) -> int:
    """Return the first of the last lines that fit into an answer, so many at most."""
    start, room = len(lines), _TAIL_CHARACTERS
    while start > 0 and len(lines) - start < limit and room > 0:
        start -= 1
        room -= len(lines[start]) + 4
    return start


# A search that backtracks for ever can be ended from outside alone.
_SEARCH = (
    "import re, sys\nwanted = re.compile(sys.argv[1])\n"
    "for number, line in enumerate(sys.stdin.read().split('\\n')):\n    if wanted.search(line):\n        print(number)"
)


def _matching(lines: list[str], pattern: str) -> list[str]:
    """Return the lines with a regular expression in them; raise FinetuneError(bad_value) where it is none or takes too long."""
    try:
        re.compile(pattern)
    except re.error as error:
        text = f"grep: {pattern!r} is no regular expression: {error}"
        raise FinetuneError("bad_value", text, setting="grep") from error
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _SEARCH, pattern]
    try:
        given = "\n".join(lines).encode("utf-8", "replace")
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, timeout=_SEARCH_S, check=True)
    except subprocess.TimeoutExpired as error:
        text = f"grep: {pattern!r} takes more than {_SEARCH_S:g} s on this log: give a simpler one"
        raise FinetuneError("bad_value", text, setting="grep") from error
    return [lines[int(number)] for number in done.stdout.split()]


def verifier_skeleton(name: str, context: Context) -> Answer:
    """Write a verifier that works as it stands; a file with other content is never written over."""
    from finetune.domains.checking import skeleton  # here, for other verbs shall not wait for it

    path = Path(absolute(name, context.cwd))
    if path.suffix != ".py":
        raise FinetuneError("bad_value", f"file: {path.name} must end in .py", setting="file")
    text = skeleton()
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise FinetuneError("target_exists", f"file: {path} exists and holds something else", setting="file")
    write_atomically(path, text)
    spec = f"{path}:{first_function(text)}"
    wanted = (
        "run",
        "--method",
        "grpo",
        "--model",
        "MODEL",
        "--data",
        "DATA",
        "--verifier",
        spec,
        "--dry-run",
    )
    return Answer(
        "verifier-skeleton",
        "done",
        f"{path} is written; --verifier {spec} scores with it",
        data={"verifier": spec},
        next_actions=[("plan a run with it", our_command(*wanted))],
        artifacts=[{"kind": "verifier", "path": str(path), "sha256": file_digest(path)}],
    )


def list_jobs(offset: int, context: Context) -> Answer:
    """Show the jobs that this user started, newest first."""
    jobs = handles.known_jobs(context.machine.environ)
    data = {"jobs": handles.rows(jobs[offset : offset + _PAGE])}
    summary = f"{len(jobs)} jobs"
    return Answer("list", "done", summary, data=data, pages="jobs", offset=offset, total=len(jobs))


def list_runs(offset: int, context: Context) -> Answer:
    """Show the runs that this user started, newest first."""
    runs = monitor.known_runs(context.machine.environ)
    rows = [_row(entry, context.machine.host) for entry in runs[offset : offset + _PAGE]]
    summary = f"{len(runs)} runs"
    return Answer("list", "done", summary, data={"runs": rows}, pages="runs", offset=offset, total=len(runs))


def _row(entry: dict[str, Any], host: str) -> dict[str, Any]:
    named = {"run_id": entry["run_id"], "run_dir": entry["run_dir"]}
    try:
        state = monitor.read_state(RunFolder(Path(entry["run_dir"])), host)
    except FinetuneError:
        return named | {"state": "unreadable", "step": None}
    return named | {"state": state["state"], "step": state["step"]}
