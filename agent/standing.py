"""What stands in a run folder when somebody wants to start there, and the answers that name a run and say how it stands.

A run of the same plan that is under way or finished is answered with its handle, any other is resumed, and a folder of
another plan is refused.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.folder import RunFolder, is_locked, read_document
from agent.monitor import reward_course
from agent.plan import differences, read_plan
from agent.processes import wait_until
from agent.render import Answer
from agent.states import UNFINISHED, is_alive, judged
from agent.system import SOURCE_ROOT
from agent.words import result_line
from finetune.errors import EXIT_CODES, FinetuneError

_SHOWN = ("plan_id", "resumed_from", "duration_s", "parallel", "peak_memory_bytes_per_rank", "result")
_STATE_WITHIN_S = 30.0  # it takes half a second; more on a machine that is busy
_OWNER_WITHIN_S = 2.0  # a run that is resumed in the foreground says nothing until its checks are done
_STEPS = {"max_steps", "epochs"}  # what `resume --extend` may change


def our_command(*arguments: str) -> list[str]:
    """Return an argv that starts this program with the arguments, from any working directory."""
    installed = Path(sys.executable).with_name("finetune")
    script = SOURCE_ROOT / "scripts" / "finetune_cli.py"
    start = [str(installed)] if installed.exists() else [sys.executable, str(script)]
    return [*start, *arguments]


def run_folder_of(plan: dict[str, Any]) -> RunFolder:
    return RunFolder(Path(plan["settings"]["out"]["value"]))


def standing(
    folder: RunFolder, plan: dict[str, Any], host: str, is_ours: bool, is_extension: bool = False
) -> Answer | None:
    """Return the answer where the folder leaves nothing to start: a run under way or finished. None: it may start here.

    Raises FinetuneError(plan_conflict, target_exists, run_in_use) where the folder is another's.
    """
    check_same(folder, plan, is_extension)
    state = read_document(folder.state, "state")
    if state is None:
        return None
    state = judged(state, folder, host, is_ours)
    if state["state"] in UNFINISHED and not is_alive(state, host):  # who is at work has not said so yet
        await_state(folder, host)
        state = judged(read_document(folder.state, "state") or state, folder, host, is_ours)
    if state["state"] in UNFINISHED:
        if state["plan_id"] != plan["plan_id"]:
            raise in_use(folder)
        answer = handle(folder, state)
        answer.data["already_running"] = True
        return replace(
            answer,
            command="run",
            summary=f"this run is already {state['state']} (step {state['step']})",
        )
    if state["state"] == "succeeded" and not is_extension:
        answer = finished_answer("run", folder, "succeeded", None, [])
        answer.data["already_complete"] = True
        return replace(answer, summary=f"already complete: {answer.summary}")
    return None


def check_same(folder: RunFolder, plan: dict[str, Any], is_extension: bool) -> None:
    """Raise FinetuneError (target_exists, plan_conflict) unless the folder is unused or holds a run of this very plan."""
    if folder.path.exists() and not folder.path.is_dir():
        raise FinetuneError("target_exists", f"out: {folder.path} is a file", setting="out")
    existing = read_plan(folder.plan)
    if existing is None:
        # Names that begin with a dot are ours: the lock, and files on their way to their final names. A run whose full
        # checks failed leaves its state and a log: another plan, of mended data, may take its place.
        is_own = folder.start_request.exists() or read_document(folder.state, "state") is not None
        own = {folder.state} | ({folder.logs, folder.events} if is_own else set())
        foreign = [path.name for path in folder.path.glob("[!.]*") if path not in own]
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


def in_use(folder: RunFolder) -> FinetuneError:
    return FinetuneError(
        "run_in_use", f"{folder.path} is in use by another process", run_dir=str(folder.path)
    )


def await_state(folder: RunFolder, host: str) -> None:
    """Give whoever holds the lock the moment it needs to say who it is and what it is doing."""
    wait_until(folder.state.exists, _STATE_WITHIN_S, every=0.02)

    def is_told() -> bool:
        state = read_document(folder.state, "state")
        return state is None or is_alive(state, host) or not is_locked(folder)

    wait_until(is_told, _OWNER_WITHIN_S)


def stored_errors(state: dict[str, Any]) -> list[FinetuneError]:
    """Return the errors for which a run failed before training: those that its full checks found."""
    return [
        FinetuneError(
            item["code"] if item["code"] in EXIT_CODES else "preflight_failed",
            item["message"],
            **item["evidence"] | {"hint_id": item["hint_id"]},
        )
        for item in state.get("errors", [])
    ]


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
            "pid": state["pid"],
            "step": state["step"],
            "num_steps": state["num_steps"],
            "checkpoint": state["checkpoint"],
        },
        next_actions=[
            ("follow it", our_command("status", run_dir, "--wait", "50")),
            ("stop it", our_command("stop", run_dir)),
            ("read its log", our_command("logs", run_dir)),
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
