"""Losses as pure functions of log-probs; what a step divides by is known before its first forward.

Tensors: N supervised position.
"""

from __future__ import annotations

from torch import Tensor


def weighted_nll(logps_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return sum over tokens of -w log p, a scalar; divided by the step's sum of w it is the SFT loss."""
    return -(weights_N * logps_N).sum()
