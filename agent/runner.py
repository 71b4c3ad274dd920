"""Plan and run: what stands in a run folder, starting or resuming there, and the last catch of an exception of ours.

The same command twice is safe: a run of the same plan that is under way or finished is answered with its handle, any
other is resumed, and a folder of another plan is refused.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.attempt import Attempt, Ending, carry_out
from agent.console import Display, open_display
from agent.decisions import RUN_ID
from agent.folder import RunFolder, locked, new_run_id, read_document, write_document
from agent.manifest import flags_of, new_manifest
from agent.monitor import remember_run, reward_course
from agent.plan import differences, make_plan, read_plan, store_plan
from agent.preflight import Findings
from agent.probing import environment_of, full_checks
from agent.processes import Interrupts
from agent.render import Answer, refusal
from agent.request import Request
from agent.states import UNFINISHED, first_state, judged, moved
from agent.system import SOURCE_ROOT, Machine
from agent.words import plan_line, result_line, shown_plan
from finetune.errors import FinetuneError, Problems
from finetune.knobs import knobs

_SHOWN = ("plan_id", "resumed_from", "duration_s", "parallel", "peak_memory_bytes_per_rank", "result")
_UNUSABLE_PATH = (
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ELOOP,
)
_STATE_WITHIN_S = 5.0
_STEPS = {"max_steps", "epochs"}  # what `resume --extend` may change


@dataclass(frozen=True)
class Context:
    """Where and how a verb was called."""

    machine: Machine
    cwd: Path
    argv: list[str]  # the command as it was given
    open_display: Callable[[], Display] = field(default=open_display)


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
        traceback.print_exc(file=sys.stderr)
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


def our_command(*arguments: str) -> list[str]:
    """Return an argv that starts this program with the arguments, from any working directory."""
    installed = Path(sys.executable).with_name("finetune")
    script = SOURCE_ROOT / "scripts" / "finetune_cli.py"
    start = [str(installed)] if installed.exists() else [sys.executable, str(script)]
    return [*start, *arguments]


def dry_run(request: Request, context: Context, full: bool, verify_model: bool = False) -> Answer:
    """Answer with the plan; nothing is written but the plan file."""
    plan, found = make_plan(request, context.machine, context.cwd, verify_model)
    if full and not found.problems:
        with Interrupts() as interrupts:
            plan, found = full_checks(plan, context.machine, interrupts, store=False)
    if not found.problems:
        found.problems += _conflict(plan)
    if found.problems:
        return refusal("plan", found.problems, warnings=found.warnings, data={"level": plan["level"]})
    path = store_plan(plan, context.machine.environ)
    advanced = {item.name for item in knobs(request.method.config) if item.advanced}
    return Answer(
        "plan",
        "planned",
        plan_line(plan),
        data=shown_plan(plan, advanced),
        warnings=found.warnings,
        next_actions=[
            ("start it", our_command("run", "--method", plan["method"], *flags_of(plan["settings"])))
        ],
        artifacts=[{"kind": "plan", "path": str(path), "sha256": None}],
    )


def _conflict(plan: dict[str, Any]) -> list[FinetuneError]:
    """Return the conflict that the run would end in because its folder belongs to another plan."""
    folder = RunFolder(Path(plan["settings"]["out"]["value"]))
    try:
        _check_same(folder, plan, is_extension=False)
    except FinetuneError as error:
        return [error]
    return []


def run(request: Request, context: Context, verify_model: bool = False, is_extension: bool = False) -> Answer:
    """Train in the foreground, or answer with the run that the folder already holds."""
    plan, found = make_plan(request, context.machine, context.cwd, verify_model)
    if found.problems:
        return refusal("run", found.problems, warnings=found.warnings)
    run_id = new_run_id(plan["method"])
    plan = _placed(plan, run_id)
    folder = RunFolder(Path(plan["settings"]["out"]["value"]))
    if standing := _standing(folder, plan, context, is_ours=False, is_extension=is_extension):
        return standing
    made = _make_folders(folder.path)
    with locked(folder) as lock, Interrupts() as interrupts:
        if lock is None:
            _await_state(folder)
        standing = _standing(folder, plan, context, is_ours=lock is not None, is_extension=is_extension)
        if standing or lock is None:
            return standing or refusal("run", [_in_use(folder)], run_dir=folder.path)
        try:
            return _Start(folder, plan, run_id, context, interrupts, lock).go()
        finally:
            _remove_if_unused(folder, made)


def _await_state(folder: RunFolder) -> None:
    """Give whoever holds the lock the moment it needs to say what it is doing."""
    end = time.monotonic() + _STATE_WITHIN_S
    while not folder.state.exists() and time.monotonic() < end:
        time.sleep(0.02)


def _placed(plan: dict[str, Any], run_id: str) -> dict[str, Any]:
    """Return the plan with the run id in the run folder's name, where the folder was left to us."""
    out = plan["settings"]["out"]
    settings = plan["settings"] | {"out": out | {"value": out["value"].replace(RUN_ID, run_id)}}
    argv = [argument.replace(RUN_ID, run_id) for argument in plan["launch"]["argv"]]
    return plan | {"settings": settings, "launch": plan["launch"] | {"argv": argv}}


def _make_folders(path: Path) -> list[Path]:
    """Make a folder and return those that did not exist, innermost first."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_if_unused(folder: RunFolder, made: list[Path]) -> None:
    """Take back the folders that we made where no run came of them."""
    if not made or folder.plan.exists():
        return
    for path in (folder.state, folder.lock):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: something of another's lies there by now
        for path in made:
            path.rmdir()


def _standing(
    folder: RunFolder, plan: dict[str, Any], context: Context, is_ours: bool, is_extension: bool
) -> Answer | None:
    """Return the answer where the folder leaves nothing to start: a run under way or finished. None: it may start here.

    Raises FinetuneError(plan_conflict, target_exists, run_in_use) where the folder is another's.
    """
    _check_same(folder, plan, is_extension)
    state = read_document(folder.state, "state")
    if state is None:
        return None
    state = judged(state, folder, context.machine.host, is_ours)
    if state["state"] in UNFINISHED:
        if state["plan_id"] != plan["plan_id"]:
            raise _in_use(folder)
        return replace(
            handle(folder, state),
            command="run",
            summary=f"this run is already {state['state']} (step {state['step']})",
        )
    if state["state"] == "succeeded" and not is_extension:
        answer = finished_answer("run", folder, "succeeded", None, [])
        answer.data["already_complete"] = True
        return replace(answer, summary=f"already complete: {answer.summary}")
    return None


def _check_same(folder: RunFolder, plan: dict[str, Any], is_extension: bool) -> None:
    if folder.path.exists() and not folder.path.is_dir():
        raise FinetuneError("target_exists", f"out: {folder.path} is a file", setting="out")
    existing = read_plan(folder.plan)
    if existing is None:
        # Names that begin with a dot are ours: the lock, and files on their way to their final names.
        foreign = [path.name for path in folder.path.glob("[!.]*") if path != folder.state]
        if foreign:
            text = f"out: {folder.path} is no run folder and not empty (it holds {foreign[0]}); give another --out"
            raise FinetuneError("target_exists", text, setting="out", found=sorted(foreign)[:5])
        return
    mismatch = [
        item
        for item in differences(existing["identity"], plan["identity"])
        if not (is_extension and item["field"] in _STEPS)
    ]
    if mismatch:
        names = ", ".join(item["field"] for item in mismatch)
        text = f"out: {folder.path} holds the run of another plan; they differ in {names}"
        raise FinetuneError(
            "plan_conflict", text, mismatch=mismatch, plan_id=existing["plan_id"], asked=plan["plan_id"]
        )


def _in_use(folder: RunFolder) -> FinetuneError:
    return FinetuneError(
        "run_in_use", f"{folder.path} is in use by another process", run_dir=str(folder.path)
    )


@dataclass
class _Start:
    """Starting or resuming a run in a folder that we hold the lock of."""

    folder: RunFolder
    plan: dict[str, Any]
    run_id: str
    context: Context
    interrupts: Interrupts
    lock: int

    def go(self) -> Answer:
        state = read_document(self.folder.state, "state")
        if state is None or not self.folder.plan.exists():
            state = first_state(self.run_id, self.plan["plan_id"], self.context.machine.host)
            write_document(self.folder.state, "state", state)
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
        elif state["state"] in UNFINISHED:
            state = moved(state, "lost")
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


def handle(folder: RunFolder, state: dict[str, Any]) -> Answer:
    """Return the answer that names a run and says how it stands."""
    run_dir = str(folder.path)
    return Answer(
        "status",
        state["state"],
        f"{state['state']}, step {state['step']} of {state['num_steps'] or '?'}",
        run_id=state["run_id"],
        run_dir=folder.path,
        data={
            "plan_id": state["plan_id"],
            "step": state["step"],
            "num_steps": state["num_steps"],
            "checkpoint": state["checkpoint"],
        },
        next_actions=[
            ("follow it", our_command("status", run_dir, "--wait", "50")),
            ("stop it", our_command("stop", run_dir)),
        ],
    )


def finished_answer(
    command: str, folder: RunFolder, status: str, error: FinetuneError | None, warnings: list[tuple[str, str]]
) -> Answer:
    """Return what a run that has ended answers, from its manifest."""
    manifest = read_document(folder.manifest, "run")
    assert manifest is not None
    result, run_dir = manifest["result"], str(folder.path)
    data = {name: manifest[name] for name in _SHOWN}
    reward = reward_course(folder)
    if reward:
        data["reward"] = reward
    if status == "succeeded":
        actions = [
            ("try it", our_command("generate", run_dir, "--prompt", "PROMPT")),
            ("merge it", our_command("export", run_dir)),
        ]
        summary = result_line(result, reward)
    elif status == "failed":
        actions = [
            ("read the log", our_command("logs", run_dir)),
            ("go on after mending the cause", our_command("resume", run_dir)),
        ]
        summary = f"failed: {error.message if error else ''}"
    else:
        actions = [("go on", our_command("resume", run_dir))]
        summary = error.message if error else status
    return Answer(
        command,
        status,
        summary,
        manifest["run_id"],
        folder.path,
        data,
        warnings,
        [error] if error else [],
        actions,
        manifest["outputs"],
    )
