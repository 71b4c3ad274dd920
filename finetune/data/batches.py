"""Which rows a step trains on, and how they are regrouped into forwards; pure functions that every rank computes alike.

The rows of step k depend on (seed, number of rows, global batch, k) alone. Ranks, accumulation, length grouping,
packing and the token budget only regroup the rows inside a step.

Tensors: B sequence, T token, N supervised position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.records import Example


def epoch_order(seed: int, epoch: int, num_rows: int) -> list[int]:
    """Return the order of the rows in an epoch (counted from 0); each epoch has another one."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()


def step_rows(seed: int, step: int, num_rows: int, global_batch: int) -> list[int]:
    """Return the rows of optimizer step `step` (counted from 1). The last step of an epoch has the rows that are left."""
    epoch, place = divmod(step - 1, math.ceil(num_rows / global_batch))
    return epoch_order(seed, epoch, num_rows)[place * global_batch : (place + 1) * global_batch]


@dataclass(frozen=True)
class Budget:
    """What one forward may hold."""

    tokens: int  # padding included
    rows: int | None = None
    packing: bool = False


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward: each inner tuple becomes one sequence. scale 0 marks a copy that only keeps collectives aligned."""

    sequences: tuple[tuple[int, ...], ...]
    scale: float = 1.0

    @property
    def rows(self) -> list[int]:
        return [row for sequence in self.sequences for row in sequence]


def input_length(example: Example) -> int:
    """Return how many tokens must go in: those before the last supervised one, whose own output nothing reads."""
    return max(index for index, weight in enumerate(example.weights) if weight > 0)


def rank_microbatches(
    lengths: dict[int, int], budget: Budget, num_ranks: int, together: Sequence[int] | None = None
) -> list[list[Microbatch]]:
    """Return the forwards of every rank for one step's rows (row -> length); all ranks get equally many.

    Rows go to the rank with the fewest tokens so far, the longest first; a rank that has fewer forwards than another
    repeats a short row at scale 0. together: a number for each row; rows of equal numbers go to one rank.
    """
    by_length = sorted(lengths, key=lambda row: (-lengths[row], row))
    units: dict[int, list[int]] = {}
    for row in by_length:
        units.setdefault(row if together is None else together[row], []).append(row)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for unit in sorted(units.values(), key=lambda rows: -sum(lengths[row] for row in rows)):
        rank = loads.index(min(loads))
        shares[rank] += unit
        loads[rank] += sum(lengths[row] for row in unit)
    in_order = [sorted(share, key=lambda row: (-lengths[row], row)) for share in shares]
    forwards = [_balanced(share, lengths, budget) for share in in_order]
    most = max(len(own) for own in forwards)
    filler = Microbatch(((by_length[-1],),), scale=0.0)
    return [own + [filler] * (most - len(own)) for own in forwards]


def _balanced(rows: list[int], lengths: dict[int, int], budget: Budget) -> list[Microbatch]:
    """Return as few forwards as the budget allows, the largest of them as small as that number allows.

    The largest one sets the peak of memory, and a small rest costs nearly as much time as a full forward.
    """
    group = _packed if budget.packing else _padded
    found = group(rows, lengths, budget)
    low, high = 1, budget.tokens
    while low < high:
        middle = (low + high) // 2
        tighter = group(rows, lengths, replace(budget, tokens=middle))
        if len(tighter) <= len(found):
            found, high = tighter, middle
        else:
            low = middle + 1
    return found


def _padded(rows: list[int], lengths: dict[int, int], budget: Budget) -> list[Microbatch]:
    """Group rows, longest first, so that each group padded to its longest row stays within the budget."""
    groups: list[list[int]] = []
    for row in rows:
        fits = groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget.tokens
        if fits and (budget.rows is None or len(groups[-1]) < budget.rows):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [Microbatch(tuple((row,) for row in group)) for group in groups]


def _packed(rows: list[int], lengths: dict[int, int], budget: Budget) -> list[Microbatch]:
    """Put rows, longest first, into the first sequence that still has room."""
    packs: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        fitting = (
            index
            for index, free in enumerate(room)
            if lengths[row] <= free and (budget.rows is None or len(packs[index]) < budget.rows)
        )
        index = next(fitting, len(packs))
        if index == len(packs):
            packs.append([])
            room.append(budget.tokens)
        packs[index].append(row)
        room[index] -= lengths[row]
    return [Microbatch((tuple(pack),)) for pack in packs]


@dataclass(frozen=True)
class Batch:
    """A microbatch as tensors. position_ids_BT is None unless rows are packed; row_N is the row of each target."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor | None
    selected_N: Tensor  # index into the flattened B*T positions: the one before each target
    targets_N: Tensor
    weights_N: Tensor  # float32, already scaled
    row_N: Tensor
    num_tokens: int  # without padding
    attend_BTT: Tensor | None = (
        None  # bool: which positions see which; None: all see all before them in their row
    )

    def to(self, device: torch.device) -> Batch:
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def collate(microbatch: Microbatch, examples: Sequence[Example]) -> Batch:
    """Return the tensors of a microbatch, padded on the right.

    No attention mask is needed: under causal attention no real token sees the padding behind it, and packed rows are
    told apart by their restarting positions.
    """
    inputs, positions, selected, targets, weights, rows = [], [], [], [], [], []
    width = max(sum(input_length(examples[row]) for row in sequence) for sequence in microbatch.sequences)
    for line, sequence in enumerate(microbatch.sequences):
        ids: list[int] = []
        places: list[int] = []
        for row in sequence:
            example, start = examples[row], line * width + len(ids)
            length = input_length(example)
            learned = [index for index, weight in enumerate(example.weights) if weight > 0]
            selected += [start + index - 1 for index in learned]
            targets += [example.input_ids[index] for index in learned]
            weights += [example.weights[index] * microbatch.scale for index in learned]
            rows += [row] * len(learned)
            ids += example.input_ids[:length]
            places += range(length)
        padding = width - len(ids)
        inputs.append(ids + [0] * padding)
        positions.append(places + list(range(places[-1] + 1, places[-1] + 1 + padding)))
    packed = any(len(sequence) > 1 for sequence in microbatch.sequences)
    return Batch(
        torch.tensor(inputs),
        torch.tensor(positions) if packed else None,
        torch.tensor(selected),
        torch.tensor(targets),
        torch.tensor(weights, dtype=torch.float32),
        torch.tensor(rows),
        sum(input_length(examples[row]) for row in microbatch.rows),
    )


def rank_batches(
    rows: Sequence[int],
    examples: Sequence[Example],
    budget: Budget,
    rank: int,
    num_ranks: int,
    together: Sequence[int] | None = None,
) -> tuple[list[Batch], float]:
    """Return one rank's microbatches of a step's rows, and the sum of weights over the rows of all ranks.

    together: as in rank_microbatches.
    """
    lengths = {row: input_length(examples[row]) for row in rows}
    own = rank_microbatches(lengths, budget, num_ranks, together)[rank]
    return [collate(microbatch, examples) for microbatch in own], math.fsum(
        sum(examples[row].weights) for row in rows
    )
