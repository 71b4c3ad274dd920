"""The verbs that only look: doctor, status, logs, list, explain-error. They write nothing and change no run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agent import monitor
from agent.environment import child_environment, is_secret_name
from agent.folder import RunFolder, read_document
from agent.hints import earliest_traceback, first_traceback, hint, hints, match
from agent.manifest import file_digest
from agent.plan import home
from agent.preflight import GIB, Findings, choose_device
from agent.render import Answer, refusal
from agent.request import absolute
from agent.runner import Context, finished_answer, handle, our_command
from agent.states import UNFINISHED
from agent.system import SOURCE_ROOT, free_disk, package_versions, source_state, vllm_packages
from agent.verifying import first_function
from finetune.errors import FinetuneError
from finetune.records import write_atomically

_PAGE = 50
_TAIL_CHARACTERS = 5000
_IMPORTS = ("torch", "transformers", "peft", "tokenizers", "datasets", "safetensors")
_IMPORT_LIMIT_S = 120.0
_LONGEST_WAIT_S = 3600.0


def doctor(context: Context) -> Answer:
    """Say what this machine offers and what is broken."""
    machine, found = context.machine, Findings()
    device = choose_device("auto", machine, found)
    for name in _IMPORTS:
        if name not in package_versions():
            found.add(
                FinetuneError(
                    "missing_package",
                    f"the package {name} is not installed: pip install {name}",
                    package=name,
                )
            )
    if not found.problems or all(error.code != "missing_package" for error in found.problems):
        found.problems += _broken_imports(context, _IMPORTS)
    engine = vllm_packages()
    if reason := _why_no_engine(context, engine):
        found.warn("no_engine", reason)
    place = home(machine.environ)
    data = {
        "device": device,
        "devices": [
            {"id": item.id, "name": item.name, "memory_bytes": item.memory_bytes} for item in machine.devices
        ],
        "signs_of_devices": list(machine.signs),
        "cores": machine.cores,
        "cpu_bf16": machine.cpu_bf16,
        "memory_bytes": machine.memory_bytes,
        "free_memory_bytes": machine.free_memory_bytes,
        "free_disk_bytes": free_disk(context.cwd),
        "python": sys.version.split()[0],
        "packages": package_versions(),
        "engine": " and ".join(f"{name} {version}" for name, version in engine.items()) or None,
        "source": {"root": str(SOURCE_ROOT), **source_state()},
        "home": str(place),
        "secrets_present": sorted(name for name in machine.environ if is_secret_name(name)),
    }
    if found.problems:
        return refusal("doctor", found.problems, data=data, warnings=found.warnings)
    what = (
        f"{len(machine.devices)} accelerators"
        if machine.devices
        else f"{machine.cores} cores, {machine.free_memory_bytes / GIB:.1f} GiB free"
    )
    return Answer(
        "doctor", "healthy", f"ready to train on {device}: {what}", data=data, warnings=found.warnings
    )


def _why_no_engine(context: Context, engine: dict[str, str]) -> str | None:
    """Return why GRPO can start no vLLM server with this Python, or None."""
    if not engine:
        return "vLLM is not installed: GRPO samples with --engine local, or with a server that runs already"
    broken = _broken_imports(context, ("vllm",))
    return broken[0].message if broken else None


def _broken_imports(context: Context, names: tuple[str, ...]) -> list[FinetuneError]:
    """Import the heavy packages in a child, one after the other, and return an error for the first that fails."""
    code = "import sys, importlib\nfor name in sys.argv[1:]:\n    print(name, flush=True)\n    importlib.import_module(name)\n"
    environment = child_environment(context.machine.environ, {})
    command = [sys.executable, "-c", code, *names]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            FinetuneError(
                "broken_package", f"importing {', '.join(names)} takes more than {_IMPORT_LIMIT_S:g} s"
            )
        ]
    if done.returncode == 0:
        return []
    name = (done.stdout.split() or names)[-1]
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return [FinetuneError("broken_package", f"the package {name} cannot be imported: {last}", package=name)]


def status(name: str, wait_s: float, context: Context) -> Answer:
    """Say how a run stands; with a wait, return when it has ended or the wait has."""
    folder = monitor.find_run(name, context.cwd, context.machine.environ)
    end = time.monotonic() + min(wait_s, _LONGEST_WAIT_S)
    state = monitor.read_state(folder, context.machine.host)
    while state["state"] in UNFINISHED and time.monotonic() < end:
        time.sleep(min(0.5, max(0.0, end - time.monotonic())))
        state = monitor.read_state(folder, context.machine.host)
    answer = _standing(folder, state)
    figures = monitor.progress(folder)
    answer.data |= figures | {
        "operation": state["operation"],
        "checkpoint": state["checkpoint"],
        "ranks": monitor.heartbeats(folder),
        "free_disk_bytes": free_disk(folder.path),
        "hint_id": state["hint_id"],
    }
    if state["state"] in UNFINISHED:
        answer.data["suggested_poll_seconds"] = monitor.poll_seconds(figures.get("eta_s"))
        if wait_s > 0:
            answer.errors = [
                FinetuneError(
                    "still_running",
                    f"the run is still {state['state']} after {wait_s:g} s, step {state['step']}",
                )
            ]
    return answer


def _standing(folder: RunFolder, state: dict[str, Any]) -> Answer:
    """Return the answer about a run in any state; its own error is a fact in data, the look at it has succeeded."""
    manifest = read_document(folder.manifest, "run")
    if state["state"] in UNFINISHED or state["state"] == "lost" or manifest is None:
        answer = handle(folder, state)
        if state["state"] not in UNFINISHED:
            resume = [("go on", our_command("resume", str(folder.path)))]
            answer.next_actions = resume if folder.plan.exists() else []
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
    file = file or ("rank0.log" if "rank0.log" in known else "launch.log")
    lines = monitor.log_lines(folder, file, context.machine.environ)
    if pattern is not None:
        wanted = _expression(pattern)
        lines = [line for line in lines if wanted.search(line)]
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


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise FinetuneError(
            "bad_value", f"grep: {pattern!r} is no regular expression: {error}", setting="grep"
        ) from error


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


def explain_error(what: str, context: Context) -> Answer:
    """Explain an error code, a run that failed, a log file, or a piece of text."""
    if what in hints():
        return _explanation(what, hint(what).cause, {})
    path = Path(absolute(what, context.cwd))
    if os.path.isdir(
        path
    ):  # os.path and not Path: of a text that no path can be it says no instead of raising
        return _explain_run(RunFolder(path))
    if os.path.isfile(path):
        traceback = first_traceback(path)
        return _explain_text(
            traceback.text if traceback else path.read_text(errors="replace"), {"log": str(path)}
        )
    return _explain_text(what, {})


def _explain_run(folder: RunFolder) -> Answer:
    manifest = read_document(folder.manifest, "run")
    if manifest and manifest["error"]:
        error = manifest["error"]
        facts = {"rank": error["rank"], "traceback": error["traceback"]}
        return _explanation(error["hint_id"], error["message"], facts)
    traceback = earliest_traceback(folder.logs)
    if traceback is None:
        return Answer("explain-error", "no error", f"{folder.path} shows no error", run_dir=folder.path)
    return _explain_text(traceback.text, {"log": str(traceback.file), "line": traceback.line})


def _explain_text(text: str, facts: dict[str, Any]) -> Answer:
    known = match(text)
    if known is not None:
        return _explanation(known.hint, known.cause, facts)
    shown = {"text": text.strip().splitlines()[-20:], **facts}
    return Answer("explain-error", "unknown", "the text matches nothing in the catalogue", data=shown)


def _explanation(hint_id: str, cause: str, facts: dict[str, Any]) -> Answer:
    own = hint(hint_id)
    data = {"hint_id": own.id, "cause": cause, "fix": own.fix, "confirm": own.confirm, **facts}
    return Answer("explain-error", "known", f"{own.id}: {cause}", data=data)
