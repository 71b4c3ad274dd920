"""Completions that share their prompt's positions: the same log-probs and the same gradient as one sequence each."""

import random

import pytest
import torch

from finetune.config import GrpoConfig
from finetune.data.batches import Batch, Budget, rank_batches
from finetune.data.prefixes import bundle_batches, bundled, collate_bundles
from finetune.model.policy import Policy, build_policy
from finetune.model.source import resolve_source
from finetune.records import Example


def example(prompt: list[int], completion: list[int]) -> Example:
    return Example(prompt + completion, [0.0] * len(prompt) + [1.0] * len(completion), 0, "made.jsonl", 1)


def ragged(num_prompts: int = 3, group: int = 4) -> list[Example]:
    draw = random.Random(1)
    examples = []
    for _ in range(num_prompts):
        prompt = [draw.randrange(5, 300) for _ in range(draw.randint(4, 12))]
        for _ in range(group):
            examples.append(example(prompt, [draw.randrange(5, 300) for _ in range(draw.randint(1, 7))]))
    return examples


def test_two_completions_of_a_prompt_by_hand() -> None:
    examples = [example([1, 2, 3], [4, 5]), example([1, 2, 3], [6])]
    (bundle,) = bundled([0, 1], examples, Budget(64), 1)
    batch = collate_bundles([bundle], examples, 1.0)
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 4, *[0] * 12]]  # 16 wide: one shape for many lengths
    assert batch.position_ids_BT is not None
    assert batch.position_ids_BT[0, :4].tolist() == [0, 1, 2, 3]
    assert batch.selected_N.tolist() == [2, 3, 2]
    assert batch.targets_N.tolist() == [4, 5, 6]
    assert batch.row_N.tolist() == [0, 0, 1]
    assert batch.num_tokens == 4


def test_completions_do_not_see_each_other() -> None:
    examples = [example([1, 2], [3, 4, 9]), example([1, 2], [5, 6, 9])]
    (bundle,) = bundled([0, 1], examples, Budget(64), 1)
    batch = collate_bundles([bundle], examples, 1.0)
    assert batch.input_ids_BT[0, :6].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.attend_BTT is not None
    assert batch.attend_BTT[0, 4].nonzero().flatten().tolist() == [0, 1, 4]
    assert batch.attend_BTT[0, 3].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert batch.position_ids_BT is not None
    assert batch.position_ids_BT[0, :6].tolist() == [0, 1, 2, 3, 2, 3]


def test_a_budget_splits_a_group_and_repeats_its_prompt() -> None:
    examples = [example([1, 2, 3, 4], [5, 6, 7]) for _ in range(4)]
    sizes = [(bundle.rows, bundle.num_tokens) for bundle in bundled(range(4), examples, Budget(8), 1)]
    assert sizes == [((0, 1), 8), ((2, 3), 8)]
    alone = [bundle.rows for bundle in bundled(range(4), examples, Budget(64, rows=1), 1)]
    assert alone == [(0,), (1,), (2,), (3,)]


def policy(attention: str) -> Policy:
    config = GrpoConfig(
        model="builtin:tiny",
        data=["x"],
        dtype="fp32",
        attention=attention,
        lora_rank=8,
        gradient_checkpointing=False,
    )
    found = build_policy(config, resolve_source("builtin:tiny", None, False, download=False))
    torch.manual_seed(5)
    for name, parameter in found.trainable().items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    return found


def outcome(model: Policy, batches: list[Batch]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Return the log-probs of each row and the gradient of their sum, row k weighing k + 1."""
    for parameter in model.trainable().values():
        parameter.grad = None
    logps = {}
    for batch in batches:
        logps_N = model(batch)
        (logps_N * (batch.row_N + 1) * batch.weights_N).sum().backward()
        for row in batch.row_N[batch.weights_N > 0].unique().tolist():
            logps[row] = logps_N[batch.row_N == row].detach()
    gradients = [
        parameter.grad.flatten() for parameter in model.trainable().values() if parameter.grad is not None
    ]
    return logps, torch.cat(gradients)


@pytest.mark.parametrize("attention", ["sdpa", "short_rows"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_logprobs_and_gradient_are_those_of_separate_sequences(attention: str, num_ranks: int) -> None:
    model, examples = policy(attention), ragged()
    assert model.takes_masks
    apart, _ = rank_batches(range(12), examples, Budget(64), 0, 1)
    shares = [bundle_batches(range(12), examples, Budget(64), rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(share) for share in shares}) == 1, "all ranks make equally many forwards"
    together = [batch for share in shares for batch in share]
    expected, expected_gradient = outcome(model, apart)
    found, gradient = outcome(model, together)
    assert found.keys() == expected.keys()
    for row in expected:
        assert torch.allclose(found[row], expected[row], atol=2e-6)
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 2e-6
    if num_ranks == 1:
        assert sum(batch.num_tokens for batch in together) < 0.6 * sum(batch.num_tokens for batch in apart)


def test_eager_attention_is_not_given_such_masks() -> None:
    assert not policy("eager").takes_masks
