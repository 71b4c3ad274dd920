"""Losses as pure functions of log-probs; what a step divides by is known before its first forward.

Policy losses: one rollout step holds R rollouts; a microbatch holds N completion tokens of some of them, ragged and
concatenated. l = log-prob now, o = at the start of training on the batch, s = as the sampler reported it; the ratio is
r = exp(l - o), the gap o - s. Shares of all microbatches and ranks add up to the step's loss.
Tensors: N token (SFT: supervised position), R rollout of the step, over all ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from finetune.train.corrections import (
    BANDS,
    ROLLOUT_CORRECTIONS,
    is_limited,
    rollout_correction,
    sampler_gap,
    token_correction,
)

LOSSES = ("dapo", "grpo", "dr_grpo", "cispo", "gspo")

# exp(80) is finite in float32, which the gradient is cast to; an infinite ratio times an advantage of 0 would be NaN.
MAX_LOG_RATIO = 80.0
MAX_KL_EXPONENT = 20.0


def weighted_nll(logps_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return sum over tokens of -w log p, a scalar; divided by the step's sum of w it is the SFT loss."""
    return -(weights_N * logps_N).sum()


@dataclass(frozen=True)
class LossSettings:
    """What the policy loss of a run is. None: the value that goes with the loss or the correction.

    loss: dapo (arXiv:2503.14476), grpo (2402.03300), dr_grpo (2503.20783), cispo (2506.13585), gspo (2507.18071).
    Raises ValueError for names that there are not, and for gspo with a correction by token: its rho is of a rollout.
    """

    loss: str = "dapo"
    clip_low: float | None = None  # the ratio is clipped at 1 - clip_low; None: 0.2, with gspo 3e-4
    clip_high: float | None = None  # and at 1 + clip_high; None: 0.2, with gspo 4e-4
    clip_cispo: float = (
        4.0  # cispo caps the ratio at 1 + clip_cispo and clips nothing; no other loss reads it
    )
    delta: float | None = None  # upper limit of the ratio in the unclipped term; not read by cispo and gspo
    beta: float = 0.0  # weight of the KL to the reference
    correction: str | None = (
        None  # a name of corrections.BANDS; None: token_truncate, gspo: sequence_truncate
    )
    correction_cap: float | None = None
    correction_floor: float | None = None  # read by the masks; what truncates has no floor
    max_completion_tokens: int = 512  # read by dr_grpo

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss {self.loss!r} is none of {', '.join(LOSSES)}")
        if self.correction_mode not in BANDS:
            raise ValueError(f"correction {self.correction!r} is none of {', '.join(BANDS)}")
        if self.loss == "gspo" and self.correction_mode not in ROLLOUT_CORRECTIONS:
            raise ValueError(f"gspo goes with {', '.join(ROLLOUT_CORRECTIONS)}, not with {self.correction}")

    @property
    def correction_mode(self) -> str:
        return self.correction or ("sequence_truncate" if self.loss == "gspo" else "token_truncate")

    @property
    def correction_band(self) -> tuple[float, float]:
        """The floor and the cap of rho."""
        floor, cap = BANDS[self.correction_mode]
        return (
            floor if self.correction_floor is None else self.correction_floor,
            cap if self.correction_cap is None else self.correction_cap,
        )

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Where the ratio is clipped, below and above; below is 0 where nothing is."""
        if self.loss == "cispo":
            return 0.0, 1 + self.clip_cispo
        low, high = (3e-4, 4e-4) if self.loss == "gspo" else (0.2, 0.2)
        return (
            1 - (low if self.clip_low is None else self.clip_low),
            1 + (high if self.clip_high is None else self.clip_high),
        )

    @property
    def needs_gap_sums(self) -> bool:
        """Whether rho is of a rollout: the gaps of all its segments are summed before the first backward."""
        return self.correction_mode in ROLLOUT_CORRECTIONS

    def needs_old_pass(self, num_passes: int) -> bool:
        """Whether a pass without gradients computes the old log-probs before the first backward."""
        return num_passes > 1 or self.needs_gap_sums or self.loss == "gspo"


@dataclass(frozen=True)
class Tokens:
    """The completion tokens of one microbatch. Where the mask is 0 nothing else is read: it may even be NaN."""

    sampled_N: Tensor
    mask_N: Tensor  # 1 where trained; 0 for what was not sampled, untrained rollouts, filler copies
    rollout_N: Tensor  # int: which rollout of the step
    old_N: Tensor | None = None  # None: this very forward is the old policy, and the ratio is exactly 1
    ref_N: Tensor | None = None  # needed where beta > 0


@dataclass(frozen=True)
class StepTotals:
    """What is known of the whole step before its first forward with gradients: all segments, microbatches and ranks."""

    advantages_R: Tensor
    tokens_R: Tensor  # |o_i|: trained tokens of the rollout; 0 for an untrained one
    num_tokens: int  # N
    num_rollouts: int  # trained ones
    gap_sums_R: Tensor | None = None  # rollout_sums of sampler_gap; where LossSettings.needs_gap_sums
    ratio_sums_R: Tensor | None = None  # gspo: rollout_sums of l - o; None: a first pass, every ratio is 1


def step_totals(
    advantages: Sequence[float],
    tokens: Sequence[int],
    trained: Sequence[bool],
    device: torch.device | str = "cpu",
) -> StepTotals:
    """Return the totals of a step from one value for each of its rollouts; an untrained rollout counts nowhere.

    The sums are added with dataclasses.replace once a pass without gradients has made them.
    """
    counted = [count if is_trained else 0 for count, is_trained in zip(tokens, trained, strict=True)]
    return StepTotals(
        torch.tensor(advantages, dtype=torch.float64, device=device),
        torch.tensor(counted, dtype=torch.float64, device=device),
        sum(counted),
        sum(map(bool, trained)),
    )


def rollout_sums(values_N: Tensor, mask_N: Tensor, rollout_N: Tensor, num_rollouts: int) -> Tensor:
    """Return the sum of one microbatch's values for each rollout of the step, (R,) float64.

    The sums of all microbatches and ranks add up: what a rollout is made of may be split anywhere.
    """
    is_trained_N = mask_N > 0
    sums_R = torch.zeros(num_rollouts, dtype=torch.float64, device=values_N.device)
    return sums_R.index_add_(0, rollout_N[is_trained_N], values_N.detach()[is_trained_N].double())


@dataclass(frozen=True)
class LossStats:
    """Figures of trained tokens; `+` joins those of microbatches and ranks. Sums, except what ends in _min and _max."""

    num_tokens: float = 0.0
    clipped_low: float = 0.0  # tokens whose ratio is below the clip, with A < 0: they have no gradient
    clipped_high: float = 0.0  # above it with A > 0; cispo: capped, with either sign
    ratio_sum: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    rho_sum: float = 0.0
    rho_min: float = math.inf
    rho_max: float = -math.inf
    rho_limited: float = 0.0  # tokens whose rho was truncated or masked
    gap_abs: float = 0.0  # |o - s|, not clamped
    gap_k3: float = 0.0  # exp d - d - 1 of the clamped gap d
    prob_gap: float = 0.0  # |exp o - exp s|
    kl: float = 0.0

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(
            *(_joined(f.name)(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )

    def figures(self) -> dict[str, float | None]:
        """Return shares and means over tokens, by the names of metrics.jsonl; None where no token was trained."""
        names = {
            "clip_share_low": self.clipped_low,
            "clip_share_high": self.clipped_high,
            "ratio_mean": self.ratio_sum,
            "correction_mean": self.rho_sum,
            "correction_limited_share": self.rho_limited,
            "logp_gap_mean": self.gap_abs,
            "logp_gap_k3": self.gap_k3,
            "prob_gap_mean": self.prob_gap,
            "kl": self.kl,
        }
        limits: dict[str, float | None] = {
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
            "correction_min": self.rho_min,
            "correction_max": self.rho_max,
        }
        if not self.num_tokens:
            return dict.fromkeys([*names, *limits])
        return {name: value / self.num_tokens for name, value in names.items()} | limits


def _joined(name: str) -> Callable[[float, float], float]:
    return min if name.endswith("_min") else max if name.endswith("_max") else operator.add


def policy_loss(
    settings: LossSettings, logps_N: Tensor, tokens: Tokens, totals: StepTotals
) -> tuple[Tensor, LossStats]:
    """Return one microbatch's share of the step's policy loss, a float64 scalar, and the figures of its tokens.

    logps_N: log-probs now, with gradients. The shares of all microbatches and ranks sum to the loss: whoever averages
    gradients over ranks multiplies by their number. The loss is the sum of m w (-rho c + 1(rho > 0) beta KL) over
    tokens, with c = min(r A, clip(r) A) and w = 1 / N (dapo, cispo), 1 / (rollouts |o_i|) (grpo, gspo) or
    1 / (rollouts max_completion_tokens) (dr_grpo). A share without trained tokens is 0, and its graph still reaches
    every weight.
    """
    is_trained_N = tokens.mask_N > 0
    # A few numbers a token: in float64 the sum does not feel how the step is split.
    logps_N = logps_N[is_trained_N].double()
    tokens = _selected(tokens, is_trained_N)
    terms = _terms(settings, logps_N, tokens, totals)
    per_token_N = -terms.rho_N * _surrogate(settings, logps_N, terms)
    if terms.kl_N is not None:
        per_token_N = per_token_N + settings.beta * torch.where(terms.rho_N > 0, terms.kl_N, 0.0)
    weight_N = _token_weights(settings, totals)[tokens.rollout_N]
    return (weight_N * per_token_N).sum(), _stats(settings, tokens, terms)


@dataclass(frozen=True)
class _Terms:
    """The parts of the loss of each trained token; the ratio and the KL carry gradients."""

    old_N: Tensor
    advantage_N: Tensor
    rho_N: Tensor
    ratio_N: Tensor
    kl_N: Tensor | None


def _selected(tokens: Tokens, is_trained_N: Tensor) -> Tokens:
    return Tokens(
        tokens.sampled_N[is_trained_N],
        tokens.mask_N[is_trained_N],
        tokens.rollout_N[is_trained_N],
        None if tokens.old_N is None else tokens.old_N[is_trained_N],
        None if tokens.ref_N is None else tokens.ref_N[is_trained_N],
    )


def _terms(settings: LossSettings, logps_N: Tensor, tokens: Tokens, totals: StepTotals) -> _Terms:
    old_N = logps_N.detach() if tokens.old_N is None else tokens.old_N.double()
    kl_N = None
    if settings.beta:
        assert tokens.ref_N is not None, "beta > 0 needs the log-probs of the reference"
        kl_N = kl_k3(logps_N, tokens.ref_N.double())
    return _Terms(
        old_N,
        totals.advantages_R[tokens.rollout_N],
        _rho(settings, old_N, tokens, totals),
        _ratio(settings, logps_N - old_N, tokens.rollout_N, totals),
        kl_N,
    )


def _rho(settings: LossSettings, old_N: Tensor, tokens: Tokens, totals: StepTotals) -> Tensor:
    mode, band = settings.correction_mode, settings.correction_band
    if not settings.needs_gap_sums:
        return token_correction(mode, band, sampler_gap(old_N, tokens.sampled_N))
    assert totals.gap_sums_R is not None, f"{mode} needs the sums of the gaps"
    return rollout_correction(mode, band, totals.gap_sums_R, totals.tokens_R)[tokens.rollout_N]


def _ratio(settings: LossSettings, log_ratio_N: Tensor, rollout_N: Tensor, totals: StepTotals) -> Tensor:
    """Return r of each token; for gspo s of its rollout, exp of the mean of l - o over all segments, a constant."""
    if settings.loss != "gspo":
        return log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()
    if totals.ratio_sums_R is None:
        return torch.ones_like(log_ratio_N.detach())
    mean_R = totals.ratio_sums_R / totals.tokens_R
    return mean_R.clamp(max=MAX_LOG_RATIO).exp()[rollout_N]


def _surrogate(settings: LossSettings, logps_N: Tensor, terms: _Terms) -> Tensor:
    """Return c of each token."""
    low, high = settings.ratio_bounds
    ratio_N, advantage_N = terms.ratio_N, terms.advantage_N
    if settings.loss == "cispo":
        return ratio_N.detach().clamp(max=high) * advantage_N * logps_N
    if settings.loss == "gspo":
        # One segment's graph lives at a time, so s comes as a number: s (l - sg(l)) is 0 and brings its gradient.
        ratio_N = ratio_N + ratio_N * (logps_N - logps_N.detach())
    has_delta = settings.delta is not None and settings.loss != "gspo"
    capped_N = ratio_N.clamp(max=settings.delta) if has_delta else ratio_N
    return torch.minimum(capped_N * advantage_N, ratio_N.clamp(low, high) * advantage_N)


def _token_weights(settings: LossSettings, totals: StepTotals) -> Tensor:
    """Return what the terms of a rollout's tokens are multiplied by, (R,); infinite for one that has no tokens."""
    if settings.loss in ("dapo", "cispo"):
        return torch.full_like(totals.tokens_R, 1 / max(totals.num_tokens, 1))
    num_rollouts = max(totals.num_rollouts, 1)
    if settings.loss == "dr_grpo":
        return torch.full_like(totals.tokens_R, 1 / (num_rollouts * settings.max_completion_tokens))
    return 1 / (num_rollouts * totals.tokens_R)


def kl_k3(logps_N: Tensor, ref_N: Tensor) -> Tensor:
    """Return exp(u) - u - 1 of each token, u = ref - l clamped to +-20: an estimate of KL(policy, reference)."""
    return _k3((ref_N - logps_N).clamp(-MAX_KL_EXPONENT, MAX_KL_EXPONENT))


def _k3(exponent_N: Tensor) -> Tensor:
    # expm1: the difference of exp and 1 would lose what a small exponent leaves.
    return torch.expm1(exponent_N) - exponent_N


@torch.no_grad()
def _stats(settings: LossSettings, tokens: Tokens, terms: _Terms) -> LossStats:
    if not len(terms.rho_N):
        return LossStats()
    low, high = settings.ratio_bounds
    ratio_N, rho_N, sign_N = terms.ratio_N, terms.rho_N, terms.advantage_N.sign()
    old_N, sampled_N = terms.old_N, tokens.sampled_N.double()
    has_signal_N = sign_N != 0 if settings.loss == "cispo" else sign_N > 0
    figures = {
        "num_tokens": rho_N.new_tensor(len(rho_N)),
        "clipped_low": ((ratio_N < low) & (sign_N < 0)).sum(),
        "clipped_high": ((ratio_N > high) & has_signal_N).sum(),
        "ratio_sum": ratio_N.sum(),
        "ratio_min": ratio_N.min(),
        "ratio_max": ratio_N.max(),
        "rho_sum": rho_N.sum(),
        "rho_min": rho_N.min(),
        "rho_max": rho_N.max(),
        "rho_limited": is_limited(settings.correction_mode, settings.correction_band, rho_N).sum(),
        "gap_abs": (old_N - sampled_N).abs().sum(),
        "gap_k3": _k3(sampler_gap(old_N, sampled_N)).sum(),
        "prob_gap": (old_N.exp() - sampled_N.exp()).abs().sum(),
        "kl": rho_N.new_tensor(0.0) if terms.kl_N is None else terms.kl_N.sum(),
    }
    # One copy from the device for all of them.
    return LossStats(
        **dict(zip(figures, torch.stack([v.double() for v in figures.values()]).tolist(), strict=True))
    )
