"""The states of a run: every move, and how a reader judges them."""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agent.folder import RunFolder, locked, schema
from agent.states import HEARTBEAT_OLD_S, MOVES, RESUMABLE, UNFINISHED, first_state, judged, moved, settled

LEGAL = """
planned queued; queued starting; starting running; running saving; saving running; running stopping;
stopping stopped; stopping preempted; stopping succeeded; stopping failed; running succeeded; running failed;
planned lost; queued lost; starting lost; running lost; saving lost; stopping lost;
planned failed; queued failed; starting failed; planned stopping; queued stopping; starting stopping;
stopped starting; preempted starting; failed starting; lost starting; succeeded starting
"""
PAIRS = {tuple(pair.split()) for pair in LEGAL.split(";")}


def state(name: str = "planned", **changes: Any) -> dict[str, Any]:
    return first_state("sft-1", "0" * 16, "here") | {"state": name} | changes


def test_the_states_are_those_of_the_schema() -> None:
    assert sorted(MOVES) == sorted(schema("state")["properties"]["state"]["enum"])
    assert {*UNFINISHED, *RESUMABLE, "succeeded"} == set(MOVES)


@pytest.mark.parametrize(("before", "after"), itertools.permutations(MOVES, 2))
def test_only_legal_moves_are_made(before: str, after: str) -> None:
    # What saving passes on its way is running, so it reaches what running reaches.
    legal = (before, after) in PAIRS or (before == "saving" and ("running", after) in PAIRS)
    if legal:
        assert moved(state(before), after)["state"] == after
    else:
        with pytest.raises(AssertionError, match=f"{before} to {after}"):
            moved(state(before), after)


def test_a_run_that_stopped_by_itself_passes_through_stopping() -> None:
    assert settled(state("running"), "preempted", step=3)["step"] == 3
    with pytest.raises(AssertionError):
        moved(state("running"), "preempted")


def test_a_running_process_is_not_lost(tmp_path: Path) -> None:
    assert judged(state("running"), RunFolder(tmp_path), "here")["state"] == "running"


@pytest.mark.parametrize("gone", [{"pid": 2**22 + 1}, {"pid_start": 1}, {"boot_id": "another"}])
def test_a_process_that_is_gone_is_lost_whatever_the_state(tmp_path: Path, gone: dict[str, Any]) -> None:
    for name in UNFINISHED:
        assert judged(state(name, **gone), RunFolder(tmp_path), "here")["state"] == "lost"
    assert judged(state("failed", **gone), RunFolder(tmp_path), "here")["state"] == "failed"


def test_on_another_machine_the_heartbeat_tells(tmp_path: Path) -> None:
    fresh = state("running", pid=os.getpid() + 1)
    old = fresh | {"heartbeat": time.time() - HEARTBEAT_OLD_S - 1}
    assert judged(fresh, RunFolder(tmp_path), "elsewhere")["state"] == "running"
    assert judged(old, RunFolder(tmp_path), "elsewhere")["state"] == "lost"


def test_a_resumed_run_shows_as_starting_while_its_checks_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    ended = state("failed", pid_start=1)
    with locked(folder):
        assert judged(ended, folder, "here")["state"] == "starting"
        assert (
            judged(state("failed"), folder, "here")["state"] == "failed"
        )  # its writer lives: it has only just ended
        assert judged(ended, folder, "here", is_ours=True)["state"] == "failed"
        assert judged(state("running"), folder, "here", is_ours=True)["state"] == "lost"
