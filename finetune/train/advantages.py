"""Rewards of a step to advantages: one normalisation, each group by itself, in float64.

A reward that is None, NaN or infinite leaves its rollout unscorable: in no mean, in no loss. Zero variance is a fact
about a group and is counted; it is no fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

EPSILON = 1e-4  # added to the standard deviation
SAME = 1e-6  # rewards of a group that differ by less are equal: its advantages are exactly 0


@dataclass(frozen=True)
class Advantages:
    """values[i] and scorable[i] are those of rollout i; an unscorable rollout has the advantage 0.

    groups_zero_variance and groups_lone (fewer than two scorable rollouts) do not overlap; the rest of groups_total
    has a signal. reward_mean and reward_std (ddof 1) are over all scorable rollouts; None where there are too few.
    """

    values: list[float]
    scorable: list[bool]
    groups_total: int
    groups_zero_variance: int
    groups_lone: int
    rewards_missing: int  # None or NaN
    rewards_nonfinite: int  # infinite
    reward_mean: float | None
    reward_std: float | None

    @property
    def have_signal(self) -> bool:
        """Whether any rollout has an advantage other than 0."""
        return any(self.values)


def group_advantages(rewards: Sequence[float | None], groups: Sequence[int], scale: str) -> Advantages:
    """Return A_i = (R_i - mean of the group) / (s + 1e-4), rollout by rollout (arXiv:2402.03300).

    groups: of which prompt each rollout is; members may stand anywhere, and their number may differ. scale: s is the
    sample standard deviation of the `group`, that of all scorable rollouts (`batch`), or there is no division (`none`,
    arXiv:2503.20783). A rollout that is excluded (truncated ones by choice) comes here with the reward None. Raises
    ValueError for another scale.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale {scale!r} is none of group, batch, none")
    is_scorable = [reward is not None and math.isfinite(reward) for reward in rewards]
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    scores = [float(reward) for reward in rewards if reward is not None and math.isfinite(reward)]
    step_std = sample_std(scores)
    values = [0.0] * len(rewards)
    num_equal, num_lone = 0, 0
    for indices in members.values():
        own = {i: float(reward) for i in indices if is_scorable[i] and (reward := rewards[i]) is not None}
        if len(own) < 2:
            num_lone += 1
        elif max(own.values()) - min(own.values()) < SAME:
            num_equal += 1
        else:
            spread = {"group": sample_std(list(own.values())), "batch": step_std, "none": None}[scale]
            for index, value in _normalised(own, spread).items():
                values[index] = value
    num_infinite = sum(reward is not None and math.isinf(reward) for reward in rewards)
    return Advantages(
        values,
        is_scorable,
        groups_total=len(members),
        groups_zero_variance=num_equal,
        groups_lone=num_lone,
        rewards_missing=len(rewards) - len(scores) - num_infinite,
        rewards_nonfinite=num_infinite,
        reward_mean=_mean(scores) if scores else None,
        reward_std=step_std,
    )


def _normalised(rewards: dict[int, float], spread: float | None) -> dict[int, float]:
    mean = _mean(list(rewards.values()))
    scale = 1.0 if spread is None else spread + EPSILON
    return {index: (reward - mean) / scale for index, reward in rewards.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sample_std(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (ddof 1) from the deviations themselves, or None for fewer than two values.

    A difference of squares would leave a residue for equal values that division then blows up.
    """
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return what is added to the reward of a long completion, from 0 to -1 (arXiv:2503.14476, equation 13).

    0 up to max_tokens - buffer, then falling in a straight line to -1 at max_tokens, and -1 beyond. buffer 0: 0 up to
    max_tokens.
    """
    if num_tokens > max_tokens:
        return -1.0
    over = num_tokens - (max_tokens - buffer)
    return -over / buffer if over > 0 else 0.0
