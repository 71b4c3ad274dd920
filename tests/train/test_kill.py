"""kill -9 and SIGTERM at awkward moments: what is resumed ends in the same bytes as what ran straight through."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import finish, make_run, metrics, ragged_examples, start

STEPS = 14
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "global_batch_size": 4,
    "checkpoint_every": 2,
    "lora_dropout": 0.05,  # without it a wrong random state after the resume would go unseen
    "num_gpus": 2,
}


def adapter_bytes(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("straight") / "run", ragged_examples(9), **SETTINGS)
    assert finish(run)["exit_code"] == 0
    return run


def beat(run: Path, rank: int) -> dict[str, Any]:
    path = run / "heartbeat" / f"rank{rank}"
    return json.loads(path.read_text()) if path.exists() else {}


def wait_for(run: Path, rank: int, operation: str, step: int) -> int:
    """Return the pid of a rank as soon as it says that it does this at or after this step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = beat(run, rank)
        if operation in found.get("operation", "") and found.get("step", 0) >= step:
            return int(found["pid"])
    raise AssertionError(f"rank {rank} never said {operation!r}")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_same_end(run: Path, straight: Path, outcome: dict[str, Any]) -> None:
    assert outcome["exit_code"] == 0, outcome
    assert outcome["result"]["facts"]["resumed_from"] > 0
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    assert adapter_bytes(run) == adapter_bytes(straight)


def test_killed_parent_takes_its_ranks_along_and_the_run_resumes(straight: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ragged_examples(9), **SETTINGS)
    parent = start(run)
    ranks = [wait_for(run, rank, "", 5) for rank in range(2)]
    parent.kill()
    parent.wait()
    time.sleep(1)
    assert not any(is_alive(pid) for pid in ranks)
    assert not (run / "outcome.json").exists()
    assert_same_end(run, straight, finish(run))


def test_rank_killed_inside_a_save_is_named_and_the_run_resumes(straight: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ragged_examples(9), **SETTINGS)
    parent = start(run)
    os.kill(wait_for(run, 1, "saving step", 4), signal.SIGKILL)
    killed_at = time.monotonic()
    assert parent.wait(timeout=30) == 8
    assert time.monotonic() - killed_at < 10
    error = json.loads((run / "outcome.json").read_text())["error"]
    assert (error["code"], error["rank"]) == ("rank_died", 1)
    assert "SIGKILL" in error["message"]
    assert not (run / "adapter").exists()
    assert_same_end(run, straight, finish(run))


def test_sigterm_saves_together_and_the_run_goes_on_later(straight: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ragged_examples(9), **{**SETTINGS, "checkpoint_every": 1000})
    parent = start(run)
    wait_for(run, 0, "training", 3)
    parent.send_signal(signal.SIGTERM)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=60) == 10
    stopped_at = max(line["step"] for line in metrics(run))
    assert (run / "checkpoints" / f"step-{stopped_at}" / "manifest.json").exists()
    assert not (run / "adapter").exists()
    assert_same_end(run, straight, finish(run))


@pytest.mark.proof  # as does the row kills-parent
def test_another_seed_gives_other_bytes(straight: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ragged_examples(9), **{**SETTINGS, "seed": 1})
    assert finish(run)["exit_code"] == 0
    assert adapter_bytes(run) != adapter_bytes(straight)


def test_stuck_rank_is_named(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", ragged_examples(9), **{**SETTINGS, "max_steps": 500, "distributed_timeout": 6.0}
    )
    parent = start(run)
    pid = wait_for(run, 1, "training", 3)
    os.kill(pid, signal.SIGSTOP)
    assert parent.wait(timeout=60) == 8
    error = json.loads((run / "outcome.json").read_text())["error"]
    assert (error["code"], error["rank"]) == ("rank_stuck", 1)
    assert not is_alive(pid)
