"""Reading a run from outside."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agent.folder import RunFolder
from agent.monitor import (
    Tail,
    find_run,
    heartbeats,
    known_runs,
    last_lines,
    log_lines,
    poll_seconds,
    progress,
    remember_run,
    resumed_from,
    reward_course,
)
from finetune.errors import FinetuneError
from finetune.records import Journal


def line(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.0,
        "grad_norm": 1.0,
        "step_s": 2.0,
        "tokens_per_s": 100.0,
        "num_steps": 10,
    } | values


def test_progress_tells_loss_speed_and_the_time_left(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        journal.metrics(
            step, **{name: value for name, value in line(step, loss=loss).items() if name != "step"}
        )
    found = progress(RunFolder(tmp_path))
    assert found["loss"] == {"last": 2.0, "mean": 2.0, "lowest": 1.0}
    assert (found["step"], found["num_steps"], found["eta_s"], found["tokens_per_s"]) == (3, 10, 14.0, 100.0)
    assert progress(RunFolder(tmp_path / "nothing")) == {"step": 0, "num_steps": None}


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line(step, pad="x" * 400)) + "\n" for step in range(2000)) + '{"half')
    found = last_lines(path)
    assert 100 < len(found) < 2000
    assert found[-1]["step"] == 1999


def test_progress_of_rollouts_shows_rewards_and_every_other_number(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step, reward in enumerate((0.1, 0.5, 0.3), start=1):
        journal.metrics(
            step, loss=0.0, reward_mean=reward, entropy=1.5, rewards={"numeric": reward}, rows=[1]
        )
    found = progress(RunFolder(tmp_path))
    assert found["reward"] == {"last": 0.3, "mean": 0.3, "highest": 0.5}
    assert found["figures"] == {"reward_mean": 0.3, "entropy": 1.5}
    assert found["health"] == []  # a loss of 0 is what a first pass has
    for step in range(4, 24):
        journal.metrics(step, loss=0.0, reward_mean=0.3, entropy=0.0)
    assert [item["hint_id"] for item in progress(RunFolder(tmp_path))["health"]] == ["low_entropy"]
    journal.metrics(24, loss=0.0)  # a step of which no rollout was scored
    assert progress(RunFolder(tmp_path))["reward"]["last"] == 0.3


def test_the_course_of_rewards_is_that_of_the_first_and_last_steps(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert reward_course(RunFolder(tmp_path)) is None
    for step in range(1, 21):
        journal.metrics(step, reward_mean=step / 10)
    assert reward_course(RunFolder(tmp_path)) == {"first": 0.3, "last": 1.8}


def test_the_tail_gives_each_line_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    tail = Tail(path)
    with open(path, "a") as file:
        file.write('{"step": 2}\n{"st')
        file.flush()
        assert [item["step"] for item in tail.read()] == [2]
        file.write('ep": 3, "text": "\u2028"}\n')
        file.flush()
        assert [item["step"] for item in tail.read()] == [3]
    assert tail.read() == []


def test_the_tail_of_a_rewound_file_starts_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (1, 2, 3):
        journal.metrics(step)
    tail = Tail(tmp_path / "metrics.jsonl")
    journal.rewind(1)
    for step in (2, 3, 4, 5):  # longer than before
        journal.metrics(step, text="longer")
    assert [item["step"] for item in tail.read()] == [1, 2, 3, 4, 5]


def test_heartbeats_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        Journal(tmp_path, rank).heartbeat("training", step=rank)
    (tmp_path / "heartbeat/rank0.error.json").write_text("{}")
    found = heartbeats(RunFolder(tmp_path))
    assert [(beat["rank"], beat["step"], beat["operation"]) for beat in found] == [
        (0, 0, "training"),
        (2, 2, "training"),
        (10, 10, "training"),
    ]
    assert all(beat["pid"] == os.getpid() and beat["age_s"] < 5 for beat in found)


def test_a_resume_counts_for_its_own_attempt(tmp_path: Path) -> None:
    Journal(tmp_path).event("resumed", step=4)
    assert resumed_from(RunFolder(tmp_path), time.time() - 60) == 4
    assert resumed_from(RunFolder(tmp_path), time.time() + 60) is None


def test_logs_are_read_without_secrets_and_only_from_the_logs_folder(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank0.log").write_bytes(b"1%\r2%\nkey k_TEST \xff\n")
    folder = RunFolder(tmp_path)
    assert log_lines(folder, "rank0.log", {"WANDB_API_KEY": "k_TEST"}) == ["1%", "2%", "key *** \ufffd", ""]
    for name in ("rank1.log", "../state.json"):
        with pytest.raises(FinetuneError, match=r"there are: rank0\.log"):
            log_lines(folder, name, {})


def test_runs_are_found_by_folder_and_by_id(tmp_path: Path) -> None:
    environ = {"FINETUNE_HOME": str(tmp_path / "home")}
    run_dir = tmp_path / "runs" / "a b"
    run_dir.mkdir(parents=True)
    remember_run("sft-1", run_dir, environ)
    assert known_runs(environ) == []  # without a state it is no run
    (run_dir / "state.json").touch()
    assert [entry["run_id"] for entry in known_runs(environ)] == ["sft-1"]
    assert find_run("sft-1", tmp_path, environ).path == run_dir
    assert find_run("runs/a b/", tmp_path, environ).path == run_dir
    for name in ("sft-2", "../sft-1", "runs/none"):
        with pytest.raises(FinetuneError, match="neither a run folder nor the id"):
            find_run(name, tmp_path, environ)


def test_the_next_look_comes_neither_at_once_nor_too_late() -> None:
    assert [poll_seconds(eta) for eta in (None, 0.0, 100.0, 1e6)] == [5, 5, 25, 60]
