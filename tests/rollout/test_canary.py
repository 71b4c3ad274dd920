"""The rule of the proof, on numbers worked out by hand."""

import math

import pytest

from finetune.rollout.canary import (
    FACTORS,
    Canary,
    Expected,
    Margin,
    Scores,
    distance,
    is_same_model,
    margin,
    must_differ,
)


def test_distance_is_the_mean_absolute_difference() -> None:
    assert distance([-1.0, -2.0, -4.0], [-1.5, -1.5, -2.0]) == 1.0
    with pytest.raises(ValueError, match="argument 2"):
        distance([-1.0], [-1.0, -2.0])


@pytest.mark.parametrize(
    ("to_new", "to_old", "proves"),
    [
        (0.1, 0.31, True),
        (0.1, 0.3, False),  # exactly a third is not less than a third
        (0.0, 0.01, True),
        (0.0, 0.0, False),  # nothing differs, nothing is proved
        (0.3, 0.1, False),
        (math.nan, 1.0, False),
        (0.1, math.nan, False),
    ],
)
def test_nearer_by_a_factor_of_three(to_new: float, to_old: float, proves: bool) -> None:
    assert Margin(to_new, to_old).proves is proves


def test_margin_to_both_versions() -> None:
    found = margin([-1.0, -3.0], [-1.1, -3.1], [-2.0, -2.0], 4.0)
    assert (round(found.to_new, 9), found.to_old, found.factor) == (0.1, 1.0, 4.0)
    assert round(found.ratio, 6) == 10.0
    assert Margin(0.0, 1.0).ratio == math.inf


def test_one_model_is_known_without_another_version() -> None:
    ours = [-1.0, -4.0, -2.0]  # shifted: -4, -2, -1; mean |difference| 2
    assert is_same_model([-1.3, -4.3, -2.3], ours)  # 0.3 off; to the shift (2.7 + 2.3 + 1.3) / 3 = 2.1
    assert not is_same_model([-4.0, -2.0, -1.0], ours)
    assert not is_same_model([-3.0, -3.0, -3.0], ours)  # 5/3 off, to the shift 4/3


def test_factors_are_asked_once_in_order_until_versions_lie_apart() -> None:
    asked: list[tuple[str, float]] = []

    def score(factor: float) -> Scores:
        asked.append(("new", factor))
        return [[-1.0 - 0.001 * factor], [-2.0 - 0.001 * factor, -3.0 - 0.001 * factor]]

    def previous(factor: float) -> Scores:
        asked.append(("old", factor))
        return [[-1.0], [-2.0, -3.0]]

    expected = Expected(Canary([[1, 2], [3, 4, 5]], score, previous))
    # 10 times the noise is 0.05, so a factor of 50: the first powers of four past it are 64 and 256.
    telling = expected.telling_factors(0.005, with_probes=True)
    assert next(telling) == 64.0
    assert asked == [(who, factor) for factor in (1.0, 4.0, 16.0, 64.0) for who in ("new", "old")]
    assert next(telling) == 256.0
    assert list(expected.telling_factors(0.005, with_probes=False)) == []
    assert next(expected.telling_factors(0.00005, with_probes=True)) == 1.0
    assert list(expected.telling_factors(1e3, with_probes=True)) == []
    assert len(asked) == len(set(asked)) == 2 * (1 + len(FACTORS))


def test_scores_of_another_shape_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        Expected(Canary([[1, 2, 3]], lambda _: [[-1.0]], lambda _: [[-1.0]])).at(1.0)


def test_an_engine_must_show_a_difference_where_ours_shows_eight() -> None:
    old = [-1.0] * 10
    assert must_differ([-2.0] * 8 + [-1.0] * 2, old)
    assert not must_differ([-2.0] * 7 + [-1.0] * 3, old)
