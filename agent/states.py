"""The states of a run and their legal moves.

state.json has one writer, the runner that holds the folder's lock; a reader judges what it finds there.
"""

from __future__ import annotations

import time
from typing import Any

from agent.folder import SCHEMA_VERSION, RunFolder, is_locked
from agent.processes import ProcessId

RESUMABLE = ("stopped", "preempted", "failed", "lost")
UNFINISHED = ("planned", "queued", "starting", "running", "saving", "stopping")
# A signal can arrive in the last step and a save can fail while stopping: stopping therefore ends in all ways.
# The full checks of a detached run are made when it is planned (a new one) or starting (a resumed one): they can fail.
MOVES: dict[str, tuple[str, ...]] = {
    "planned": ("queued", "stopping", "failed", "lost"),
    "queued": ("starting", "stopping", "failed", "lost"),
    "starting": ("running", "stopping", "failed", "lost"),
    "running": ("saving", "stopping", "succeeded", "failed", "lost"),
    "saving": ("running", "lost"),
    "stopping": ("stopped", "preempted", "succeeded", "failed", "lost"),
    "stopped": ("starting",),
    "preempted": ("starting",),
    "failed": ("starting",),
    "lost": ("starting",),
    "succeeded": ("starting",),  # by `resume --extend` alone
}
HEARTBEAT_OLD_S = 120.0


def first_state(run_id: str, plan_id: str, host: str) -> dict[str, Any]:
    """Return the state of a run that is being planned by this process."""
    return (
        {"schema_version": SCHEMA_VERSION, "run_id": run_id, "plan_id": plan_id, "state": "planned"}
        | owner(host)
        | _NOTHING_YET
    )


_NOTHING_YET: dict[str, Any] = {
    "child": None,
    "step": 0,
    "num_steps": None,
    "operation": None,
    "checkpoint": None,
    "hint_id": None,
    "errors": [],
    "warnings": [],
    "spent": {"seconds": 0.0, "generated_tokens": 0, "disk_bytes": 0},
}


def owner(host: str) -> dict[str, Any]:
    """Return the fields that say which process writes the state: this one."""
    me = ProcessId.of_self()
    return {"host": host, "pid": me.pid, "pid_start": me.start, "boot_id": me.boot, "heartbeat": time.time()}


def moved(state: dict[str, Any], target: str, **changes: Any) -> dict[str, Any]:
    """Return the state after a legal move; saving and running pass into each other on the way to other states."""
    now = state["state"]
    if now == "saving" and target not in MOVES["saving"]:
        now = "running"
    if target != now and target not in MOVES[now]:
        raise AssertionError(f"a run cannot go from {state['state']} to {target}")
    return state | {"state": target, "heartbeat": time.time()} | changes


def settled(state: dict[str, Any], target: str, **changes: Any) -> dict[str, Any]:
    """Return the state at the end of an attempt; one that stopped without having been told to passes through stopping."""
    if target in ("stopped", "preempted") and state["state"] != "stopping":
        state = moved(state, "stopping")
    return moved(state, target, **changes)


def is_alive(state: dict[str, Any], host: str) -> bool:
    """Say whether the process that writes this state still runs; on another machine its heartbeat must do."""
    if state["host"] != host:
        return time.time() - state["heartbeat"] < HEARTBEAT_OLD_S
    return ProcessId(state["pid"], state["pid_start"], state["boot_id"]).is_alive


def judged(state: dict[str, Any], folder: RunFolder, host: str, is_ours: bool = False) -> dict[str, Any]:
    """Return the state as a reader must see it: lost where its writer is gone, starting where a new one is at work.

    A writer that still lives has only just ended. is_ours: we hold the folder's lock ourselves, so it has gone.
    """
    has_gone = is_ours or not is_alive(state, host)
    if state["state"] in UNFINISHED and has_gone:
        return moved(state, "lost", heartbeat=state["heartbeat"])
    if state["state"] in RESUMABLE and has_gone and not is_ours and is_locked(folder):
        return state | {"state": "starting"}
    return state
