"""How good a policy is on held-out rows: answers scored by the domain's verifier, and two policies compared row by row.

Rule: an answer that could not be scored is no zero. It is in no mean and in no pair, and it is counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from finetune.domains.base import Domain
from finetune.records import Example, Row
from finetune.rollout.engine import Sampling
from finetune.rollout.local import generate

RESAMPLES = 10_000
# Room for a base model that answers in a sentence: cut short, it would look worse than it is, and the lift better.
FEWEST_NEW_TOKENS = 32
MOST_NEW_TOKENS = 512
_BLOCK = 1_000_000  # numbers of one block of resamples: 8 MB


def lift(before: Sequence[float | None], after: Sequence[float | None], seed: int) -> dict[str, Any]:
    """Return the mean of after - before over the rows that both have a score for, with a 95 % interval.

    The interval is the paired percentile bootstrap of `RESAMPLES` draws. Without any pair mean, low and high are None.
    wins, ties and losses count the pairs; num_excluded the rows without one.
    """
    pairs = [
        (one, other)
        for one, other in zip(before, after, strict=True)
        if one is not None and other is not None
    ]
    differences = np.array([other - one for one, other in pairs], dtype=np.float64)
    low, high = _interval(differences, seed) if pairs else (None, None)
    return {
        "mean": math.fsum(differences) / len(pairs) if pairs else None,
        "low": low,
        "high": high,
        "wins": int((differences > 0).sum()),
        "ties": int((differences == 0).sum()),
        "losses": int((differences < 0).sum()),
        "num_pairs": len(pairs),
        "num_excluded": len(before) - len(pairs),
    }


def _interval(differences: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 2.5 and 97.5 % points of the means of resamples, drawn in blocks so that memory stays small."""
    random, size = np.random.default_rng(seed), len(differences)
    rows = max(1, _BLOCK // size)
    counts = [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]
    means = np.concatenate(
        [differences[random.integers(size, size=(count, size))].mean(axis=1) for count in counts]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def generated_scores(
    model: nn.Module,
    tokenizer: Any,
    domain: Domain,
    examples: Sequence[Example],
    rows: Sequence[Row],
    beat: Callable[[], None] = lambda: None,
) -> list[float | None]:
    """Return the verifier's score of the model's greedy answer to each example; None where it cannot score.

    The prompt is what stands before the example's last answer, so the model sees the ids that it was trained on. A row
    of `rows` is found by example.row. Answers may be twice as long as the longest right one.
    """
    assert domain.score is not None, "the caller asks domain.has_verifier"
    if not examples:
        return []
    prompts, sampling = questions(examples, tokenizer.eos_token_id)
    completions = generate(model, prompts, sampling, beat=beat)
    texts = [tokenizer.decode(completion.ids, skip_special_tokens=True) for completion in completions]
    return [
        domain.score(rows[example.row].values, text) for example, text in zip(examples, texts, strict=True)
    ]


def questions(
    examples: Sequence[Example], eos_token_id: int | None = None
) -> tuple[list[list[int]], Sampling]:
    """Return the prompt of each example, and how it is answered: greedily, up to twice the longest right answer."""
    spans = [answer_span(example) for example in examples]
    prompts = [example.input_ids[:start] for example, (start, _) in zip(examples, spans, strict=True)]
    longest = max(end - start for start, end in spans)
    limit = min(MOST_NEW_TOKENS, max(FEWEST_NEW_TOKENS, 2 * longest))
    ends = {example.input_ids[end - 1] for example, (_, end) in zip(examples, spans, strict=True)}
    if eos_token_id is not None:
        ends.add(eos_token_id)
    return prompts, Sampling(limit, sorted(ends))


def answer_span(example: Example) -> tuple[int, int]:
    """Return start and end of the last learned run of tokens."""
    end = max(place for place, weight in enumerate(example.weights) if weight > 0) + 1
    learned = itertools.takewhile(lambda place: example.weights[place] > 0, reversed(range(end)))
    return min(learned), end
