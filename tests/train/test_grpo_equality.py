"""One batch of rollouts, however it is spread over ranks: nothing changes but rounding.

Replayed rollouts, fp32, ragged, 5 prompts in groups of 4 (20 rollouts, which 3 ranks do not divide), LoRA-B not zero at
the start, 10 steps.
"""

from pathlib import Path
from typing import Any

import pytest

from finetune.records import read_lines
from tests.train.runs import (
    REWARDS,
    adapter,
    finish,
    first_gradient,
    make_prompts_run,
    metrics,
    relative_difference,
    start_adapter,
)

LOSS, GRADIENT, GRAD_NORM, ADAPTER = 5e-6, 2e-6, 5e-6, 1e-5
COMMON: dict[str, Any] = {
    "verifier": [f"{REWARDS}:even"],
    "num_prompts": 10,
    "global_batch_size": 20,
    "max_steps": 10,
    "max_completion_tokens": 9,
    "max_grad_norm": 0.0,
    "schedule": "linear",
    "checkpoint_every": 1,
    "checkpoints_kept": 20,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "accumulation": {"batch_size_per_gpu": 1},
    "ddp x2": {"num_gpus": 2},
    "ddp x3, accumulation": {"num_gpus": 3, "batch_size_per_gpu": 2},
    "fsdp2 x2": {"num_gpus": 2, "parallel": "fsdp2"},
    "fsdp2 x3": {"num_gpus": 3, "parallel": "fsdp2"},
}
# What the default loss is tried on in `make test`, and the others in `make proof`, for they are long.
OFTEN = ("ddp x2", "ddp x3, accumulation", "fsdp2 x3")
OTHERWISE = ("accumulation", "ddp x3, accumulation", "fsdp2 x2")
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "gspo, two passes, kl": {"loss": "gspo", "passes": 2, "beta": 0.05, "learning_rate": 3e-4},
    "grpo, sequence mask": {"loss": "grpo", "correction": "sequence_mask", "scale_rewards": "batch"},
}


@pytest.fixture(scope="module")
def first_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start_adapter(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, first_adapter: Path) -> Path:
    run = make_prompts_run(
        tmp_path_factory.mktemp("recorded") / "run", init_adapter=str(first_adapter), **COMMON
    )
    assert finish(run)["exit_code"] == 0
    return run


def replayed(folder: Path, recorded: Path, first_adapter: Path, **settings: Any) -> Path:
    run = make_prompts_run(
        folder, **{**COMMON, "init_adapter": str(first_adapter), "replay": str(recorded), **settings}
    )
    outcome = finish(run)
    assert outcome["exit_code"] == 0, outcome
    return run


def assert_equal(run: Path, reference: Path, passes: int = 1) -> None:
    """With several passes the first checkpoint comes after the last of them: the gradient of the first is in its norm alone."""
    steps, expected = metrics(run), metrics(reference)
    assert [line["step"] for line in steps] == list(range(1, len(expected) + 1))
    if passes == 1:
        assert relative_difference(first_gradient(reference), first_gradient(run)) < GRADIENT
    for line, wanted in zip(steps, expected, strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], abs=LOSS)
        assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=GRAD_NORM)
        assert line["num_supervised"] == wanted["num_supervised"]
        assert line["entropy"] == pytest.approx(wanted["entropy"], abs=1e-4)
        assert line["kl"] == pytest.approx(wanted["kl"], abs=1e-6)
    assert relative_difference(adapter(reference), adapter(run)) < ADAPTER
    found, logps = trained(run), trained(reference)
    assert found.keys() == logps.keys()
    assert all(found[name] == pytest.approx(logps[name], abs=1e-5) for name in logps)


def trained(run: Path) -> dict[str, list[float]]:
    """Return what the trainer thought of the tokens of the first batch, by rollout."""
    lines = read_lines(run / "rollouts" / "trained-000001.jsonl")
    assert lines[0]["num_rollouts"] == len(lines) - 1 > 10
    return {line["id"]: line["logprobs"] for line in lines[1:]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(value, id=name, marks=[pytest.mark.proof] if value else [])
        for name, value in LOSSES.items()
    ],
)
def test_ranks_and_accumulation_change_nothing_but_rounding(
    loss: dict[str, Any], recorded: Path, first_adapter: Path, tmp_path: Path
) -> None:
    reference = replayed(tmp_path / "one", recorded, first_adapter, **loss)
    passes = loss.get("passes", 1)
    assert len(metrics(reference)) == COMMON["max_steps"]
    assert_ratios(reference, passes)
    for name, settings in VARIANTS.items():
        if name not in (OTHERWISE if loss else OFTEN):
            continue
        run = replayed(tmp_path / name, recorded, first_adapter, **settings, **loss)
        assert_ratios(run, passes)
        assert_equal(run, reference, passes)


def assert_ratios(run: Path, passes: int) -> None:
    """In the first pass over a batch nothing has moved since its log-probs were kept: the ratio is exactly 1, and only there."""
    for place, line in enumerate(metrics(run)):
        is_first = place % passes == 0
        assert ((line["ratio_min"], line["ratio_mean"], line["ratio_max"]) == (1.0, 1.0, 1.0)) == is_first


@pytest.mark.slow
def test_groups_and_rollouts_do_not_depend_on_the_ranks(
    recorded: Path, first_adapter: Path, tmp_path: Path
) -> None:
    run = make_prompts_run(
        tmp_path / "live", **{**COMMON, "init_adapter": str(first_adapter), "num_gpus": 2, "max_steps": 1}
    )
    assert finish(run)["exit_code"] == 0
    name = "rollouts/step-000001.jsonl"
    live, expected = ((one / name).read_text().splitlines()[1:] for one in (run, recorded))
    assert live == expected
