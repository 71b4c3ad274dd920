"""Plan and run: the full checks and one attempt in a run folder that is ours, and the last catch of an exception of ours.

The same command twice is safe: what stands in the folder already is asked first (standing.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.attempt import NOTHING_SPENT, Attempt, Ending, carry_out
from agent.budgets import nothing_left, to_confirm, too_small
from agent.console import Display, open_display
from agent.decisions import RUN_ID
from agent.environment import scrub_text, secret_values
from agent.folder import RunFolder, locked, new_run_id, read_document, write_document
from agent.hints import described
from agent.manifest import flags_of, new_manifest
from agent.monitor import remember_run
from agent.plan import make_plan, store_plan
from agent.preflight import Findings
from agent.probing import environment_of, full_checks
from agent.processes import Interrupts
from agent.render import Answer, refusal
from agent.request import Request
from agent.standing import (
    await_state,
    check_same,
    finished_answer,
    handle,
    in_use,
    our_command,
    run_folder_of,
    standing,
)
from agent.states import UNFINISHED, first_state, moved, owner, settled
from agent.system import Machine
from agent.words import plan_line, shown_plan
from finetune.errors import FinetuneError, Problems
from finetune.knobs import knobs

__all__ = [
    "Consent",
    "Context",
    "Start",
    "dry_run",
    "finished_answer",
    "guarded",
    "handle",
    "our_command",
    "run",
]

_UNUSABLE_PATH = (
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ELOOP,
)


@dataclass(frozen=True)
class Context:
    """Where and how a verb was called."""

    machine: Machine
    cwd: Path
    argv: list[str]  # the command as it was given
    open_display: Callable[[], Display] = field(default=open_display)


@dataclass(frozen=True)
class Consent:
    """What its user has agreed to spend on a run before its plan was known, or that the plan is agreed to as it is."""

    confirmed: bool = False
    yes_under: str | None = None


CONFIRMED = Consent(confirmed=True)


def guarded(command: str, work: Callable[[], Answer]) -> Answer:
    """Return what `work` answers; failures of any kind become an answer too, those that are our own fault with exit code 70."""
    try:
        return work()
    except Problems as found:
        return refusal(command, found.errors)
    except FinetuneError as error:
        return refusal(command, [error])
    except KeyboardInterrupt:
        return refusal(command, [FinetuneError("stopped", f"{command} was interrupted")])
    except Exception as error:
        told = scrub_text(traceback.format_exc(), secret_values(os.environ))  # stderr may be a log that stays
        print(told, end="", file=sys.stderr, flush=True)
        return refusal(command, [_typed(error)])


def _typed(error: Exception) -> FinetuneError:
    """Return what an exception that nobody expected is: a full disk, else a bug of ours."""
    text = f"{type(error).__name__}: {str(error)[:500]}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FinetuneError("disk_full", text)
    if isinstance(error, OSError) and error.errno in _UNUSABLE_PATH:
        return FinetuneError(
            "bad_path", f"{text} (a path in the settings, or FINETUNE_HOME)", path=str(error.filename)
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return FinetuneError("bug", text, file=frame.filename, line=frame.lineno, function=frame.name)


def dry_run(request: Request, context: Context, full: bool, verify_model: bool = False) -> Answer:
    """Answer with the plan; nothing is written but the plan file."""
    plan, found = make_plan(request, context.machine, context.cwd, verify_model)
    if full and not found.problems:
        with Interrupts() as interrupts:
            plan, found = full_checks(plan, context.machine, interrupts, store=False)
    if not found.problems:
        found.problems += _conflict(plan)
    if found.problems:
        data = {"level": plan["level"], "checks": plan["checks"]}
        return refusal("plan", found.problems, warnings=found.warnings, data=data)
    path = store_plan(plan, context.machine.environ)
    advanced = {item.name for item in knobs(request.method.config) if item.advanced}
    return Answer(
        "plan",
        "planned",
        plan_line(plan),
        data=shown_plan(plan, advanced),
        warnings=found.warnings,
        next_actions=[
            ("start it", our_command("start", "--plan", plan["plan_id"])),
            ("or wait for it", our_command("run", "--method", plan["method"], *flags_of(plan["settings"]))),
        ],
        artifacts=[{"kind": "plan", "path": str(path), "sha256": None}],
    )


def _conflict(plan: dict[str, Any]) -> list[FinetuneError]:
    """Return the conflict that the run would end in because its folder belongs to another plan."""
    try:
        check_same(run_folder_of(plan), plan, is_extension=False)
    except FinetuneError as error:
        return [error]
    return []


def run(
    request: Request,
    context: Context,
    verify_model: bool = False,
    is_extension: bool = False,
    consent: Consent = CONFIRMED,
) -> Answer:
    """Train in the foreground, or answer with the run that the folder already holds."""
    plan, found = make_plan(request, context.machine, context.cwd, verify_model)
    if found.problems:
        return refusal("run", found.problems, warnings=found.warnings)
    run_id = new_run_id(plan["method"])
    unplaced, plan = plan, placed(plan, run_id)
    folder, host = run_folder_of(plan), context.machine.host
    if answer := standing(folder, plan, host, is_ours=False, is_extension=is_extension):
        return answer
    if answer := held_back("run", folder, unplaced, context, consent, is_extension):
        return answer
    made = make_folders(folder.path)
    with locked(folder) as lock, Interrupts() as interrupts:
        if lock is None:
            await_state(folder, host)
        answer = standing(folder, plan, host, is_ours=lock is not None, is_extension=is_extension)
        if answer or lock is None:
            return answer or refusal("run", [in_use(folder)], run_dir=folder.path)
        answer = guarded("run", Start(folder, plan, run_id, context, interrupts, lock).go)
        remove_if_unused(folder, made)
        conclude(folder, answer, interrupts)
        return answer


def held_back(
    command: str,
    folder: RunFolder,
    plan: dict[str, Any],
    context: Context,
    consent: Consent,
    is_extension: bool = False,
) -> Answer | None:
    """Return why nothing may start here yet: an earlier attempt has reached a limit, or the plan costs more than agreed to.

    A run that had begun was agreed to then, as long as it is not made longer.
    """
    state = read_document(folder.state, "state")
    if state is not None and folder.plan.exists():
        if error := nothing_left(folder, plan, state.get("spent") or NOTHING_SPENT):
            argv = our_command("resume", str(folder.path))
            if error.code == "over_budget":
                argv += [f"--{str(error.evidence['setting']).replace('_', '-')}", "NUMBER"]
            about = {"run_id": state["run_id"], "run_dir": folder.path}
            return refusal(command, [error], **about, next_actions=[("go on with a higher limit", argv)])
        if not is_extension:
            return None
    elif error := too_small(plan):
        return refusal(command, [error])
    if consent.confirmed:
        return None
    error = to_confirm(plan, consent.yes_under, context.machine.environ)
    if error is None:
        return None
    if is_extension:
        steps = str(plan["settings"]["max_steps"]["value"])
        again = our_command("resume", str(folder.path), "--extend", steps, "--confirm")
    else:
        store_plan(plan, context.machine.environ)
        again = our_command("start", "--plan", plan["plan_id"], "--confirm")
    confirm = ("start it all the same", again)
    data = {"plan_id": plan["plan_id"], "estimates": plan["estimates"]}
    return refusal(command, [error], data=data, next_actions=[confirm])


def placed(plan: dict[str, Any], run_id: str) -> dict[str, Any]:
    """Return the plan with the run id in the run folder's name, where the folder was left to us."""
    out = plan["settings"]["out"]
    settings = plan["settings"] | {"out": out | {"value": out["value"].replace(RUN_ID, run_id)}}
    argv = [argument.replace(RUN_ID, run_id) for argument in plan["launch"]["argv"]]
    return plan | {"settings": settings, "launch": plan["launch"] | {"argv": argv}}


def make_folders(path: Path) -> list[Path]:
    """Make a folder and return those that did not exist, innermost first."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return missing


def remove_if_unused(folder: RunFolder, made: list[Path]) -> None:
    """Take back the folders that we made where no run came of them."""
    if not made or folder.plan.exists():
        return
    for path in (folder.state, folder.lock):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: something of another's lies there by now
        for path in made:
            path.rmdir()


def conclude(folder: RunFolder, answer: Answer, interrupts: Interrupts) -> None:
    """Write down the end of a run that never came to train, where its folder stays: the errors of its full checks."""
    state = read_document(folder.state, "state") if folder.state.exists() else None
    if state is None or state["state"] not in UNFINISHED or state["pid"] != os.getpid():
        return
    if answer.errors[0].code == "stopped":
        asked = folder.stop_request.exists() or interrupts.received == signal.SIGINT
        state = settled(state, "stopped" if asked else "preempted", child=None)
    else:
        errors = [
            {"code": item["code"], "hint_id": item["hint_id"], "message": item["cause"]}
            | {"evidence": item["evidence"]}
            for item in map(described, answer.errors)
        ]
        state = moved(state, "failed", child=None, hint_id=errors[0]["hint_id"], errors=errors)
    write_document(folder.state, "state", state)
    folder.tell("state", state=state["state"], step=state["step"])


@dataclass
class Start:
    """Starting or resuming a run in a folder that we hold the lock of.

    is_detached: nobody waits for the answer, so the state says from the beginning who is at work.
    """

    folder: RunFolder
    plan: dict[str, Any]
    run_id: str
    context: Context
    interrupts: Interrupts
    lock: int
    is_detached: bool = False

    def go(self) -> Answer:
        self.folder.stop_request.unlink(missing_ok=True)
        state = self._begun()
        display = self.context.open_display()
        try:
            display.note("checking data, model and template")
            self.plan, found = full_checks(self.plan, self.context.machine, self.interrupts, store=True)
            if found.problems:
                return refusal("run", found.problems, warnings=found.warnings)
            state, manifest = self._written(state)
            return self._carried_out(state, manifest, found, display)
        finally:
            display.close()

    def _begun(self) -> dict[str, Any]:
        """Return the state from which the run goes on, written where it is new, was lost, or nobody waits for us."""
        host, plan_id = self.context.machine.host, self.plan["plan_id"]
        state = read_document(self.folder.state, "state")
        if state is None or not self.folder.plan.exists():
            is_same = state is not None and state["plan_id"] == plan_id
            run_id = state["run_id"] if is_same and state is not None else self.run_id
            state = first_state(run_id, plan_id, host)
        elif not self.is_detached and state["state"] not in UNFINISHED:
            return state
        else:
            state = moved(state, "lost") if state["state"] in UNFINISHED else state
            fresh = {"plan_id": plan_id, "child": None, "hint_id": None, "errors": [], "warnings": []}
            state = moved(state, "starting", **owner(host), **fresh, operation="checking")
        if self.is_detached:  # before the state, by which our caller knows that others may look for this run
            remember_run(state["run_id"], self.folder.path, self.context.machine.environ)
        write_document(self.folder.state, "state", state)
        if self.is_detached:
            self.folder.start_request.unlink(missing_ok=True)
        return state

    def _written(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write plan and manifest, and bring the state to where an attempt can start."""
        write_document(self.folder.plan, "plan", self.plan)
        manifest = read_document(self.folder.manifest, "run")
        if manifest is None:
            manifest = new_manifest(
                self.plan, state["run_id"], self.context.argv, self.context.cwd, self.context.machine.host
            )
            write_document(self.folder.manifest, "run", manifest)
            remember_run(state["run_id"], self.folder.path, self.context.machine.environ)
        if state["state"] == "planned":
            state = moved(state, "queued")
        write_document(self.folder.state, "state", state)
        return state, manifest

    def _carried_out(
        self, state: dict[str, Any], manifest: dict[str, Any], found: Findings, display: Display
    ) -> Answer:
        machine = self.context.machine
        environment = environment_of(self.plan, machine)
        attempt = Attempt(
            self.folder,
            self.plan,
            state,
            manifest,
            machine.host,
            environment,
            display,
            self.interrupts,
            self.lock,
        )
        display.note(f"training in {self.folder.path}")
        ending: Ending = carry_out(attempt)
        return finished_answer(
            "run", self.folder, ending.status, ending.error, [*found.warnings, *ending.warnings]
        )
