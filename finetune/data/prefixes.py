"""Completions of one prompt in one sequence: the prompt is read once, and each completion sees it and itself alone.

The gradient is that of separate sequences: what the prompt's positions compute does not depend on what follows them.
With eight completions of 16 tokens to a prompt of 50 this is a third of the tokens.

Tensors: B sequence, T token, N supervised position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.data.batches import Batch, Budget, Microbatch, collate
from finetune.records import Example

WIDTHS = 16  # sequences are as wide as a multiple of this: matrix libraries keep code and memory for each shape they met


@dataclass(frozen=True)
class Bundle:
    """Rows with equal prompts, as one sequence. num_tokens: of the prompt once, and of all completions but their last."""

    rows: tuple[int, ...]
    num_tokens: int


def bundle_batches(
    rows: Sequence[int], examples: Sequence[Example], budget: Budget, rank: int, num_ranks: int
) -> list[Batch]:
    """Return one rank's microbatches of these rows; every rank gets equally many, by copies of weight 0 where needed.

    An example must end in a target. What stands before its first target is its prompt; what follows sees it and itself.
    Bundles are as large as the budget allows, and small enough that each rank has its share.
    """
    bundles = bundled(rows, examples, budget, num_ranks)
    shares: list[list[Bundle]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for bundle in bundles:
        place = loads.index(min(loads))
        shares[place].append(bundle)
        loads[place] += bundle.num_tokens
    forwards = [_padded(share, budget) for share in shares]
    most = max(map(len, forwards))
    own = [collate_bundles(forward, examples, 1.0) for forward in forwards[rank]]
    return own + [collate_bundles(bundles[-1:], examples, 0.0)] * (most - len(own))


def bundled(rows: Sequence[int], examples: Sequence[Example], budget: Budget, num_ranks: int) -> list[Bundle]:
    """Return the bundles, the largest first."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        by_prompt.setdefault(_prompt(examples[row]), []).append(row)
    whole = sum(len(prompt) + sum(_own(examples[row]) for row in own) for prompt, own in by_prompt.items())
    limit = min(budget.tokens, max(1, whole // (2 * num_ranks))) if num_ranks > 1 else budget.tokens
    bundles = []
    for prompt, own in by_prompt.items():
        taken: list[int] = []
        size = len(prompt)
        for row in own:
            is_full = budget.rows is not None and len(taken) == budget.rows
            if taken and (is_full or size + _own(examples[row]) > limit):
                bundles.append(Bundle(tuple(taken), size))
                taken, size = [], len(prompt)
            taken.append(row)
            size += _own(examples[row])
        bundles.append(Bundle(tuple(taken), size))
    return sorted(bundles, key=lambda bundle: (-bundle.num_tokens, bundle.rows))


def _prompt(example: Example) -> tuple[int, ...]:
    return tuple(example.input_ids[: first_target(example)])


def first_target(example: Example) -> int:
    """Return where the completion begins."""
    return next(place for place, weight in enumerate(example.weights) if weight > 0)


def _own(example: Example) -> int:
    """Return the tokens of the completion that go in: all but the last, whose output nothing reads."""
    return len(example.input_ids) - first_target(example) - 1


def _padded(bundles: list[Bundle], budget: Budget) -> list[list[Bundle]]:
    """Group bundles, longest first, so that each group padded to its longest stays within the budget."""
    groups: list[list[Bundle]] = []
    for bundle in bundles:
        group = groups[-1] if groups else []
        fits = group and _width(group) * (len(group) + 1) <= budget.tokens
        rows = sum(len(one.rows) for one in group) + len(bundle.rows)
        if fits and (budget.rows is None or rows <= budget.rows):
            group.append(bundle)
        else:
            groups.append([bundle])
    return groups


def _width(bundles: Sequence[Bundle]) -> int:
    return math.ceil(max(bundle.num_tokens for bundle in bundles) / WIDTHS) * WIDTHS


def collate_bundles(bundles: Sequence[Bundle], examples: Sequence[Example], scale: float) -> Batch:
    """Return the tensors of a microbatch; attend_BTT is True where a position (second) sees another (third).

    None of it is needed where each sequence is one row: causal attention costs no mask of the square of its length.
    """
    if all(len(bundle.rows) == 1 for bundle in bundles):
        return collate(Microbatch(tuple(bundle.rows for bundle in bundles), scale), examples)
    width = _width(bundles)
    inputs, positions, masks = [], [], []
    selected: list[int] = []
    targets: list[int] = []
    rows: list[int] = []
    for line, bundle in enumerate(bundles):
        prompt = _prompt(examples[bundle.rows[0]])
        ids, places, owners = list(prompt), list(range(len(prompt))), [-1] * len(prompt)
        for row in bundle.rows:
            completion = examples[row].input_ids[len(prompt) :]
            start = line * width + len(ids)
            before = [line * width + len(prompt) - 1, *range(start, start + len(completion) - 1)]
            learned = [
                place for place, weight in enumerate(examples[row].weights[len(prompt) :]) if weight > 0
            ]
            selected += [before[place] for place in learned]
            targets += [completion[place] for place in learned]
            rows += [row] * len(learned)
            ids += completion[:-1]
            places += range(len(prompt), len(prompt) + len(completion) - 1)
            owners += [row] * (len(completion) - 1)
        padding = width - len(ids)
        inputs.append(ids + [0] * padding)
        positions.append(places + [0] * padding)
        masks.append(_attended(owners + [-2] * padding))
    return Batch(
        torch.tensor(inputs),
        torch.tensor(positions),
        torch.tensor(selected),
        torch.tensor(targets),
        torch.full((len(targets),), scale, dtype=torch.float32),
        torch.tensor(rows),
        sum(bundle.num_tokens for bundle in bundles),
        torch.stack(masks),
    )


def _attended(owners: list[int]) -> Tensor:
    """Return who sees whom, (T, T): what stands before, of the prompt (-1) or of the same completion; padding sees itself."""
    owner_T = torch.tensor(owners)
    causal_TT = torch.ones(len(owners), len(owners), dtype=torch.bool).tril()
    is_known_TT = (owner_T[None] == -1) | (owner_T[None] == owner_T[:, None])
    return causal_TT & is_known_TT
