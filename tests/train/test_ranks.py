"""Ranks as processes: fewer rows than ranks, another number of ranks on resume, and what they listen on."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.train.runs import adapter, finish, make_run, metrics, ragged_examples, relative_difference, start
from tests.train.test_kill import wait_for

SETTINGS: dict[str, Any] = {
    "global_batch_size": 5,
    "checkpoint_every": 3,
    "learning_rate": 1e-3,
    "max_steps": 8,
}


def run_of(folder: Path, rows: int, **settings: Any) -> Path:
    run = make_run(folder, ragged_examples(rows), **{**SETTINGS, **settings})
    outcome = finish(run)
    assert outcome["exit_code"] == 0, outcome
    return run


def test_one_row_on_two_ranks_weighs_once(tmp_path: Path) -> None:
    """DI-02."""
    one, two = (run_of(tmp_path / str(ranks), 1, num_gpus=ranks, max_steps=3) for ranks in (1, 2))
    assert [line["num_supervised"] for line in metrics(one)] == [
        line["num_supervised"] for line in metrics(two)
    ]
    assert relative_difference(adapter(one), adapter(two)) < 1e-5


def with_settings(run: Path, **settings: Any) -> None:
    plan = json.loads((run / "plan.json").read_text())
    for name, value in settings.items():
        plan["settings"][name]["value"] = value
    (run / "plan.json").write_text(json.dumps(plan))


def test_resume_on_other_ranks_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    straight = run_of(tmp_path / "straight", 7)
    run = run_of(tmp_path / "run", 7, max_steps=3, schedule="constant")
    constant = run_of(tmp_path / "constant", 7, schedule="constant")
    for ranks, kind, steps in ((2, "fsdp2", 6), (3, "ddp", 8)):
        with_settings(run, num_gpus=ranks, parallel=kind, max_steps=steps)
        outcome = finish(run)
        assert outcome["exit_code"] == 0, outcome
        assert outcome["result"]["facts"]["world_size"] == ranks
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))
    assert [line["rows"] for line in metrics(run)] == [line["rows"] for line in metrics(straight)]
    assert [line["loss"] for line in metrics(run)] == pytest.approx(
        [line["loss"] for line in metrics(constant)], abs=5e-6
    )
    assert relative_difference(adapter(constant), adapter(run)) < 1e-5


def test_ranks_of_one_node_listen_on_the_loopback_interface_only(tmp_path: Path) -> None:
    """SE-11, DI-07: no fixed port either; two runs at once do not meet."""
    runs = [
        make_run(tmp_path / name, ragged_examples(7), **{**SETTINGS, "num_gpus": 2, "max_steps": 40})
        for name in "ab"
    ]
    parents = [start(run) for run in runs]
    pids = [wait_for(run, rank, "training", 1) for run in runs for rank in (0, 1)]
    listening = [
        connection.laddr
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}
    assert len({address.port for address in listening}) == len(listening)
    assert [parent.wait(timeout=120) for parent in parents] == [0, 0]
    assert [len(metrics(run)) for run in runs] == [40, 40]
