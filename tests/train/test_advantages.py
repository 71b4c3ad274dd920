"""Advantages against values worked out by hand and against a loop over the formula; rewards that are no numbers."""

import math
import random
import statistics

import pytest

from finetune.train.advantages import Advantages, group_advantages, overlong_penalty, sample_std

NAN, INF = math.nan, math.inf
# The hand values leave out the 1e-4 beside the deviation.
NEAR = 2e-3


def of(*groups: list[float | None], scale: str = "group") -> Advantages:
    """Return the advantages of groups that stand one after another."""
    rewards = [reward for group in groups for reward in group]
    return group_advantages(rewards, [index for index, group in enumerate(groups) for _ in group], scale)


def reference(rewards: list[float | None], groups: list[int], scale: str) -> list[float]:
    """The formula, one rollout at a time."""
    scorable = [r is not None and math.isfinite(r) for r in rewards]
    step = [r for r, ok in zip(rewards, scorable, strict=True) if ok and r is not None]
    values = []
    for i, reward in enumerate(rewards):
        group = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and scorable[j] and r is not None]
        if not scorable[i] or len(group) < 2 or max(group) - min(group) < 1e-6:
            values.append(0.0)
            continue
        assert reward is not None
        centred = reward - statistics.fmean(group)
        if scale == "group":
            centred /= statistics.stdev(group) + 1e-4
        elif scale == "batch":
            centred /= statistics.stdev(step) + 1e-4
        values.append(centred)
    return values


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equals_the_formula_for_groups_of_any_size_in_any_order(scale: str) -> None:
    draw = random.Random(3)
    for _ in range(50):
        groups = [draw.randrange(5) for _ in range(draw.randrange(1, 30))]
        choices = [0.0, 1.0, -2.5, 0.35, 1e6, None, NAN, INF, -INF, draw.gauss(0, 1)]
        rewards = [draw.choice(choices) for _ in groups]
        own = group_advantages(rewards, groups, scale)
        assert own.values == pytest.approx(reference(rewards, groups, scale), rel=1e-9, abs=1e-9)
        assert own.scorable == [r is not None and math.isfinite(r) for r in rewards]
        assert own.groups_total == len(set(groups))


def test_equal_rewards_that_are_no_binary_fractions_have_exactly_no_advantage() -> None:
    equal, one_better = of([0.35] * 8), of([0.35] * 7 + [0.95])
    assert equal.values == [0.0] * 8
    assert (equal.groups_zero_variance, equal.groups_lone, equal.have_signal) == (1, 0, False)
    assert one_better.values == pytest.approx([-0.353553] * 7 + [2.474874], abs=NEAR)
    assert max(map(abs, one_better.values)) <= 7 / math.sqrt(8)


@pytest.mark.parametrize(("spread", "expected"), [(0.9e-6, 1), (1.1e-6, 0)])
def test_rewards_within_a_millionth_are_equal_and_no_others(spread: float, expected: int) -> None:
    own = of([0.0, spread])
    assert own.groups_zero_variance == expected
    assert own.have_signal is not bool(expected)


def test_a_lone_rollout_is_compared_with_nobody() -> None:
    assert of([1.0, 3.0], [5.0], scale="none").values == [-1.0, 1.0, 0.0]
    scaled = of([1.0, 3.0], [5.0])
    assert scaled.values == pytest.approx([-0.707107, 0.707107, 0.0], abs=NEAR)
    assert (scaled.groups_total, scaled.groups_lone, scaled.groups_zero_variance) == (2, 1, 0)
    assert of([4.0]).values == [0.0]


@pytest.mark.parametrize("missing", [None, NAN])
def test_a_missing_reward_is_in_no_mean(missing: float | None) -> None:
    own = of([missing, 1.0, 2.0, 3.0])
    assert own.values == pytest.approx([0, -1, 0, 1], abs=NEAR)
    assert own.values[0] == 0.0
    assert (own.scorable[0], own.rewards_missing, own.rewards_nonfinite) == (False, 1, 0)
    assert (own.reward_mean, own.reward_std) == (2.0, 1.0)


def test_a_group_without_scores_has_no_advantages_and_no_mean() -> None:
    own = of([None] * 4)
    assert (own.values, own.scorable) == ([0.0] * 4, [False] * 4)
    assert (own.groups_lone, own.rewards_missing) == (1, 4)
    assert (own.reward_mean, own.reward_std) == (None, None)


def test_an_infinite_reward_is_excluded_and_counted_apart() -> None:
    own = of([INF, 1.0, 0.0, 0.0])
    assert own.values == pytest.approx([0, 1.154701, -0.577350, -0.577350], abs=NEAR)
    assert (own.rewards_nonfinite, own.rewards_missing) == (1, 0)
    assert own.reward_mean == pytest.approx(1 / 3)


def test_one_normalisation_and_no_group_feels_another() -> None:
    first, second = [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]
    together = of(first, second)
    assert together.values == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5], abs=NEAR)
    assert together.values == of(first).values + of(second).values


def test_interleaved_rollouts_belong_to_their_prompts() -> None:
    own = group_advantages([1.0, 1.0, 0.0, 1.0], [7, 9, 7, 9], "none")
    assert own.values == [0.5, 0.0, -0.5, 0.0]


def test_the_batch_scale_divides_by_the_deviation_of_all_scorable_rollouts() -> None:
    own = of([0.0, 2.0], [4.0, 4.0], [None], scale="batch")
    deviation = math.sqrt(11 / 3)  # of 0, 2, 4, 4: mean 2.5, squares 6.25 + 0.25 + 2.25 + 2.25
    assert own.values == pytest.approx([-1 / (deviation + 1e-4), 1 / (deviation + 1e-4), 0, 0, 0])


def test_the_deviation_of_huge_rewards_stays_finite() -> None:
    assert sample_std([1e200, -1e200]) == pytest.approx(math.sqrt(2) * 1e200)
    assert of([1e200, -1e200]).values == pytest.approx([0.707107, -0.707107], abs=1e-6)
    assert sample_std([3.0]) is None


def test_a_scale_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'groups' is none of"):
        of([1.0, 0.0], scale="groups")


def test_the_penalty_of_long_completions_falls_in_a_straight_line() -> None:
    lengths = [1, 80, 85, 90, 99, 100, 101, 500]
    penalties = [overlong_penalty(length, 100, 20) for length in lengths]
    assert penalties == [0.0, 0.0, -0.25, -0.5, -0.95, -1.0, -1.0, -1.0]
    assert [overlong_penalty(length, 100, 0) for length in (99, 100, 101)] == [0.0, 0.0, -1.0]
