"""Which rows a step has, and how they are spread: every row weighs once, ranks stay aligned, epochs differ."""

import pytest

from finetune.data.batches import Budget, Microbatch, collate, epoch_order, rank_microbatches, step_rows
from finetune.records import Example


def row_lists(ranks: list[list[Microbatch]]) -> list[int]:
    return sorted(row for rank in ranks for microbatch in rank if microbatch.scale for row in microbatch.rows)


def test_each_epoch_is_another_permutation_and_the_seed_fixes_it() -> None:
    """DI-04."""
    orders = [epoch_order(3, epoch, 8) for epoch in range(3)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders == [epoch_order(3, epoch, 8) for epoch in range(3)]
    assert orders != [epoch_order(4, epoch, 8) for epoch in range(3)]


def test_last_step_of_an_epoch_has_the_rows_that_are_left() -> None:
    """LM-03: 5 rows at 4 a step are two steps, and each row is used once."""
    first, second, third = (step_rows(0, step, 5, 4) for step in (1, 2, 3))
    assert (len(first), len(second), len(third)) == (4, 1, 4)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert third == epoch_order(0, 1, 5)[:4]


def test_a_batch_larger_than_the_data_is_the_data() -> None:
    assert sorted(step_rows(0, 7, 3, 16)) == [0, 1, 2]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [Budget(40), Budget(1000, rows=2), Budget(40, packing=True), Budget(8)])
def test_every_row_weighs_once_and_all_ranks_have_equally_many_forwards(
    budget: Budget, num_ranks: int
) -> None:
    """DI-02, DI-03: fewer rows than ranks, rows that the ranks do not divide."""
    for lengths in ({0: 7}, {0: 5, 1: 30, 2: 8, 3: 8, 4: 12}):
        ranks = rank_microbatches(lengths, budget, num_ranks)
        assert row_lists(ranks) == sorted(lengths)
        assert len({len(rank) for rank in ranks}) == 1
        assert all(rank for rank in ranks)


def test_budget_counts_padding_and_a_long_row_goes_alone() -> None:
    lengths = {0: 10, 1: 9, 2: 3, 3: 50}
    ((longest, *others),) = rank_microbatches(lengths, Budget(20), 1)
    assert longest.rows == [3]
    # 10 and 9 together would fit too, as 20 tokens; three forwards suffice with 18 at most.
    assert [microbatch.rows for microbatch in others] == [[0], [1, 2]]


def test_packing_takes_as_few_sequences_as_fit_and_the_shortest_such() -> None:
    ((first, second),) = rank_microbatches({0: 10, 1: 9, 2: 6, 3: 3}, Budget(16, packing=True), 1)
    assert first.sequences == ((0, 3),)  # 13 and 15 tokens; 16 and 12 would fit, but peak higher
    assert second.sequences == ((1, 2),)


def made(length: int, prompt: int) -> Example:
    return Example(list(range(100, 100 + length)), [0.0] * prompt + [1.0] * (length - prompt), 0, "f", 1)


def test_collated_targets_follow_the_tokens_that_predict_them() -> None:
    examples = [made(6, 4), made(4, 2)]
    padded = collate(Microbatch(((0,), (1,))), examples)
    assert padded.input_ids_BT.tolist() == [[100, 101, 102, 103, 104], [100, 101, 102, 0, 0]]
    assert padded.selected_N.tolist() == [3, 4, 6, 7]
    assert padded.targets_N.tolist() == [104, 105, 102, 103]
    assert padded.row_N.tolist() == [0, 0, 1, 1]
    packed = collate(Microbatch(((0, 1),)), examples)
    assert packed.input_ids_BT.tolist() == [[100, 101, 102, 103, 104, 100, 101, 102]]
    assert packed.position_ids_BT is not None
    assert packed.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert packed.selected_N.tolist() == [3, 4, 6, 7]


def test_a_copy_that_keeps_ranks_aligned_has_no_weight() -> None:
    copy = collate(Microbatch(((0,),), scale=0.0), [made(6, 4)])
    assert copy.weights_N.tolist() == [0.0, 0.0]


def test_weights_of_a_row_survive() -> None:
    example = Example([1, 2, 3], [0.0, 0.5, 2.0], 0, "f", 1)
    assert collate(Microbatch(((0,),)), [example]).weights_N.tolist() == [0.5, 2.0]
