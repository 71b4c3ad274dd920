"""The arithmetic of batches and steps, and settings that cannot be meant."""

from typing import Any

import pytest

from finetune.config import SftConfig
from finetune.errors import FinetuneError
from finetune.knobs import build
from finetune.methods import method_named
from finetune.rules import (
    contradictions,
    forward_tokens,
    global_batch,
    idle_at_size_one,
    rows_per_forward,
    steps_of,
)


def config(**settings: Any) -> SftConfig:
    made: SftConfig = build(SftConfig, {"model": "m", "data": ["d"], **settings})
    return made


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 16),
        ({"global_batch_size": 5}, 5),
        ({"batch_size_per_gpu": 2, "gradient_accumulation": 3, "num_gpus": 4}, 24),
        ({"batch_size_per_gpu": 2, "num_gpus": 4}, 8),
        ({"gradient_accumulation": 3}, 3),
        ({"global_batch_size": 24, "batch_size_per_gpu": 2, "gradient_accumulation": 3, "num_gpus": 4}, 24),
    ],
)
def test_global_batch_counts_rows_of_all_ranks(settings: dict[str, Any], expected: int) -> None:
    assert global_batch(config(**settings)) == expected


def test_batches_that_contradict_each_other_name_the_right_number() -> None:
    with pytest.raises(FinetuneError, match="= 24") as caught:
        global_batch(config(global_batch_size=20, batch_size_per_gpu=2, gradient_accumulation=3, num_gpus=4))
    assert caught.value.code == "batch_arithmetic"
    assert caught.value.evidence["valid"] == [24]


def test_tokens_of_a_forward_depend_on_the_device_unless_they_are_asked_for() -> None:
    assert [forward_tokens(config(device=device)) for device in ("cuda", "cpu")] == [8192, 1024]
    assert forward_tokens(config(device="cuda", micro_batch_tokens=64)) == 64


def test_accumulation_alone_sets_the_rows_of_a_forward() -> None:
    assert (
        rows_per_forward(config(global_batch_size=10, gradient_accumulation=3, num_gpus=2)) == 2
    )  # ceil(10 / 6)
    assert rows_per_forward(config(batch_size_per_gpu=3)) == 3
    assert rows_per_forward(config()) is None


@pytest.mark.parametrize(
    ("settings", "rows", "steps"),
    [
        ({"global_batch_size": 4}, 5, 2),
        ({"global_batch_size": 4, "epochs": 3}, 8, 6),
        ({"global_batch_size": 4, "epochs": 2.5}, 8, 5),
        ({"global_batch_size": 4, "epochs": 0.1}, 8, 1),
        ({"max_steps": 7}, 5, 7),
    ],
)
def test_steps_count_the_short_last_step_of_each_epoch(
    settings: dict[str, Any], rows: int, steps: int
) -> None:
    assert steps_of(config(**settings), rows) == steps


@pytest.mark.parametrize(
    ("settings", "name", "code"),
    [
        ({"tuning": "full", "lora_rank": 8}, "lora_rank", "setting_without_effect"),
        ({"max_steps": 3, "epochs": 2}, "epochs", "setting_without_effect"),
        ({"eval_data": ["e"], "eval_fraction": 0.1}, "eval_fraction", "setting_without_effect"),
        ({"init_adapter": "a", "lora_alpha": 8}, "lora_alpha", "setting_without_effect"),
        ({"early_stopping": 2}, "early_stopping", "settings_conflict"),
        ({"profile": "p", "parallel": "ddp"}, "parallel", "settings_conflict"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(settings: dict[str, Any], name: str, code: str) -> None:
    found = list(contradictions(config(**settings), set(settings)))
    assert [(error.evidence["setting"], error.code) for error in found] == [(name, code)]


def test_a_default_is_no_contradiction() -> None:
    assert not list(
        contradictions(
            config(tuning="full", max_steps=3, eval_data=["e"]), {"tuning", "max_steps", "eval_data"}
        )
    )


def test_settings_of_several_ranks_idle_at_one() -> None:
    asked = {"parallel", "distributed_timeout", "seed"}
    assert idle_at_size_one(config(parallel="fsdp2"), asked) == ["distributed_timeout", "parallel"]
    assert idle_at_size_one(config(parallel="fsdp2", num_gpus=2), asked) == []


def test_unknown_method_names_those_that_exist() -> None:
    with pytest.raises(FinetuneError, match="there are: sft") as caught:
        method_named("stf")
    assert "did you mean sft" in caught.value.message
