"""grpo in one process and on two ranks: killed and resumed, two passes over a batch, prompts of equal text."""

import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.rollout.ledger import RolloutFiles
from tests.train.runs import (
    adapter_digest,
    beats,
    finish,
    finish_on_ranks,
    first_gradient,
    make_prompts_run,
    make_scored_run,
    metrics,
    relative_difference,
    start,
    start_adapter,
    train_here,
)
from tests.train.test_grpo_equality import COMMON, LOSSES, VARIANTS, assert_equal, assert_ratios

SPREADS = ("ddp x2", "fsdp2 x2")
SAVED = 2  # the step after whose checkpoint a run is killed
SETTINGS: dict[str, Any] = {"num_prompts": 12, "num_texts": 1, "checkpoint_every": 1, "checkpoints_kept": 9}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_scored_run(tmp_path_factory.mktemp("alone") / "run", **SETTINGS)
    assert train_here(run).status == "succeeded"
    return run


@pytest.fixture(scope="module")
def in_two_passes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four steps on two recorded batches by how they are spread; those on ranks are trained by on_two."""
    folder = tmp_path_factory.mktemp("passes")
    common = {**COMMON, "init_adapter": str(start_adapter(folder)), "max_steps": 4}
    recorded = make_prompts_run(folder / "recorded", **common)
    train_here(recorded)
    common |= {**LOSSES["gspo, two passes, kl"], "replay": str(recorded)}
    runs = {name: make_prompts_run(folder / name, **common, **VARIANTS[name]) for name in SPREADS}
    runs["alone"] = make_prompts_run(folder / "alone", **common)
    assert train_here(runs["alone"]).status == "succeeded"
    return runs


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, in_two_passes: dict[str, Path]) -> Path:
    run = make_scored_run(tmp_path_factory.mktemp("two") / "run", **SETTINGS, num_gpus=2)
    finish_on_ranks([run, *(in_two_passes[name] for name in SPREADS)])
    return run


@pytest.mark.slow
def test_two_passes_begin_with_ratio_one_on_ranks_too(in_two_passes: dict[str, Path], on_two: Path) -> None:
    """Two batches, two passes over each, with cached old log-probs, a KL and sums of ratios over ranks."""
    for run in in_two_passes.values():
        assert len(metrics(run)) == 4
        assert_ratios(run, 2)
        assert_equal(run, in_two_passes["alone"], 2)


def killed(run: Path, rank: int) -> "subprocess.Popen[bytes]":
    """Start a run and kill -9 one of its ranks while the batch after the second checkpoint is sampled and scored."""
    process = start(run)
    deadline = time.monotonic() + 240
    while not (
        (run / "checkpoints" / f"step-{SAVED}" / "manifest.json").exists()
        and beats(run, 0).get("operation", "").startswith("sampl")
    ):
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before its moment came"
        time.sleep(0.002)
    os.kill(beats(run, rank)["pid"], signal.SIGKILL)
    assert process.wait(timeout=60) == 8
    return process


def assert_resumed(run: Path, straight: Path) -> None:
    outcome = finish(run)
    assert outcome["exit_code"] == 0, outcome
    assert SAVED <= outcome["result"]["facts"]["resumed_from"] < 4
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    assert adapter_digest(run) == adapter_digest(straight)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 1)])
def test_killed_while_sampling_and_resumed_it_ends_in_the_same_bytes(
    ranks: int, victim: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    straight = request.getfixturevalue("alone" if ranks == 1 else "on_two")
    run = make_scored_run(tmp_path / "run", "slowly_even", **SETTINGS, num_gpus=ranks)
    killed(run, victim)
    error = json.loads((run / "outcome.json").read_text())["error"]
    assert (error["code"], error["rank"]) == ("rank_died", victim)
    assert not (run / "adapter").exists()
    assert_resumed(run, straight)


@pytest.mark.slow
def test_prompts_of_equal_text_are_groups_of_their_own_on_two_ranks(alone: Path, on_two: Path) -> None:
    """DI-05: all prompts are the same, each is a row; no two groups draw the same, and both ranks begin with one adapter."""
    for step in (1, 2, 3, 4):
        batch = RolloutFiles(on_two / "rollouts").read(step)
        assert batch is not None
        assert len({tuple(one.prompt_ids) for one in batch.rollouts}) == 1
        groups = [list(group) for _, group in itertools.groupby(batch.rollouts, key=lambda one: one.group)]
        assert [len(group) for group in groups] == [4] * 4
        assert len({group[0].row for group in groups}) == 4
        assert len({one.seed for one in batch.rollouts}) == 16
        drawn = [tuple(tuple(one.completion_ids) for one in group) for group in groups]
        assert len(set(drawn)) == 4
        assert len({ids for group in drawn for ids in group}) > 12
        for group in groups:  # each is compared with its own mean alone
            assert sum(one.advantage for one in group) == pytest.approx(0, abs=1e-9)
    live, expected = (
        (run / "rollouts" / "step-000001.jsonl").read_text().splitlines()[1:] for run in (on_two, alone)
    )
    assert live == expected
    first, wanted = metrics(on_two)[0], metrics(alone)[0]
    assert first["loss"] == pytest.approx(wanted["loss"], abs=5e-6)
    assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-6)
    # B is zero at first: its gradient is that of A's starting values, which a rank of its own mind would spoil.
    assert relative_difference(first_gradient(alone), first_gradient(on_two)) < 2e-6
