"""Rollouts of agents, however they are cut into segments and spread over ranks: nothing changes but rounding.

Replayed, fp32, LoRA-B not zero at the start, two groups of 3 rollouts with 1 to 7 calls each, one rollout lost. Uncut
rollouts of a group share what they begin with in one sequence.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.rollout.ledger import CallRecord
from tests.train.agent_batches import agent_rollout, conversation, torn, write_batches
from tests.train.runs import (
    adapter,
    finish,
    first_gradient,
    make_prompts_run,
    metrics,
    relative_difference,
    start_adapter,
    train_here,
)

STEPS = 3
LOSS, GRADIENT, GRAD_NORM, ADAPTER, RESPLIT = 5e-6, 2e-6, 5e-6, 1e-5, 1e-4
CALLS = [[1, 7, 3], [2, 4, 5]]
REWARDS = [[0.0, 1.0, 0.5], [1.0, None, 0.0]]
COMMON: dict[str, Any] = {
    "tasks": ["builtin:desk"],
    "data": ["tasks:builtin:desk"],
    "num_prompts": 8,
    "group_size": 3,
    "global_batch_size": 6,
    "max_steps": STEPS,
    "max_length": 256,
    "max_grad_norm": 0.0,
    "checkpoint_every": 1,
    "checkpoints_kept": 20,
}
SPREADS: dict[str, dict[str, Any]] = {
    "ddp x2": {"num_gpus": 2},
    "ddp x3": {"num_gpus": 3},
    "fsdp2 x2": {"num_gpus": 2, "parallel": "fsdp2"},
    "fsdp2 x3": {"num_gpus": 3, "parallel": "fsdp2"},
    "several segments a forward": {"batch_size_per_gpu": 4},
}
TRIED_ALWAYS = ("fsdp2 x2",)  # in `make test`, and ddp on 3 ranks below
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss": "grpo"},
    "sequence mask": {"correction": "sequence_mask", "correction_cap": 1e9},
    "gspo, two passes": {"loss": "gspo", "passes": 2, "correction_cap": 1e9},
}


@pytest.fixture(scope="module")
def first_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start_adapter(tmp_path_factory.mktemp("start"))


def recorded(folder: Path, cut: Callable[[list[CallRecord]], list[CallRecord]] = lambda calls: calls) -> Path:
    draw = random.Random(5)
    rollouts = []
    for group, counts in enumerate(CALLS):
        for sample, count in enumerate(counts):
            name = f"1-{group}-{sample}"
            calls = cut(conversation(name, draw, count, opening=[10 + group, 11, 12, 13, 14, 15, 16]))
            rollouts.append(agent_rollout(name, group, sample, REWARDS[group][sample], calls))
    return write_batches(folder, rollouts, 2 * STEPS)


def replayed(folder: Path, batches: Path, first_adapter: Path, **settings: Any) -> Path:
    return make_prompts_run(
        folder, **{**COMMON, "init_adapter": str(first_adapter), "replay": str(batches), **settings}
    )


def trained_here(folder: Path, batches: Path, first_adapter: Path, **settings: Any) -> Path:
    run = replayed(folder, batches, first_adapter, **settings)
    assert train_here(run).status == "succeeded"
    return run


def assert_equal(run: Path, reference: Path, most: float | None = None, passes: int = 1) -> None:
    """most: of what is relative, where segments are cut otherwise. With two passes the first checkpoint holds two gradients."""
    if passes == 1:
        assert relative_difference(first_gradient(reference), first_gradient(run)) < (most or GRADIENT)
    most = most or ADAPTER
    for line, wanted in zip(metrics(run), metrics(reference), strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], abs=max(LOSS, most / 10))
        assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=max(GRAD_NORM, most))
        assert line["ledger"] == wanted["ledger"]
    assert relative_difference(adapter(reference), adapter(run)) < most


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_one_segment_or_many_give_the_same_adapter(
    loss: dict[str, Any], first_adapter: Path, tmp_path: Path
) -> None:
    whole = trained_here(tmp_path / "whole", recorded(tmp_path / "a"), first_adapter, **loss)
    in_two = recorded(tmp_path / "b", lambda calls: torn(calls, {len(calls) // 2}))
    in_many = recorded(tmp_path / "c", lambda calls: torn(calls, set(range(len(calls)))))
    for name, batches in (("two", in_two), ("many", in_many)):
        run = trained_here(tmp_path / name, batches, first_adapter, **loss)
        assert_equal(run, whole, RESPLIT, loss.get("passes", 1))
    first, cut = metrics(whole)[0], metrics(tmp_path / "many")[0]
    assert first["num_supervised"] == cut["num_supervised"]
    assert first["num_tokens"] < 0.6 * cut["num_tokens"], "what is shared is read once"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in TRIED_ALWAYS else pytest.param(name, marks=pytest.mark.proof) for name in SPREADS],
)
def test_ranks_with_unequal_segments_change_nothing_but_rounding(
    name: str, first_adapter: Path, tmp_path: Path
) -> None:
    batches = recorded(tmp_path / "a", lambda calls: torn(calls, {1, 2}))
    reference = trained_here(tmp_path / "one", batches, first_adapter)
    run = replayed(tmp_path / "run", batches, first_adapter, **SPREADS[name])
    outcome = finish(run)
    assert outcome["exit_code"] == 0, outcome
    assert_equal(run, reference)


@pytest.mark.slow
def test_a_rank_without_a_rollout_takes_part(first_adapter: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    rollouts = [
        agent_rollout("1-0-0", 0, 0, 1.0, torn(conversation("1-0-0", draw, 3), {1})),
        agent_rollout("1-0-1", 0, 1, 0.0, conversation("1-0-1", draw, 2)),
        agent_rollout("1-0-2", 0, 2, None, conversation("1-0-2", draw, 2)),
    ]
    batches = write_batches(tmp_path / "a", rollouts, STEPS)
    few = {"group_size": 3, "global_batch_size": 3}
    reference = trained_here(tmp_path / "one", batches, first_adapter, **few)
    run = replayed(tmp_path / "run", batches, first_adapter, num_gpus=3, **few)
    assert finish(run)["exit_code"] == 0
    assert_equal(run, reference)
