"""Rules over metrics: each fires after its window of bad steps, and never for one odd step."""

from pathlib import Path
from typing import Any

import pytest

from agent.health import RULES, HealthWatch, health, rule_names
from agent.hints import hints

ROOT = Path(__file__).parents[2]


def line(step: int = 1, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "grad_norm": 1.0, "step_s": 2.0, "num_steps": 10} | values


def rollouts(step: int = 1, **values: Any) -> dict[str, Any]:
    """A healthy step of grpo: its loss is 0, as that of a first pass is."""
    usual = {
        "loss": 0.0,
        "reward_mean": 0.5,
        "zero_variance_share": 0.2,
        "truncated_share": 0.1,
        "entropy": 1.0,
    }
    usual |= {"kl": 0.0, "logp_gap_k3": 1e-4, "correction_limited_share": 0.0, "clip_share_low": 0.0}
    usual |= {"clip_share_high": 0.0, "rollouts_lost": 0, "rewards_missing": 0, "completions_total": 16}
    return line(step, **usual | values)


def hint_ids(lines: list[dict[str, Any]]) -> list[str]:
    return [entry["hint_id"] for entry in health(lines)]


@pytest.mark.parametrize(
    ("name", "bad", "good", "window", "hint"),
    [
        ("grad_norm", 101.0, 100.0, 20, "gradient_large"),
        ("grad_norm", 0.0, 1e-9, 5, "no_learning_signal"),
        ("reward_mean", 0.0, 0.01, 20, "rewards_zero"),
        ("zero_variance_share", 0.9, 0.89, 20, "groups_equal"),
        ("truncated_share", 0.8, 0.79, 20, "completions_cut"),
        ("entropy", 0.009, 0.01, 20, "low_entropy"),
        ("kl", 2.1, 2.0, 20, "kl_high"),
        ("logp_gap_k3", 0.011, 0.01, 20, "sampler_mismatch"),
        ("correction_limited_share", 0.51, 0.5, 20, "correction_heavy"),
        ("clip_share_high", 0.51, 0.5, 20, "clipping_heavy"),
        ("rollouts_lost", 1, 0, 5, "rollouts_lost"),
        ("rewards_missing", 9, 8, 5, "rewards_missing"),
    ],
)
def test_a_rule_takes_its_window_of_bad_steps(
    name: str, bad: float, good: float, window: int, hint: str
) -> None:
    steps = [rollouts(step, **{name: bad}) for step in range(window)]
    assert hint_ids(steps) == [hint]
    assert hint_ids(steps[1:]) == []
    assert hint_ids([*steps[:-1], rollouts(window, **{name: good})]) == []
    assert hint_ids([rollouts(0), *steps]) == [hint], "what came before does not matter"


def test_every_rule_is_tried_above() -> None:
    (mark,) = test_a_rule_takes_its_window_of_bad_steps.pytestmark  # type: ignore[attr-defined]
    assert {rule.hint_id for rule in RULES} <= {case[4] for case in mark.args[1]}


def test_clipped_tokens_count_on_both_sides() -> None:
    steps = [rollouts(step, clip_share_low=0.3, clip_share_high=0.3) for step in range(20)]
    assert hint_ids(steps) == ["clipping_heavy"]
    assert "clip_share_low + clip_share_high 0.6" in health(steps)[0]["text"]


def test_a_loss_that_is_no_number_is_told_at_once() -> None:
    assert hint_ids([line(1), line(2, loss=None, non_finite=["loss"])]) == ["non_finite"]
    assert hint_ids([line(1, grad_norm=None)]) == ["non_finite"]
    assert hint_ids([{"step": 1, "reward_mean": 1.0}]) == [], "a line without a loss says nothing of it"


def test_a_normal_start_of_grpo_is_healthy() -> None:
    assert hint_ids([rollouts(step) for step in range(40)]) == []
    assert hint_ids([]) == []


def test_a_loss_far_above_what_it_was_is_told_without_rewards_alone() -> None:
    course = [3.0] * 20 + [1.0] * 20 + [1.6] * 20
    assert hint_ids([line(step, loss=loss) for step, loss in enumerate(course)]) == ["loss_rises"]
    assert hint_ids([line(step, loss=loss) for step, loss in enumerate([*course[:-20], *[1.5] * 20])]) == []
    assert hint_ids([rollouts(step, loss=loss) for step, loss in enumerate(course)]) == []


def test_a_held_out_loss_that_rises_while_training_goes_on_is_told() -> None:
    course = [line(step, loss=3.0 - step / 10) for step in range(20)]
    for step, value in ((3, 1.0), (8, 1.02), (13, 1.04), (18, 1.06)):
        course[step] |= {"eval_loss": value}
    assert hint_ids(course) == ["held_out_falls"]
    course[18] |= {"eval_loss": 1.03}
    assert hint_ids(course) == []


def test_rewards_that_rise_while_held_out_rows_fall_are_told() -> None:
    course = [rollouts(step, reward_mean=step / 60) for step in range(60)]
    for step, value in ((10, 0.5), (30, 0.45), (50, 0.4)):
        course[step] |= {"eval_accuracy": value}
    assert hint_ids(course) == ["held_out_falls"]
    assert hint_ids([one | {"reward_mean": 0.5} for one in course]) == []


def test_a_sync_that_takes_longer_than_the_work_is_told() -> None:
    slow = {"sync_s": 4.0, "sync_proof_s": 1.0, "sampling_s": 2.0}
    assert hint_ids([rollouts(step, **slow) for step in range(10)]) == ["slow_sync"]
    assert hint_ids([rollouts(step, **slow | {"sampling_s": 3.5}) for step in range(10)]) == []


def test_news_are_told_once_until_they_mend() -> None:
    watch = HealthWatch()
    bad, good = [rollouts(step, entropy=0.0) for step in range(20)], [rollouts(step) for step in range(20)]
    assert [entry["hint_id"] for entry in watch.news(bad)] == ["low_entropy"]
    assert watch.news(bad) == []
    assert watch.news(good) == []
    assert len(watch.news(bad)) == 1


def test_each_rule_has_a_hint() -> None:
    told = {rule.hint_id for rule in RULES} | {"non_finite", "loss_rises", "rollouts_lost", "rewards_missing"}
    assert told | {"slow_sync", "held_out_falls"} <= set(hints())


@pytest.fixture
def real_metrics(tmp_path: Path) -> list[dict[str, Any]]:
    """Return the metrics of a tiny run of each method, measured on held-out rows at each step."""
    import torch

    from finetune.rank import run_rank
    from finetune.records import StopFlag
    from tests.train.runs import make_prompts_run, make_run, metrics, ragged_examples

    torch.set_num_threads(1)
    settings: dict[str, Any] = {"max_steps": 2, "eval_every": 1}
    verifier = f"{ROOT / 'tests' / 'train' / 'rewards.py'}:even"
    runs = [
        make_run(
            tmp_path / "sft", ragged_examples(8), ragged_examples(2, 1), global_batch_size=4, **settings
        ),
        make_prompts_run(tmp_path / "grpo", num_eval=2, verifier=[verifier], **settings),
    ]
    for run in runs:
        run_rank(run, 0, 1, None, StopFlag())
    return [one for run in runs for one in metrics(run)]


@pytest.mark.slow
def test_rules_read_what_training_writes(real_metrics: list[dict[str, Any]]) -> None:
    """Real lines of a tiny run of each method; what only vLLM's delivery adds is in its source."""
    written = {name for one in real_metrics for name in one}
    delivery = (ROOT / "finetune" / "rollout" / "sync.py").read_text()
    assert rule_names() - written <= {"sync_s", "sync_proof_s"}
    assert all(f'"{name}"' in delivery for name in rule_names() - written)
    assert hint_ids(real_metrics) == []
