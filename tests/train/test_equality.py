"""One training, however it is spread: ranks, sharding, accumulation and packing change nothing but rounding.

fp32, 7 ragged rows, global batch 5 (which no number of ranks here divides), LoRA-B not zero at the start, 12 steps.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.rank import run_rank
from finetune.records import StopFlag
from tests.train import runs
from tests.train.runs import (
    adapter,
    finish,
    first_gradient,
    make_run,
    metrics,
    ragged_examples,
    relative_difference,
)

LOSS, GRADIENT, GRAD_NORM, ADAPTER = 5e-6, 2e-6, 5e-6, 1e-5
SETTINGS: dict[str, Any] = {
    "epochs": 6,
    "learning_rate": 1e-3,
    "schedule": "linear",
    "global_batch_size": 5,
    "checkpoint_every": 1,
    "checkpoints_kept": 20,
    "max_grad_norm": 0.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "accumulation 2": {"batch_size_per_gpu": 3},
    "accumulation 5": {"batch_size_per_gpu": 1},
    "token budget": {"micro_batch_tokens": 80},
    "kernel for short rows": {"attention": "short_rows"},
    "packed": {"packing": True, "attention": "short_rows"},
    "packed, checkpointed": {"packing": True, "gradient_checkpointing": True},
    "ddp x2": {"num_gpus": 2},
    "ddp x2, accumulation": {"num_gpus": 2, "batch_size_per_gpu": 1},
    "fsdp2 x2": {"num_gpus": 2, "parallel": "fsdp2"},
    "fsdp2 x2, packed": {"num_gpus": 2, "parallel": "fsdp2", "packing": True},
    "fsdp2 x3, accumulation": {"num_gpus": 3, "parallel": "fsdp2", "batch_size_per_gpu": 1},
}
COMBINED = (
    "ddp x2, accumulation",
    "fsdp2 x2, packed",
)  # of what others show one by one: in `make proof ROW=long-tests`


@pytest.fixture(scope="module")
def start_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.start_adapter(tmp_path_factory.mktemp("start"))


def trained(folder: Path, start_adapter: Path, launcher: tuple[str, ...] = (), **settings: Any) -> Path:
    common = {**SETTINGS, "init_adapter": str(start_adapter)}
    run = make_run(folder, ragged_examples(7), **{**common, **settings})
    outcome = finish(run, *launcher)
    assert outcome["exit_code"] == 0, outcome
    return run


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, start_adapter: Path) -> Path:
    return trained(tmp_path_factory.mktemp("one") / "run", start_adapter)


def assert_equal(run: Path, reference: Path) -> None:
    steps, expected = metrics(run), metrics(reference)
    assert [line["step"] for line in steps] == list(range(1, 13))
    for line, wanted in zip(steps, expected, strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], abs=LOSS)
        assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=GRAD_NORM)
        assert line["rows"] == wanted["rows"]
        assert line["num_supervised"] == wanted["num_supervised"]
    assert relative_difference(first_gradient(reference), first_gradient(run)) < GRADIENT
    assert relative_difference(adapter(reference), adapter(run)) < ADAPTER


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(value, id=name, marks=[pytest.mark.proof] if name in COMBINED else [])
        for name, value in VARIANTS.items()
    ],
)
def test_spread_training_equals_one_process(
    settings: dict[str, Any], one_process: Path, start_adapter: Path, tmp_path: Path
) -> None:
    run = trained(tmp_path / "run", start_adapter, **settings)
    assert_equal(run, one_process)
    assert_spread_as_asked(run, settings.get("num_gpus", 1), settings.get("parallel", "ddp"))


def assert_spread_as_asked(run: Path, num_ranks: int, kind: str) -> None:
    """What was measured on the wrapped model: its kind, and under FSDP2 near 1/N of the bytes on each rank."""
    facts = json.loads((run / "outcome.json").read_text())["result"]["facts"]
    assert facts["world_size"] == len(facts["local_parameter_bytes"]) == num_ranks
    if num_ranks == 1:
        assert (facts["parallel"], facts["num_dtensors"]) == ("none", 0)
    elif kind == "ddp":
        assert (facts["parallel"], facts["num_dtensors"]) == ("ddp", 0)
        assert facts["local_parameter_bytes"] == [facts["parameter_bytes"]] * num_ranks
    else:
        assert facts["parallel"] == "fsdp2"
        assert facts["num_dtensors"] == 39 + 56  # every weight of the model and of its adapter
        for local in facts["local_parameter_bytes"]:
            assert local == pytest.approx(facts["parameter_bytes"] / num_ranks, rel=0.05)


def test_torchruns_ranks_equal_one_process(one_process: Path, start_adapter: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "finetune.rank")
    assert_equal(trained(tmp_path / "run", start_adapter, launcher, num_gpus=2), one_process)


def test_accumulation_of_1_2_and_4_is_the_same_training(start_adapter: Path, tmp_path: Path) -> None:
    """Issue 2: four rows a step, forwarded together, two at a time and one by one; an epoch of 7 rows ends in a short step."""
    found = []
    for accumulation in (1, 2, 4):
        run = make_run(
            tmp_path / str(accumulation),
            ragged_examples(7),
            **{**SETTINGS, "init_adapter": str(start_adapter), "global_batch_size": 4},
            batch_size_per_gpu=4 // accumulation,
            gradient_accumulation=accumulation,
        )
        torch.set_num_threads(1)
        assert run_rank(run, 0, 1, None, StopFlag()).status == "succeeded"
        found.append(run)
    assert [len(line["rows"]) for line in metrics(found[0])] == [4, 3] * 6
    for run in found[1:]:
        assert_equal(run, found[0])
