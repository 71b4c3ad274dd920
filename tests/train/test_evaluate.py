"""Lift on numbers worked out by hand, and scores of answers that a model really gave."""

from typing import Any

import pytest
import torch
from torch import nn

from finetune.domains.base import Domain
from finetune.domains.math import math_domain
from finetune.model.builtin import load_model, load_tokenizer
from finetune.model.source import resolve_source
from finetune.records import Example, Row
from finetune.train.evaluate import answer_span, generated_scores, lift


def test_lift_counts_pairs_and_leaves_out_what_has_no_score() -> None:
    result = lift([0.0, 0.0, 1.0, 1.0, None, 0.0], [1.0, 0.0, 1.0, 0.0, 1.0, None], seed=0)
    counts = {name: result[name] for name in ("wins", "ties", "losses", "num_pairs", "num_excluded")}
    assert counts == {"wins": 1, "ties": 2, "losses": 1, "num_pairs": 4, "num_excluded": 2}
    assert result["mean"] == 0.0
    assert result["low"] < 0 < result["high"]


def test_equal_differences_have_an_interval_of_no_width() -> None:
    result = lift([0.0] * 10, [0.25] * 10, seed=0)
    assert (result["mean"], result["low"], result["high"], result["wins"]) == (0.25, 0.25, 0.25, 10)


def test_the_interval_is_that_of_the_binomial_distribution() -> None:
    """200 of 400 rows gained 1: the mean's standard error is 0.025, so the interval is 0.5 +- 0.049."""
    result = lift([0.0] * 400, [0.0, 1.0] * 200, seed=0)
    assert result["low"] == pytest.approx(0.451, abs=0.004)
    assert result["high"] == pytest.approx(0.549, abs=0.004)


def test_the_interval_depends_on_the_seed_alone() -> None:
    before, after = [0.0] * 50, [place**0.5 for place in range(50)]
    assert lift(before, after, seed=1) == lift(before, after, seed=1)
    assert lift(before, after, seed=1)["low"] != lift(before, after, seed=2)["low"]


def test_lift_without_pairs_knows_nothing() -> None:
    result = lift([None, 1.0], [1.0, None], seed=0)
    assert (result["mean"], result["low"], result["high"], result["num_pairs"]) == (None, None, None, 0)
    assert lift([], [], seed=0)["num_pairs"] == 0


def test_rows_that_do_not_correspond_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        lift([1.0], [1.0, 0.0], seed=0)


def test_the_answer_is_the_last_learned_run() -> None:
    assert answer_span(Example(list(range(6)), [0, 1, 0, 0.5, 1, 0], 0, "f", 1)) == (3, 5)
    assert answer_span(Example(list(range(3)), [0, 0, 1], 0, "f", 1)) == (2, 3)


class Parrot(nn.Module):
    """Wraps a model: forces the tokens of `answers` (prompt's last token -> answer) as if the model had been sure of them."""

    def __init__(self, model: Any, answers: dict[int, list[int]]) -> None:
        super().__init__()
        self.model, self.answers = model, answers
        self.config, self.device = model.config, model.device

    def get_output_embeddings(self) -> nn.Module:
        return nn.Identity()

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        output = self.model(input_ids=input_ids, **options)
        following = {}
        for last, answer in self.answers.items():
            following |= dict(zip([last, *answer], answer, strict=False))
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if token in following:
                output.logits[row, -1, following[token]] = 1e4
        return output


def test_generated_answers_are_scored_by_the_domain() -> None:
    source = resolve_source("builtin:tiny")
    tokenizer = load_tokenizer(source)
    seven, eight, nine = (tokenizer(digit).input_ids[0] for digit in "789")
    end = tokenizer.eos_token_id
    rows = [
        Row({"prompt": "q", "answer": answer}, "f", line) for line, answer in enumerate(["7", "8", "none"], 1)
    ]
    examples = [
        Example([40, 50 + place, right, end], [0, 0, 1, 1], place, "f", place + 1)
        for place, right in enumerate([seven, eight, nine])
    ]
    parrot = Parrot(load_model(source, torch.float32), {50: [seven, end], 51: [nine, end], 52: [seven, end]})
    assert generated_scores(parrot, tokenizer, math_domain(), examples, rows) == [1.0, 0.0, None]
    assert generated_scores(parrot, tokenizer, math_domain(), examples[2:0:-1], rows) == [None, 0.0]
    assert generated_scores(parrot, tokenizer, math_domain(), [], rows) == []


def test_the_domain_sees_text_without_stop_tokens() -> None:
    source = resolve_source("builtin:tiny")
    tokenizer = load_tokenizer(source)
    seven, end = tokenizer("7").input_ids[0], tokenizer.eos_token_id
    seen: list[tuple[dict[str, Any], str]] = []

    def score(values: dict[str, Any], completion: str) -> float:
        seen.append((values, completion))
        return 0.5

    math = math_domain()
    spy = Domain(math.name, math.conversation, math.split, score, math.metrics, math.digest)
    example = Example([40, 50, seven, end], [0, 0, 1, 1], 0, "f", 1)
    parrot = Parrot(load_model(source, torch.float32), {50: [seven, end]})
    assert generated_scores(parrot, tokenizer, spy, [example], [Row({"a": 1}, "f", 1)]) == [0.5]
    assert seen == [({"a": 1}, "7")]
