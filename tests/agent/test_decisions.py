"""What a plan of grpo decides; what every method decides is in test_plan.py."""

from collections.abc import Callable
from typing import Any

import pytest

from agent.preflight import Findings
from agent.words import plan_line
from tests.agent.calls import CPU, CUDA

Maker = Callable[..., tuple[dict[str, Any], Findings]]


def value(plan: dict[str, Any], name: str) -> Any:
    return plan["settings"][name]["value"]


def test_nothing_is_left_open(grpo: Maker) -> None:
    plan, found = grpo()
    assert not found.problems
    own = {"max_completion_tokens": 256, "sync": "merged", "rollout_gpus": 1, "global_batch_size": 64}
    assert {name: value(plan, name) for name in own} == own
    assert {plan["settings"][name]["source"] for name in own} == {"plan"}
    assert value(plan, "correction") == "token_truncate"
    assert value(grpo(loss="gspo")[0], "correction") == "sequence_truncate"
    kept = ("domain", "data_format", "verifier")
    assert "auto" not in [item["value"] for name, item in plan["settings"].items() if name not in kept]


@pytest.mark.parametrize(
    ("flags", "completion", "max_length"),
    [
        ({"data": ["builtin:arithmetic"]}, 32, 512),
        ({"model": "builtin:tiny?context=8192"}, 512, 2048),
        ({"model": "builtin:tiny?context=8192", "max_length": "600"}, 300, 600),
        ({"model": "builtin:tiny?context=8192", "max_completion_tokens": "3000"}, 3000, 4024),
        ({"model": "builtin:tiny?context=3500", "max_completion_tokens": "3000"}, 3000, 3500),
    ],
)
def test_completions_leave_room_for_the_prompt(
    grpo: Maker, flags: dict[str, Any], completion: int, max_length: int
) -> None:
    plan, found = grpo(**flags)
    assert not found.problems
    assert (value(plan, "max_completion_tokens"), value(plan, "max_length")) == (completion, max_length)


@pytest.mark.parametrize(
    ("machine", "flags", "sync"),
    [
        (CPU, {}, "merged"),
        (CPU, {"sync": "adapter"}, "adapter"),
        (CUDA, {}, "adapter"),
        (CUDA, {"tuning": "full"}, "merged"),
        (CUDA, {"rollout_tp": "2", "num_gpus": "2"}, "adapter"),
    ],
)
def test_how_weights_reach_the_engines(grpo: Maker, machine: Any, flags: Any, sync: str) -> None:
    plan, found = grpo(machine, **flags)
    assert not found.problems
    assert value(plan, "sync") == sync


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ({"tuning": "full", "rollout_tp": "2", "num_gpus": "2"}, "sync"),
        ({"max_completion_tokens": "512"}, "max_completion_tokens"),  # all of the context
        ({"overlong_buffer": "256"}, "overlong_buffer"),
    ],
)
def test_a_decided_value_may_contradict_one_that_was_asked_for(grpo: Maker, flags: Any, setting: str) -> None:
    _, found = grpo(CUDA, **flags)
    assert [(error.code, error.evidence["setting"]) for error in found.problems] == [
        ("settings_conflict", setting)
    ]


def test_arithmetic_counts_prompts_rollouts_and_steps(grpo: Maker) -> None:
    plan, found = grpo(epochs="2", eval_fraction="0.25", group_size="4", global_batch_size="20", passes="2")
    assert not found.problems
    assert plan["arithmetic"] == {
        "rows_trained": 24,
        "rows_held_out": 8,
        "global_batch_size": 20,
        "rows_per_rank": 20,
        "rows_per_forward": None,
        "steps": 20,  # 5 batches an epoch, the last of 4 prompts; two steps on each
        "rollouts_per_batch": 20,
        "prompts_per_batch": 5,
        "group_size": 4,
        "batches": 10,
    }
    expected = "grpo of builtin:tiny: 20 steps of 20 rollouts (5 prompts x 4) on 1 x cpu, about 1 min, sampled by 1 x vllm (cpu)"
    assert plan_line(plan) == expected


def test_groups_that_do_not_fill_the_batch_are_refused_with_numbers_that_do(grpo: Maker) -> None:
    plan, found = grpo(global_batch_size="20", group_size="8")
    assert [error.code for error in found.problems] == ["batch_arithmetic"]
    assert found.problems[0].evidence == {"valid": [16, 24], "valid_group_sizes": [5, 10]}
    assert plan["arithmetic"]["prompts_per_batch"] is None


@pytest.mark.parametrize(
    ("machine", "flags", "words"),
    [
        (CUDA, {"num_gpus": "2"}, "sampled by 2 x vllm (devices 2,3)"),
        (CUDA, {"num_gpus": "4"}, "sampled by 4 x vllm (sharing devices 0,1,2,3)"),
        (CPU, {"engine": "local"}, "sampled by transformers"),
        (CPU, {"vllm_url": ["http://127.0.0.1:8000"]}, "sampled by 1 x vllm (running ones)"),
        (CPU, {"replay": "."}, "on recorded rollouts"),
    ],
)
def test_the_plan_says_what_samples(grpo: Maker, machine: Any, flags: Any, words: str) -> None:
    assert plan_line(grpo(machine, **flags)[0]).endswith(f", {words}")


@pytest.mark.parametrize(
    "flag", ["rollout_gpus", "concurrency", "sync_retries", "verifier_workers", "vllm_args"]
)
def test_what_changes_no_result_changes_no_plan_id(grpo: Maker, flag: str) -> None:
    changed = grpo(**{flag: ["max-num-seqs=8"] if flag == "vllm_args" else "3"})[0]
    assert changed["plan_id"] == grpo()[0]["plan_id"]


@pytest.mark.parametrize(
    "flags", [{"group_size": "4"}, {"loss": "grpo"}, {"verifier": ["exact"]}, {"temperature": "0.7"}]
)
def test_what_changes_the_result_changes_the_plan_id(grpo: Maker, flags: dict[str, Any]) -> None:
    assert grpo(**flags)[0]["plan_id"] != grpo()[0]["plan_id"]
