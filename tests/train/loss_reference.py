"""The policy loss as a loop over single numbers, written from the formulas alone: what the code is compared with.

A rollout is whole here: its segments, microbatches and ranks do not exist. Autograd goes through every formula as it
stands, also through the mean of gspo.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Rollout:
    """One rollout: l, o, s, ref and m of each token. l are leaves with gradients, float64."""

    now: list[Tensor]
    old: list[float]
    sampled: list[float]
    ref: list[float]
    mask: list[int]
    advantage: float
    is_trained: bool = True
    gaps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.is_trained:
            self.mask = [0] * len(self.mask)
        self.gaps = [max(-20.0, min(20.0, o - s)) for o, s in zip(self.old, self.sampled, strict=True)]

    @property
    def places(self) -> list[int]:
        return [t for t, m in enumerate(self.mask) if m]


def drawn(seed: int, drift: float = 0.3) -> list[Rollout]:
    """Return a step with all that can stand side by side; drift: how far the passes have moved a token's log-prob.

    Gaps from nothing to large, so that each correction keeps some and limits some; tokens that were not sampled, a
    rollout of zero variance, an untrained one, one without a sampled token.
    """
    draw = random.Random(seed)
    rollouts = []
    for index, (length, gap) in enumerate(
        [(7, 0.001), (3, 0.4), (12, 0.8), (1, 1.5), (5, 0.002), (4, 0.3), (6, 0.2)]
    ):
        sampled = [draw.uniform(-4, -0.1) for _ in range(length)]
        old = [s + draw.gauss(0, gap) for s in sampled]
        moved = [o + draw.gauss(0, drift) for o in old]
        rollouts.append(
            Rollout(
                [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in moved],
                old,
                sampled,
                [o + draw.gauss(0, 0.5) for o in old],
                [0] * length if index == 5 else [int(draw.random() < 0.8) for _ in range(length - 1)] + [1],
                advantage=0.0 if index == 4 else draw.gauss(0, 1.5),
                is_trained=index != 6,
            )
        )
    return rollouts


@dataclass(frozen=True)
class Formula:
    """The settings, all of them given."""

    loss: str
    correction: str
    floor: float
    cap: float
    low: float
    high: float
    cispo: float
    delta: float | None
    beta: float
    max_tokens: int


def rho(formula: Formula, rollout: Rollout, t: int) -> float:
    total = sum(rollout.gaps[k] for k in rollout.places)
    if formula.correction == "token_truncate":
        return min(math.exp(rollout.gaps[t]), formula.cap)
    if formula.correction == "token_mask":
        weight = math.exp(rollout.gaps[t])
        return weight if formula.floor <= weight <= formula.cap else 0.0
    if formula.correction == "geometric_mask":
        return 1.0 if formula.floor <= math.exp(total / len(rollout.places)) <= formula.cap else 0.0
    if formula.correction == "sequence_truncate":
        return min(math.exp(total), formula.cap)
    assert formula.correction == "sequence_mask"
    weight = math.exp(total)
    return weight if formula.floor <= weight <= formula.cap else 0.0


def smaller(one: Tensor, other: Tensor) -> Tensor:
    return one if one <= other else other


def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
    return (
        ratio.new_tensor(1 - low)
        if ratio < 1 - low
        else ratio.new_tensor(1 + high)
        if ratio > 1 + high
        else ratio
    )


def surrogate(formula: Formula, rollout: Rollout, t: int) -> Tensor:
    """c of one token."""
    ratio = torch.exp(rollout.now[t] - rollout.old[t])
    if formula.loss == "cispo":
        return min(ratio.item(), 1 + formula.cispo) * rollout.advantage * rollout.now[t]
    first = ratio
    if formula.delta is not None and ratio.item() > formula.delta:
        first = ratio.new_tensor(formula.delta)
    return smaller(first * rollout.advantage, clipped(ratio, formula.low, formula.high) * rollout.advantage)


def kl(formula: Formula, rollout: Rollout, t: int) -> Tensor:
    """beta KL of one token; 0 for one that the correction has masked."""
    u = torch.clamp(rollout.ref[t] - rollout.now[t], -20, 20)
    return (torch.exp(u) - u - 1) * (formula.beta if rho(formula, rollout, t) > 0 else 0.0)


def step_loss(formula: Formula, rollouts: list[Rollout]) -> Tensor:
    """The loss of one optimizer step."""
    trained = [rollout for rollout in rollouts if rollout.is_trained]
    num_tokens = sum(len(rollout.places) for rollout in trained)
    total = torch.zeros((), dtype=torch.float64)
    for rollout in trained:
        if not rollout.places:
            continue
        size = len(rollout.places)
        terms = torch.zeros((), dtype=torch.float64)
        for t in rollout.places:
            if formula.loss != "gspo":
                terms = terms - rho(formula, rollout, t) * surrogate(formula, rollout, t)
            if formula.beta:
                terms = terms + kl(formula, rollout, t)
        if formula.loss == "gspo":
            mean = (
                sum((rollout.now[t] - rollout.old[t] for t in rollout.places), torch.zeros_like(total)) / size
            )
            s = torch.exp(mean)
            c = smaller(s * rollout.advantage, clipped(s, formula.low, formula.high) * rollout.advantage)
            # The KL of a token stands beside the mean over tokens, as with grpo.
            terms = terms / size - rho(formula, rollout, rollout.places[0]) * c
            total = total + terms / len(trained)
        elif formula.loss == "grpo":
            total = total + terms / size / len(trained)
        elif formula.loss == "dr_grpo":
            total = total + terms / (len(trained) * formula.max_tokens)
        else:
            total = total + terms / num_tokens
    return total
