"""One batch of rollouts -> optimizer steps: old log-probs and reference without gradients, then pass by pass.

Every rank calls this with the same rollouts and trains its share. Tensors: N target of a microbatch, S segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from finetune.config import GrpoConfig
from finetune.data.batches import Batch, Budget, rank_batches
from finetune.data.prefixes import bundle_batches
from finetune.rollout.ledger import Rollout
from finetune.rules import forward_tokens, rows_per_forward
from finetune.train.corrections import sampler_gap
from finetune.train.losses import (
    LossSettings,
    LossStats,
    Tokens,
    policy_loss,
    rollout_sums,
    step_totals,
)
from finetune.train.segments import batch_segments, segment_examples, tokens_per_rollout
from finetune.train.step import StepFacts, Training, skip_step, take_step


def loss_settings(config: GrpoConfig) -> LossSettings:
    """Return the loss that the settings describe; raises ValueError where they contradict each other."""
    return LossSettings(**{item.name: getattr(config, item.name) for item in fields(LossSettings)})


@dataclass
class Piece:
    """A microbatch with what is known of its tokens besides the ids."""

    batch: Batch
    tokens: Tokens
    first_N: Tensor | None = None  # log-probs as training on the batch began


class BatchTraining:
    """The optimizer steps on one batch of rollouts. reference: makes a forward give the reference's log-probs meanwhile."""

    def __init__(
        self, training: Training, rollouts: Sequence[Rollout], reference: Callable[[], Any] | None = None
    ) -> None:
        config = training.config
        assert isinstance(config, GrpoConfig), "only grpo trains on rollouts"
        self.training, self.rollouts, self.config = training, rollouts, config
        self.reference = reference
        self.settings = loss_settings(config)
        self.segments = batch_segments(rollouts)
        self.totals = step_totals(
            [rollout.advantage for rollout in rollouts],
            tokens_per_rollout(self.segments, len(rollouts)),
            [rollout.is_trained for rollout in rollouts],
            training.world.device,
        )
        self.pieces = self._pieces()

    def _pieces(self) -> list[Piece]:
        """Return this rank's microbatches. Without a KL a rollout of advantage 0 has no gradient and needs no forward."""
        wanted = [
            place
            for place, segment in enumerate(self.segments)
            if self.config.beta or self.rollouts[segment.rollout].advantage
        ]
        if not wanted:
            return []
        device = self.training.world.device
        rollout_S = torch.tensor([segment.rollout for segment in self.segments])
        sampled = [torch.tensor(segment.logprobs) for segment in self.segments]
        pieces = []
        for batch in self._batches(wanted):
            on_device = batch.to(device)
            values_N = torch.cat([sampled[row] for row in batch.row_N.unique_consecutive().tolist()])
            mask_N = (on_device.weights_N > 0).float()
            rollout_N = rollout_S[batch.row_N].to(device)
            pieces.append(Piece(batch, Tokens(values_N.to(device), mask_N, rollout_N)))
        return pieces

    def _batches(self, wanted: Sequence[int]) -> list[Batch]:
        """Return this rank's microbatches of segments, equally many on every rank; row_N is the segment of each target.

        Where a rollout has several segments all of them are on one rank. Otherwise rollouts that begin alike share what
        they begin with, those of agents up to the length of a conversation, which the plan has room for.
        """
        config, world = self.config, self.training.world
        examples = segment_examples(self.segments, self.rollouts)
        budget = Budget(forward_tokens(config), rows_per_forward(config))
        owners = [segment.rollout for segment in self.segments]
        if len(set(owners)) < len(owners):
            return rank_batches(wanted, examples, budget, world.rank, world.size, owners)[0]
        if not self.training.policy.takes_masks:
            return rank_batches(wanted, examples, budget, world.rank, world.size)[0]
        if any(rollout.calls for rollout in self.rollouts):
            budget = replace(budget, tokens=max(budget.tokens, config.max_length or 0))
        return bundle_batches(wanted, examples, budget, world.rank, world.size)

    @property
    def has_signal(self) -> bool:
        """Whether any rank has anything to learn: the same answer on all of them."""
        return bool(self.config.beta and self.totals.num_rollouts) or any(
            rollout.advantage for rollout in self.rollouts if rollout.is_trained
        )

    def steps(self, first: int) -> Iterator[tuple[int, StepFacts, dict[str, Any]]]:
        """Make the passes over the batch that --max-steps leaves; yield step, facts over all ranks and the loss's own metrics."""
        passes = min(self.config.passes, self.training.num_steps - first + 1)
        if not self.has_signal:
            for step in range(first, first + passes):
                yield step, skip_step(self.training, step), {"skipped": True}
            return
        self._before()
        for number in range(passes):
            if number and self.settings.loss == "gspo":
                self.totals = replace(self.totals, ratio_sums_R=self._ratio_sums())
            stats, entropies = LossStats(), [0.0, 0.0]
            pieces = iter(self.pieces)

            def share_of(batch: Batch) -> Tensor:
                nonlocal stats
                piece = next(pieces)  # noqa: B023 (used up before the next pass)
                tokens = piece.tokens
                entropy_N = torch.zeros_like(tokens.mask_N)
                logps_N = self.training.module(batch, self.config.temperature, entropy_N)
                share, own = policy_loss(self.settings, logps_N, tokens, self.totals)
                stats = stats + own
                if piece.first_N is None:
                    piece.first_N = logps_N.detach() if tokens.old_N is None else tokens.old_N
                entropies[0] += float((entropy_N * tokens.mask_N).sum())  # noqa: B023
                entropies[1] += float(tokens.mask_N.sum())  # noqa: B023
                return share

            facts = take_step(self.training, first + number, [piece.batch for piece in self.pieces], share_of)
            yield first + number, facts, self._metrics(stats, entropies)

    def trainer_logps(self) -> dict[str, list[float]]:
        """Return the log-probs of all ranks' tokens as training on the batch began, by rollout, segment by segment.

        All ranks take part.
        A rollout without a forward, as one of advantage 0 without a KL, has none.
        """
        own: list[tuple[Tensor, Tensor]] = []
        for piece in self.pieces:
            if piece.first_N is not None:
                is_trained_N = piece.tokens.mask_N > 0
                own.append((piece.batch.row_N[is_trained_N.cpu()], piece.first_N[is_trained_N].cpu()))
        known: dict[int, list[float]] = {}
        for segment_N, logps_N in itertools.chain(*self.training.world.gather(own)):
            for place in segment_N.unique().tolist():
                known[place] = logps_N[segment_N == place].tolist()
        found: dict[str, list[float]] = {}
        for place in sorted(known):
            found.setdefault(self.rollouts[self.segments[place].rollout].id, []).extend(known[place])
        return found

    def _before(self) -> None:
        """Make what needs the weights as they are before the first backward."""
        training, beat = self.training, self.training.journal.heartbeat
        if self.settings.needs_old_pass(self.config.passes):
            beat("computing the old log-probs")
            for piece, old_N in zip(self.pieces, self._logps(), strict=True):
                piece.tokens = replace(piece.tokens, old_N=old_N)
        if self.settings.needs_gap_sums:
            gaps = [sampler_gap(self._old(piece), piece.tokens.sampled_N) for piece in self.pieces]
            self.totals = replace(self.totals, gap_sums_R=self._sums(gaps))
        if self.config.beta:
            beat("computing the reference's log-probs")
            assert self.reference is not None, "beta > 0 needs a reference"
            with self.reference():
                for piece, ref_N in zip(self.pieces, self._logps(), strict=True):
                    piece.tokens = replace(piece.tokens, ref_N=ref_N)
        training.watch.read()

    def _old(self, piece: Piece) -> Tensor:
        assert piece.tokens.old_N is not None, "_before makes it where it is needed"
        return piece.tokens.old_N

    def _logps(self) -> list[Tensor]:
        """Return the log-probs of this rank's tokens under the present weights, without a graph."""
        module, device = self.training.module, self.training.world.device
        with torch.no_grad():
            return [module(piece.batch.to(device), self.config.temperature) for piece in self.pieces]

    def _sums(self, values: list[Tensor]) -> Tensor:
        """Return the sum of each rollout's values over all its tokens on all ranks."""
        own_R = torch.zeros_like(self.totals.advantages_R)
        for piece, values_N in zip(self.pieces, values, strict=True):
            own_R += rollout_sums(values_N, piece.tokens.mask_N, piece.tokens.rollout_N, len(self.rollouts))
        parts = self.training.world.gather(own_R.cpu())
        return torch.stack(parts).sum(dim=0).to(own_R.device)

    def _ratio_sums(self) -> Tensor:
        now = self._logps()
        return self._sums(
            [logps_N - self._old(piece) for logps_N, piece in zip(now, self.pieces, strict=True)]
        )

    def _metrics(self, own: LossStats, entropies: list[float]) -> dict[str, Any]:
        every = self.training.world.gather((own, entropies))
        total = LossStats()
        for stats, _ in every:
            total = total + stats
        entropy, count = (sum(part[place] for _, part in every) for place in (0, 1))
        return {**total.figures(), "entropy": entropy / count if count else None}


def lora_b_norm(weights: dict[str, Tensor]) -> float | None:
    """Return the norm of all LoRA-B matrices, 0 for a policy that is still its base; None without adapters."""
    parts = [tensor.double().pow(2).sum() for name, tensor in weights.items() if ".lora_B." in name]
    return float(torch.stack(parts).sum().sqrt()) if parts else None
