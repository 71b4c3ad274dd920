"""Detached runs: `start` answers within two seconds, and a process of its own does what `run` does.

    python -m agent.supervisor RUN_DIR LOCK

The caller makes the quick plan, looks at what stands in the folder and takes its lock; the supervisor inherits the lock,
says in state.json that it is at work, makes the full checks, trains, and writes down how it ended. It is nobody's child.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.decisions import RUN_ID
from agent.environment import scrub
from agent.folder import RunFolder, locked, new_run_id, read_document
from agent.monitor import known_runs
from agent.plan import differences, home, make_plan, read_plan
from agent.processes import Interrupts, ProcessId, Streams, start_detached, wait_until
from agent.render import Answer, document, refusal, text_of
from agent.request import Request, understand
from agent.runner import (
    CONFIRMED,
    Consent,
    Context,
    Start,
    conclude,
    guarded,
    held_back,
    make_folders,
    placed,
)
from agent.standing import await_state, handle, in_use, run_folder_of, standing, stored_errors
from agent.states import judged
from agent.system import import_path, read_machine
from finetune.errors import FinetuneError
from finetune.knobs import knobs
from finetune.methods import method_named
from finetune.records import to_json, write_atomically

_TAKEN_OVER_WITHIN_S = 30.0  # it takes half a second; more on a machine that is busy
_OTHERS_START_WITHIN_S = 30.0
_LOG_TAIL = 2000


@dataclass(frozen=True)
class Wish:
    """How a run is to be started.

    is_new: in a folder of its own although the same plan ran before. plan: the stored plan that is to be done as it is.
    """

    consent: Consent = CONFIRMED
    verify_model: bool = False
    is_new: bool = False
    is_extension: bool = False
    plan: dict[str, Any] | None = None


def start(request: Request, context: Context, wish: Wish) -> Answer:
    """Start or resume a run in a process of its own, or answer with the run of this plan that is there already."""
    plan, found = make_plan(request, context.machine, context.cwd, wish.verify_model)
    if found.problems:
        return refusal("start", found.problems, warnings=found.warnings)
    if wish.plan is not None:
        _check_unchanged(wish.plan, plan)
    is_open = RUN_ID in plan["settings"]["out"]["value"]
    if wish.is_new and not is_open:
        text = "new: --out names the folder; leave one of the two out"
        raise FinetuneError("settings_conflict", text, setting="new")
    with _alone(plan, context) if is_open else contextlib.nullcontext():
        earlier = _folder_of_same(plan, context) if is_open and not wish.is_new else None
        answer = _started(plan, earlier, context, wish)
    answer.warnings = [*found.warnings, *answer.warnings]
    return replace(answer, command="start")


@contextlib.contextmanager
def _alone(plan: dict[str, Any], context: Context) -> Iterator[None]:
    """Let those who start one plan at once, without naming a folder, come one after the other: the first makes the run."""
    place = RunFolder(home(context.machine.environ) / "starts" / plan["plan_id"])
    with locked(place, _OTHERS_START_WITHIN_S):
        yield


def _folder_of_same(plan: dict[str, Any], context: Context) -> RunFolder | None:
    """Return the newest run of the same plan among those whose folders we named, here; None where there is none."""
    parent = run_folder_of(plan).path.parent
    for entry in known_runs(context.machine.environ):
        folder = RunFolder(Path(entry["run_dir"]))
        if folder.path.parent != parent or folder.path.name != entry["run_id"]:
            continue
        with contextlib.suppress(FinetuneError):  # of an older version, or damaged
            state = read_document(folder.state, "state")
            if state is not None and state["plan_id"] == plan["plan_id"]:
                return folder
    return None


def _started(unplaced: dict[str, Any], earlier: RunFolder | None, context: Context, wish: Wish) -> Answer:
    run_id = new_run_id(unplaced["method"])
    plan = placed(unplaced, earlier.path.name if earlier else run_id)
    folder, host = run_folder_of(plan), context.machine.host
    if answer := standing(folder, plan, host, is_ours=False, is_extension=wish.is_extension):
        return answer
    if answer := held_back("start", folder, unplaced, context, wish.consent, wish.is_extension):
        return answer
    make_folders(folder.path)
    with locked(folder) as lock:
        if lock is None:
            await_state(folder, host)
        answer = standing(folder, plan, host, is_ours=lock is not None, is_extension=wish.is_extension)
        if answer or lock is None:
            return answer or refusal("start", [in_use(folder)], run_dir=folder.path)
        return _supervised(folder, plan, run_id, context, lock)


def _supervised(folder: RunFolder, plan: dict[str, Any], run_id: str, context: Context, lock: int) -> Answer:
    """Hand the folder and its lock to a supervisor, and answer once it has taken over."""
    last = folder.last_checkpoint() if folder.plan.exists() else None
    asked = {"plan": plan, "run_id": run_id, "argv": context.argv, "cwd": str(context.cwd)}
    # First: whoever looks at the folder until there is a state knows by it that the rest is ours.
    write_atomically(folder.start_request, to_json(scrub(asked)))
    _set_aside_log(folder)
    log = folder.supervisor_log
    environ = context.machine.environ
    environment = dict(environ) | {"PYTHONPATH": import_path(environ)}
    supervisor = start_detached(
        supervisor_command(folder, lock), environment, Streams(context.cwd, log, log), [lock]
    )
    wait_until(lambda: _has_taken_over(folder, supervisor), _TAKEN_OVER_WITHIN_S, every=0.02)
    state = read_document(folder.state, "state")
    if state is None or supervisor is None or state["pid"] != supervisor.pid:
        tail = log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else ""
        text = "the process that was to train ended before it took over"
        raise FinetuneError("supervisor_failed", text, log=str(log), log_tail=tail)
    answer = handle(folder, judged(state, folder, context.machine.host))
    answer.data["resumed_from"] = last and int(last.name.removeprefix("step-"))
    if answer.status == "failed":
        answer.errors = stored_errors(state)
        answer.summary = f"failed: {answer.errors[0].message}" if answer.errors else "failed"
    return answer


def _has_taken_over(folder: RunFolder, supervisor: ProcessId | None) -> bool:
    """Whether the state names the supervisor, or it has gone."""
    if supervisor is None or not supervisor.is_alive:
        return True
    with contextlib.suppress(FinetuneError):
        state = read_document(folder.state, "state")
        return state is not None and state["pid"] == supervisor.pid
    return False


def _set_aside_log(folder: RunFolder) -> None:
    """Keep the log of an earlier supervisor with the logs of its attempt."""
    folder.logs.mkdir(exist_ok=True)
    if folder.supervisor_log.exists():
        manifest = read_document(folder.manifest, "run")
        target = folder.logs / f"attempt-{len(manifest['attempts']) if manifest else 0}"
        target.mkdir(exist_ok=True)
        folder.supervisor_log.replace(target / folder.supervisor_log.name)


def supervisor_command(folder: RunFolder, lock: int) -> list[str]:
    """Return the command of a supervisor; -P keeps the working directory out of what it imports."""
    return [sys.executable, "-P", "-m", "agent.supervisor", str(folder.path), str(lock)]


def supervise(folder: RunFolder, lock: int) -> int:
    """Do what was asked for in a folder whose lock we have inherited; return the exit code that `run` would have."""
    with Interrupts() as interrupts:
        asked = json.loads(folder.start_request.read_text(encoding="utf-8"))
        context = Context(read_machine(), Path(asked["cwd"]), asked["argv"])
        work = Start(folder, asked["plan"], asked["run_id"], context, interrupts, lock, is_detached=True)
        answer = guarded("run", work.go)
        conclude(folder, answer, interrupts)
    print(text_of(document(answer)), flush=True)
    return answer.exit_code


def stored_plan(name: str, context: Context) -> dict[str, Any]:
    """Return a plan that was stored under its id; raise FinetuneError(file_missing) where none was."""
    path = home(context.machine.environ) / "plans" / f"{os.path.basename(name)}.json"
    plan = read_plan(path)
    if plan is None:
        text = f"plan: no plan {name} is stored; `finetune plan` with the same settings stores it"
        raise FinetuneError("file_missing", text, setting="plan", file=str(path))
    return plan


def request_of(plan: dict[str, Any], cwd: Path) -> Request:
    """Return the request that asks for a plan exactly: each of its values as it is, also those that were decided then."""
    given = {
        item.name: plan["settings"][item.name]
        for item in knobs(method_named(plan["method"]).config)
        if item.name in plan["settings"] and plan["settings"][item.name]["source"] != "default"
    }
    values = {setting: item["value"] for setting, item in given.items()}
    request = understand(values | {"method": plan["method"]}, cwd)
    request.sources.update({setting: item["source"] for setting, item in given.items()})
    return request


def _check_unchanged(stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise FinetuneError(plan_conflict) where data, model or settings are not what they were when a plan was stored."""
    mismatch = differences(stored["identity"], now["identity"])
    if mismatch:
        names = ", ".join(item["field"] for item in mismatch)
        text = f"plan: {stored['plan_id']} is no longer what would run: {names} changed since it was made"
        raise FinetuneError("plan_conflict", text, mismatch=mismatch, plan_id=stored["plan_id"])


def main() -> None:
    sys.exit(supervise(RunFolder(Path(sys.argv[1])), int(sys.argv[2])))


if __name__ == "__main__":
    main()
