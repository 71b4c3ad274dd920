"""rho, the weight of what the sampler drew: it answers for stale weights and for an engine that rounds otherwise.

A gap is o - s (trainer's log-prob at the start of training on the batch minus the sampler's), clamped to +-20.
Tensors: N token, R rollout of the step, over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_GAP = 20.0
# name -> floor and cap. The masks make rho 0 outside of them; what truncates has no floor.
BANDS: dict[str, tuple[float, float]] = {
    "token_truncate": (0.0, 2.0),
    "token_mask": (0.0, 2.0),
    "geometric_mask": (0.99, 1.01),
    "sequence_truncate": (0.0, 3.0),
    "sequence_mask": (0.0, 3.0),
}
ROLLOUT_CORRECTIONS = ("geometric_mask", "sequence_truncate", "sequence_mask")  # one rho for a whole rollout


def sampler_gap(old_N: Tensor, sampled_N: Tensor) -> Tensor:
    """Return o - s of each token, clamped to +-20, in float64: a rollout's sum is then free of how it is split."""
    return (old_N.double() - sampled_N.double()).clamp(-MAX_GAP, MAX_GAP)


def token_correction(mode: str, band: tuple[float, float], gap_N: Tensor) -> Tensor:
    """Return rho of each token, float64, for token_truncate and token_mask.

    token_truncate: min(exp gap, cap). token_mask: exp gap, or 0 outside [floor, cap].
    """
    return _limited(mode, band, gap_N.exp())


def rollout_correction(mode: str, band: tuple[float, float], gap_sums_R: Tensor, tokens_R: Tensor) -> Tensor:
    """Return rho of each rollout, (R,) float64, from the sums of its gaps over all its segments, and |o_i|.

    geometric_mask: 1 where exp(mean gap) lies within [floor, cap], or else 0. sequence_truncate: min(exp(sum), cap).
    sequence_mask: exp(sum), or 0 outside [floor, cap].
    """
    if mode == "geometric_mask":
        floor, cap = band
        mean_R = (gap_sums_R / tokens_R).exp()
        return ((mean_R >= floor) & (mean_R <= cap)).double()
    return _limited(mode, band, gap_sums_R.exp())


def _limited(mode: str, band: tuple[float, float], weight: Tensor) -> Tensor:
    floor, cap = band
    if mode.endswith("_truncate"):
        # exp of a sum below -745 is 0, which says "masked" and would take the KL away as well.
        return weight.clamp(torch.finfo(torch.float32).tiny, cap)
    return torch.where((weight >= floor) & (weight <= cap), weight, 0.0)


def is_limited(mode: str, band: tuple[float, float], rho: Tensor) -> Tensor:
    """Return where rho was truncated or masked."""
    return rho >= band[1] if mode.endswith("_truncate") else rho == 0
