"""Held-out rows never share a prompt with training rows, whatever the order of the rows."""

import pytest

from finetune.data.split import duplicates, held_out, overlap


@pytest.mark.parametrize(
    ("count", "fraction", "expected"),
    [(10, 0.3, 3), (19, 0.05, 0), (20, 0.05, 1), (100, 0.29, 29), (5, 0, 0)],
)
def test_the_share_is_rounded_down(count, fraction, expected):
    train, held = held_out(range(count), fraction, 0, str)
    assert len(held) == expected
    assert sorted([*train, *held]) == list(range(count))


def test_rows_with_equal_keys_stay_on_one_side():
    rows = [number % 7 for number in range(70)]
    train, held = held_out(rows, 0.3, 0, str)
    assert len(held) == 20  # two groups of ten; a third would be more than 21
    assert not {rows[place] for place in train} & {rows[place] for place in held}


def test_the_choice_depends_on_seed_and_keys_alone():
    rows = [f"row {number}" for number in range(50)]
    chosen = {rows[place] for place in held_out(rows, 0.2, 1, str)[1]}
    assert chosen == {rows[::-1][place] for place in held_out(rows[::-1], 0.2, 1, str)[1]}
    assert chosen != {rows[place] for place in held_out(rows, 0.2, 2, str)[1]}


def test_duplicates_and_overlap():
    assert duplicates(["a", "b", "a", "a"]) == [2, 3]
    assert overlap(["a", "b"], ["c", "b"]) == [1]
