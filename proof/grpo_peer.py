"""Row on formulas: our advantages, corrections and policy losses against those that trl's GRPOTrainer computes itself.

The trainer is a real one. It is given completions, rewards and log-probs in the place of a sampler and a model;
all from there to the loss and its gradient is its own code. Not compared, because trl computes something else there:

- geometric_mask: trl has none.
- KL with a mask correction: trl adds it after rho, so masked tokens feel it. use_bias_correction_kl is off.
- A loss with an unscorable or a cut and left out rollout: trl gives it advantage 0 and still counts it.
- Several rewards of which some are None: trl sums the others.
- A group of equal rewards that are no binary fractions: float32 leaves a residue; a group with one scorable rollout.
- cispo's cap is the ratio itself in trl, ours 1 + cap: compared with that added. Its clip share counts A > 0 alone.
- Its per-sequence means of rho and of clipping (ours are over tokens), and gaps beyond 20, which trl does not clamp.
- dapo and cispo where a generation is split over optimizer steps, and bnpo, sapo, vespo, luspo: no counterpart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.model.builtin import load_model, load_tokenizer
from finetune.model.source import resolve_source
from finetune.train.advantages import group_advantages
from finetune.train.corrections import sampler_gap
from finetune.train.losses import LossSettings, LossStats, Tokens, policy_loss, rollout_sums, step_totals
from proof.claims import Claim

GROUP, LENGTHS = 4, (5, 9, 2, 7, 1, 6, 12, 3)
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
WEIGHTS = {"correct": 1.0, "short": 0.5}
MAX_TOKENS = 16


@dataclass
class Step:
    """One step of both sides. B rollout, T token, padded with 0; m is 0 for padding and for what was not sampled."""

    sampled_BT: Tensor
    old_BT: Tensor
    now_BT: Tensor
    ref_BT: Tensor
    mask_BT: Tensor
    rewards: dict[str, list[float | None]]


def drawn_step(seed: int, drift: float) -> Step:
    """drift: how far the passes have moved the log-prob of a token."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    is_real = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    mask_BT = is_real & (torch.rand(shape) < 0.8)
    mask_BT[:, 0] = True
    # float32 holds them exactly: trl's tensor of sampled log-probs is float32.
    sampled_BT = (-3 * torch.rand(shape)).double()
    old_BT = sampled_BT + 0.4 * torch.randn(shape, dtype=torch.float64)
    now_BT = old_BT + drift * torch.randn(shape, dtype=torch.float64)
    ref_BT = now_BT + 0.3 * torch.randn(shape, dtype=torch.float64)
    return Step(
        *(values * is_real for values in (sampled_BT, old_BT, now_BT, ref_BT)),
        mask_BT,
        {name: [float(draw.randrange(-2, 5)) for _ in LENGTHS] for name in WEIGHTS},
    )


def make_peer(folder: Path) -> Any:
    """Return trl's trainer whose completions and log-probs are those of its `step`, row for row."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Peer(GRPOTrainer):
        step: Step
        now_BT: Tensor

        def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
            ids = [list(range(5, 5 + length)) for length in LENGTHS]
            sampled = [row[:n].tolist() for row, n in zip(self.step.sampled_BT, LENGTHS, strict=True)]
            sampled_mask = [row[:n].int().tolist() for row, n in zip(self.step.mask_BT, LENGTHS, strict=True)]
            return [[3, 4]] * len(ids), ids, sampled_mask, [""] * len(ids), sampled, {}, None, []

        def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
            logps = self.step.ref_BT if model == "reference" else self.step.old_BT
            return (
                (self.now_BT if torch.is_grad_enabled() else logps),
                torch.zeros(1, self.now_BT.shape[1]),
                None,
            )

    def reward(name: str) -> Any:
        def given(**_: Any) -> list[float | None]:
            return peer.step.rewards[name]

        given.__name__ = name
        return given

    source = resolve_source("builtin:tiny")
    peer = Peer(
        model=load_model(source, torch.float32, "sdpa"),
        reward_funcs=[reward(name) for name in WEIGHTS],
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to=[],
            num_generations=GROUP,
            per_device_train_batch_size=len(LENGTHS),
            reward_weights=list(WEIGHTS.values()),
            max_completion_length=MAX_TOKENS,
            use_bias_correction_kl=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=load_tokenizer(source),
    )
    peer.use_vllm = peer.vllm_importance_sampling_correction = True
    peer.ref_model = "reference"
    peer.model.train()
    return peer


def scored(peer: Any, step: Step) -> dict[str, Tensor]:
    """Return what trl makes of the step before its loss: advantages, rho, masks."""
    peer.step, peer.now_BT = step, step.now_BT
    peer._metrics["train"].clear()
    return peer._generate_and_score_completions([{"prompt": "a"}] * GROUP + [{"prompt": "b"}] * GROUP)


def their_loss(
    peer: Any, settings: LossSettings, step: Step, num_parts: int
) -> tuple[float, Tensor, dict[str, list[float]]]:
    """Return trl's loss of the whole step, its gradient by token and its metrics."""
    low, high = settings.ratio_bounds
    floor, cap = settings.correction_band
    peer.loss_type = "grpo" if settings.loss == "gspo" else settings.loss
    peer.importance_sampling_level = "sequence" if settings.loss == "gspo" else "token"
    peer.epsilon_low, peer.epsilon_high = 1 - low, high if settings.loss == "cispo" else high - 1
    peer.args.delta, peer.beta = settings.delta, settings.beta
    peer.vllm_importance_sampling_mode = settings.correction_mode
    peer.vllm_importance_sampling_clip_max, peer.vllm_importance_sampling_clip_min = cap, floor or None
    peer.current_gradient_accumulation_steps = peer.args.steps_per_generation = num_parts
    inputs = scored(peer, step)
    now_BT = step.now_BT.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(len(LENGTHS)).chunk(num_parts):
        peer.now_BT = now_BT[rows]
        part = {name: value[rows] if value.dim() else value for name, value in inputs.items()}
        total = total + peer._compute_loss(peer.model, part)
    total.backward()
    assert now_BT.grad is not None
    return float(total.detach()), now_BT.grad, dict(peer._metrics["train"])


def our_advantages(step: Step, scale: str) -> list[float]:
    rows = [
        dict(zip(step.rewards, values, strict=True)) for values in zip(*step.rewards.values(), strict=True)
    ]
    rewards = [sum(WEIGHTS[name] * row[name] for name in WEIGHTS) for row in rows]
    return group_advantages(rewards, [index // GROUP for index in range(len(LENGTHS))], scale).values


def our_loss(settings: LossSettings, step: Step, num_parts: int) -> tuple[float, Tensor, LossStats]:
    count = len(LENGTHS)
    rollout_BT = torch.arange(count)[:, None].expand_as(step.mask_BT)
    totals = step_totals(our_advantages(step, "group"), step.mask_BT.sum(1).tolist(), [True] * count)
    gap_BT = sampler_gap(step.old_BT, step.sampled_BT)
    gaps, ratios = (
        rollout_sums(values.flatten(), step.mask_BT.flatten(), rollout_BT.flatten(), count)
        for values in (gap_BT, step.now_BT - step.old_BT)
    )
    totals = replace(totals, gap_sums_R=gaps, ratio_sums_R=ratios)
    now_BT = step.now_BT.clone().requires_grad_()
    loss, stats = torch.zeros((), dtype=torch.float64), LossStats()
    for rows in torch.arange(count).chunk(num_parts):
        flat = (
            v[rows].flatten() for v in (step.sampled_BT, step.mask_BT, rollout_BT, step.old_BT, step.ref_BT)
        )
        share, own = policy_loss(settings, now_BT[rows].flatten(), Tokens(*flat), totals)
        loss, stats = loss + share, stats + own
    loss.backward()
    assert now_BT.grad is not None
    return float(loss.detach()), now_BT.grad, stats


def settings_compared() -> Iterator[LossSettings]:
    for loss in ("dapo", "grpo", "dr_grpo", "cispo", "gspo"):
        for mode in MODES if loss != "gspo" else MODES[2:]:
            plain = LossSettings(loss, correction=mode, max_completion_tokens=MAX_TOKENS)
            yield plain
            yield replace(plain, clip_low=0.1, clip_high=0.28, clip_cispo=0.2)
            if mode.endswith("_mask"):
                yield replace(plain, correction_floor=0.6, correction_cap=1.8)
            else:
                yield replace(plain, beta=0.1)
            if loss not in ("cispo", "gspo"):
                yield replace(plain, delta=1.4)


def figures_apart(settings: LossSettings, stats: LossStats, metrics: dict[str, list[float]]) -> float:
    """Return the largest difference of what both log about a step of one microbatch."""
    own = stats.figures()
    names = {
        "correction_min": "sampling/importance_sampling_ratio/min",
        "correction_max": "sampling/importance_sampling_ratio/max",
        "logp_gap_mean": "sampling/sampling_logp_difference/mean",
    }
    if settings.correction_mode.startswith("token_"):
        names["correction_mean"] = "sampling/importance_sampling_ratio/mean"
    if settings.loss not in ("cispo", "gspo"):
        names |= {"clip_share_low": "clip_ratio/low_mean", "clip_share_high": "clip_ratio/high_mean"}
    if settings.beta:
        names["kl"] = "kl"
    return max(abs((own[mine] or 0.0) - metrics[theirs][0]) for mine, theirs in names.items())


def advantages_apart(peer: Any) -> float:
    """Return the largest difference over scales and steps, with rollouts that no function could score among them."""
    apart = 0.0
    for seed in range(10):
        step = drawn_step(seed, 0.1)
        for unscored in ((), (1,), (2, 7)):
            for values in step.rewards.values():
                for index in unscored:
                    values[index] = None
            for scale in ("group", "batch", "none"):
                peer.scale_rewards = scale
                theirs = scored(peer, step)["advantages"].tolist()
                apart = max(
                    apart, *(abs(a - b) for a, b in zip(our_advantages(step, scale), theirs, strict=True))
                )
    peer.scale_rewards = "group"
    return apart


def grpo_peer(folder: Path) -> list[Claim]:
    """Every setting that both have, on two drawn steps, in one and in two microbatches."""
    peer = make_peer(folder)
    advantages = advantages_apart(peer)
    count, losses, gradients, figures = 0, 0.0, 0.0, 0.0
    for settings in settings_compared():
        for seed in (0, 1):
            step = drawn_step(seed, 1e-3 if settings.loss == "gspo" else 0.3)
            for num_parts in (1, 2):
                loss, gradient, metrics = their_loss(peer, settings, step, num_parts)
                own_loss, own_gradient, stats = our_loss(settings, step, num_parts)
                losses = max(losses, abs(own_loss - loss))
                gradients = max(gradients, float((own_gradient - gradient).norm() / gradient.norm()))
                if num_parts == 1:
                    figures = max(figures, figures_apart(settings, stats, metrics))
                count += 1
    return [
        Claim("advantages_apart", advantages, "<=", 2e-6),
        Claim("losses_compared", count, ">=", 200),
        Claim("losses_apart", losses, "<=", 1e-6),
        Claim("gradients_apart", gradients, "<=", 1e-6),
        Claim("figures_apart", figures, "<=", 1e-6),
    ]
