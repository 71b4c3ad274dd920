"""Resume and stop: going on with a run that ended early, and ending one that goes on."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from agent.folder import RunFolder
from agent.handles import find_job, stop_job
from agent.monitor import find_run, read_state
from agent.plan import plan_of
from agent.processes import ProcessId, kill_session, wait_until
from agent.render import Answer
from agent.request import again
from agent.runner import Consent, Context, run
from agent.standing import handle, our_command
from agent.states import UNFINISHED
from agent.supervisor import Wish, start
from finetune.errors import FinetuneError

_AFTER_KILL_S = 15.0


def resume(
    name: str,
    extend: int | None,
    limits: dict[str, Any],
    consent: Consent,
    is_detached: bool,
    context: Context,
) -> Answer:
    """Go on with a run from its newest checkpoint, to more steps where `extend` says so; limits: other ones than before."""
    folder = find_run(name, context.cwd, context.machine.environ)
    plan = plan_of(folder)
    steps = plan["arithmetic"]["steps"]
    if extend is not None and extend <= steps:
        raise FinetuneError(
            "bad_value",
            f"extend: {extend} is not above the {steps} steps of the plan",
            setting="extend",
            steps=steps,
        )
    changes: dict[str, Any] = {"out": str(folder.path)} | ({} if extend is None else {"max_steps": extend})
    request = again(plan, changes | limits, context.cwd)
    verify_model, is_extension = plan["model"].get("all_bytes", False), extend is not None
    if is_detached:
        answer = start(request, context, Wish(consent, verify_model, is_extension=is_extension))
    else:
        answer = run(request, context, verify_model, is_extension, consent)
    return replace(answer, command="resume")


def stop(name: str, grace_s: float, context: Context) -> Answer:
    """Ask a run to finish its step, save and end; after the grace time kill it. A job is ended."""
    if job := find_job(name, context.machine.environ):
        return stop_job(job, grace_s, context)
    folder = find_run(name, context.cwd, context.machine.environ)
    host = context.machine.host
    state = read_state(folder, host)
    if state["state"] not in UNFINISHED:
        _end_child(state)  # the child of a killed runner ends with it; this is for one that did not
        return replace(
            handle(folder, state),
            command="stop",
            summary=f"nothing to stop: the run is {state['state']}",
            next_actions=[],
        )
    if state["host"] != host:
        raise FinetuneError(
            "run_in_use", f"the run works on {state['host']}; stop it there", host=state["host"]
        )
    told: set[ProcessId] = set()
    killed = not wait_until(lambda: _has_ended(folder, host, told), grace_s)
    if killed:
        _kill(folder, host)
    state = read_state(folder, host)
    answer = replace(
        handle(folder, state),
        command="stop",
        next_actions=[("go on", our_command("resume", str(folder.path)))],
    )
    answer.data["killed"] = killed
    if state["state"] in UNFINISHED:
        answer.errors = [
            FinetuneError(
                "still_running", f"the run is still {state['state']} after {grace_s:g} s", grace_s=grace_s
            )
        ]
    return answer


def _has_ended(folder: RunFolder, host: str, told: set[ProcessId]) -> bool:
    """Say whether a run has ended; each runner that its state names is told to stop, once.

    One that is resumed in the foreground names itself only when its checks are done.
    """
    state = read_state(folder, host)
    if state["state"] not in UNFINISHED:
        return True
    runner = ProcessId(state["pid"], state["pid_start"], state["boot_id"])
    if runner not in told:
        told.add(runner)
        folder.stop_request.touch()
        runner.send(signal.SIGTERM)
    return False


def _kill(folder: RunFolder, host: str) -> None:
    """Kill the training of a run that did not stop, then, if even that does not end it, its runner."""
    state = read_state(folder, host)
    _end_child(state)
    if not wait_until(lambda: read_state(folder, host)["state"] not in UNFINISHED, _AFTER_KILL_S):
        ProcessId(state["pid"], state["pid_start"], state["boot_id"]).send(signal.SIGKILL)
        wait_until(lambda: read_state(folder, host)["state"] not in UNFINISHED, _AFTER_KILL_S)


def _end_child(state: dict[str, Any]) -> None:
    child = state["child"]
    if child and ProcessId(child["pid"], child["pid_start"], child["boot_id"]).is_alive:
        kill_session(child["pid"])
