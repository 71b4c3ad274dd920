"""Corrections for what the sampler drew, by hand: each mode's weights and its limits."""

import math
from dataclasses import replace

import pytest
import torch

from finetune.train.corrections import (
    is_limited,
    rollout_correction,
    sampler_gap,
    token_correction,
)
from finetune.train.losses import LossSettings, Tokens, policy_loss, rollout_sums, step_totals


@pytest.mark.parametrize(
    ("mode", "gaps", "values"),
    [
        ("token_truncate", [[0.0, math.log(3), -1.0]], [1.0, 2.0, math.exp(-1)]),
        ("token_mask", [[0.0, math.log(3), -1.0]], [1.0, 0.0, math.exp(-1)]),
        ("geometric_mask", [[0.02, -0.01], [0.02, 0.01]], [1.0, 1.0, 0.0, 0.0]),
        ("sequence_truncate", [[1.0, 1.0], [-1.0, 0.5]], [3.0, 3.0, math.exp(-0.5), math.exp(-0.5)]),
        ("sequence_mask", [[1.0, 1.0], [-1.0, 0.5]], [0.0, 0.0, math.exp(-0.5), math.exp(-0.5)]),
        ("sequence_truncate", [[100.0, 100.0], [-400.0]], [3.0, 3.0, math.exp(-20)]),
    ],
)
def test_corrections_by_hand(mode: str, gaps: list[list[float]], values: list[float]) -> None:
    """Advantage -1 and a ratio of 1, one share a token: the loss of a token is its rho."""
    flat_gaps = torch.tensor([gap for group in gaps for gap in group], dtype=torch.float64)
    size = len(flat_gaps)
    rollout_N = torch.tensor([index for index, group in enumerate(gaps) for _ in group])
    old_N = torch.full((size,), -1.0, dtype=torch.float64)
    sums = rollout_sums(sampler_gap(old_N, old_N - flat_gaps), torch.ones(size), rollout_N, len(gaps))
    totals = replace(
        step_totals([-1.0] * len(gaps), [len(group) for group in gaps], [True] * len(gaps)), gap_sums_R=sums
    )
    for t, value in enumerate(values):
        mask_N = torch.arange(size) == t
        tokens = Tokens(old_N - flat_gaps, mask_N.double(), rollout_N, old_N)
        share, _ = policy_loss(LossSettings(correction=mode), old_N, tokens, totals)
        assert share.item() * size == pytest.approx(value)


def test_a_truncated_rollout_is_never_taken_for_a_masked_one() -> None:
    """The sum of 60 gaps of -20 has no exp; the rollout still feels the KL, in float32 as well."""
    rho_R = rollout_correction(
        "sequence_truncate", (0.0, 3.0), torch.tensor([-1200.0]).double(), torch.ones(1)
    )
    assert 0 < rho_R.item() < 1e-30
    assert rho_R.float().item() > 0


def test_a_floor_masks_below_it_and_a_cap_above() -> None:
    settings = LossSettings(correction="token_mask", correction_floor=0.5, correction_cap=1.5)
    assert settings.correction_band == (0.5, 1.5)
    gap_N = torch.tensor([0.49, 0.51, 1.0, 1.49, 1.51]).log()
    rho_N = token_correction("token_mask", settings.correction_band, gap_N)
    assert rho_N.tolist() == pytest.approx([0.0, 0.51, 1.0, 1.49, 0.0])
    assert is_limited("token_mask", settings.correction_band, rho_N).tolist() == [
        True,
        False,
        False,
        False,
        True,
    ]
    rho_N = token_correction("token_truncate", (0.0, 1.5), gap_N)
    assert is_limited("token_truncate", (0.0, 1.5), rho_N).tolist() == [False] * 4 + [True]
