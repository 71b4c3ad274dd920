"""Make the rollouts of a batch: prompts, completions, rewards, advantages, one file. One process of a node does this.

Rule: what is sampled depends on (seed, step, group, sample) and the weights, never on a rank; a completion that was lost
or could not be scored is in the file with its reason, and in no statistics.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.config import GrpoConfig
from finetune.data.batches import epoch_order, step_rows
from finetune.data.prepare import Prepared
from finetune.data.tokens import token_texts
from finetune.errors import FinetuneError
from finetune.records import Example
from finetune.rollout.engine import Engine
from finetune.rollout.ledger import SCORED, CallRecord, Rollout, RolloutBatch
from finetune.rollout.served import ServedEngine
from finetune.rules import prompts_per_batch
from finetune.train.advantages import Advantages, group_advantages, overlong_penalty
from finetune.train.sampling import FAILURES, Draw, Sampler

# Why a rollout is not trained, besides FAILURES and unscorable, which a verifier says.
TRUNCATED, RESAMPLED = "truncated", "zero_variance_resampled"
_SPARE_EPOCH = 1_000_000  # where the order of prompts that replace others begins


@dataclass
class Maker:
    """What sampling a batch takes."""

    config: GrpoConfig
    prepared: Prepared
    engine: Engine
    sampler: Sampler
    tokenizer: Any
    base: Engine | None = None  # of the untouched base, for what agents ask for show
    _texts: dict[int, str | list[int]] = field(default_factory=dict)  # of the tokens met so far

    def batch(self, step: int, version: int, digest: str, name: str) -> RolloutBatch:
        """Sample and score the batch that step begins with, under the version that the engine calls `name`.

        Raises FinetuneError: rollout_failures past --max-failure-share, verifier_failed with --on-verifier-error stop.
        """
        config = self.config
        draw = Draw(ServedEngine(self.engine, self.base), config.temperature)
        spare = self._spare_rows(step)
        wanted = batch_rows(config, step, len(self.prepared.train))
        rollouts: list[Rollout] = []
        for number in range(1 + config.resample_zero_variance):
            first = rollouts[-1].group + 1 if rollouts else 0
            rollouts += self._sampled(step, list(enumerate(wanted, first)), name, draw)
            flat = _flat_groups(rollouts)
            if not flat or number == config.resample_zero_variance:
                break
            if not (wanted := list(itertools.islice(spare, len(flat)))):
                break
            for rollout in rollouts:
                # What was lost to a failure keeps its reason, and counts among the failures.
                if rollout.group in flat and rollout.status not in FAILURES:
                    rollout.status = RESAMPLED
        self._check_failures(step, rollouts)
        found = with_advantages(rollouts, config.scale_rewards)
        facts = {**draw.times, **_facts(rollouts, found)}
        return RolloutBatch(
            step, version, digest, rollouts, facts, self.tokens(rollouts), draw.engine.records
        )

    def held_out(self, step: int, version: int, digest: str, name: str) -> RolloutBatch:
        """Answer every held-out row once greedily (sample 0) and --eval-samples times by sampling, and score the answers."""
        draw = Draw(ServedEngine(self.engine, self.base), 0.0)
        rollouts: list[Rollout] = []
        for count, first in ((1, 0), (self.config.eval_samples, 1)):
            if not count:
                continue
            draw.temperature = self.config.temperature if first else 0.0
            empty = [
                rollout
                for place, example in enumerate(self.prepared.eval)
                for rollout in _empty_group(
                    "eval", place, place, example, self._eval_seed(place), name, count, first
                )
            ]
            rows = [self.prepared.eval_rows[self.prepared.eval[one.row].row] for one in empty]
            rollouts += self.sampler.sample(empty, rows, draw)
        tokens = self.tokens(rollouts)
        return RolloutBatch(step, version, digest, rollouts, draw.times, tokens, draw.engine.records)

    def _eval_seed(self, place: int) -> int:
        return sampling_seed(self.config.seed, -1, place)

    def tokens(self, rollouts: list[Rollout]) -> dict[str, str | list[int]]:
        """Return what each token of the rollouts writes."""
        parts: list[Rollout | CallRecord] = [*rollouts, *(call for one in rollouts for call in one.calls)]
        ids = {one for part in parts for one in (*part.prompt_ids, *part.completion_ids)}
        self._texts |= token_texts(self.tokenizer, ids - self._texts.keys())
        return {str(one): self._texts[one] for one in sorted(ids)}

    def _spare_rows(self, step: int) -> Iterator[int]:
        used = set(batch_rows(self.config, step, len(self.prepared.train)))
        order = epoch_order(self.config.seed, _SPARE_EPOCH + step, len(self.prepared.train))
        return (row for row in order if row not in used)

    def _sampled(self, step: int, groups: list[tuple[int, int]], name: str, draw: Draw) -> list[Rollout]:
        config, prepared = self.config, self.prepared
        empty = [
            rollout
            for group, row in groups
            for rollout in _empty_group(
                str(step),
                group,
                row,
                prepared.train[row],
                sampling_seed(config.seed, step, group),
                name,
                config.group_size,
            )
        ]
        rows = [prepared.train_rows[prepared.train[one.row].row] for one in empty]
        rollouts = self.sampler.sample(empty, rows, draw)
        for rollout in rollouts:
            self._limit(rollout)
        return rollouts

    def _limit(self, rollout: Rollout) -> None:
        """Treat a long completion as the settings say: a penalty near the limit, or out of the training where it was cut."""
        config = self.config
        assert config.max_completion_tokens is not None, "the plan decides it"
        if rollout.reward is not None and config.overlong_buffer:
            penalty = overlong_penalty(
                len(rollout.completion_ids), config.max_completion_tokens, config.overlong_buffer
            )
            rollout.parts["overlong"] = penalty
            rollout.reward += penalty
        if rollout.truncated and config.truncated == "mask" and rollout.status == SCORED:
            rollout.status = TRUNCATED

    def _check_failures(self, step: int, rollouts: list[Rollout]) -> None:
        failed = [rollout for rollout in rollouts if rollout.status in FAILURES]
        if len(failed) <= self.config.max_failure_share * len(rollouts):
            return
        kinds = sorted({rollout.status for rollout in failed})
        text = (
            f"step {step}: {len(failed)} of {len(rollouts)} rollouts were lost to failures ({', '.join(kinds)}), more than"
            f" the share of {self.config.max_failure_share} that --max-failure-share allows; the first: {failed[0].error}"
        )
        first = {"id": failed[0].id, "row": failed[0].place, "error": failed[0].error}
        raise FinetuneError("rollout_failures", text[:4000], failed=len(failed), first=first)


def batch_rows(config: GrpoConfig, step: int, num_prompts: int) -> list[int]:
    """Return the prompts of the batch that optimizer step `step` (from 1) begins or goes on with."""
    batch = (step - 1) // config.passes + 1
    return step_rows(config.seed, batch, num_prompts, prompts_per_batch(config))


def sampling_seed(seed: int, step: int, group: int) -> int:
    """Return the seed of a group's first sample; sample i has i more. 40 bits, so that groups do not overlap by chance."""
    digest = hashlib.sha256(f"{seed} {step} {group}".encode()).digest()
    return int.from_bytes(digest[:5], "big")


def _empty_group(
    prefix: str,
    group: int,
    row: int,
    example: Example,
    seed: int,
    version: str,
    count: int,
    first: int = 0,
) -> list[Rollout]:
    """Return the rollouts of a group before they are sampled: sample `first` has the seed `seed`, the next one more."""
    where = f"{example.file}:{example.line}"
    return [
        Rollout(
            f"{prefix}-{group}-{first + number}",
            group,
            first + number,
            row,
            where,
            seed + number,
            version,
            list(example.input_ids),
        )
        for number in range(count)
    ]


def with_advantages(rollouts: list[Rollout], scale: str) -> Advantages:
    """Give each rollout its advantage; what is not trained has 0 and is in no statistics."""
    rewards = [rollout.reward if rollout.is_trained else None for rollout in rollouts]
    present = [index for index, rollout in enumerate(rollouts) if rollout.status != RESAMPLED]
    found = group_advantages(
        [rewards[index] for index in present], [rollouts[index].group for index in present], scale
    )
    for rollout in rollouts:
        rollout.advantage = 0.0
    for index, value in zip(present, found.values, strict=True):
        rollouts[index].advantage = value
    return found


def _flat_groups(rollouts: list[Rollout]) -> set[int]:
    """Return the groups in which no rollout is better than another."""
    live = [rollout for rollout in rollouts if rollout.status != RESAMPLED]
    copies = [replace(rollout) for rollout in live]
    with_advantages(copies, "none")
    with_signal = {rollout.group for rollout in copies if rollout.advantage}
    return {rollout.group for rollout in live} - with_signal


def _facts(rollouts: list[Rollout], found: Advantages) -> dict[str, Any]:
    """Return what a step's metrics say of its rollouts."""
    lengths = [rollout.num_sampled for rollout in rollouts if rollout.num_sampled]
    sampled = [rollout for rollout in rollouts if rollout.num_sampled]
    names = sorted({name for rollout in sampled for name in rollout.parts})
    return {
        "reward_mean": found.reward_mean,
        "reward_std": found.reward_std,
        **{f"reward/{name}": _mean([one.parts.get(name) for one in sampled]) for name in names},
        "groups_total": found.groups_total,
        "groups_zero_variance": found.groups_zero_variance,
        "groups_lone": found.groups_lone,
        "zero_variance_share": found.groups_zero_variance / max(found.groups_total, 1),
        "rewards_missing": sum(one.reward is None for one in rollouts if one.status != RESAMPLED),
        "rewards_nonfinite": sum(rollout.status == "invalid" for rollout in rollouts),
        "rollouts_lost": sum(rollout.status in ("server", "protocol") for rollout in rollouts),
        "completions_total": len(sampled),
        "completions_truncated": sum(rollout.truncated for rollout in sampled),
        "truncated_share": sum(rollout.truncated for rollout in sampled) / max(len(sampled), 1),
        "completion_length_mean": _mean(lengths),
        "completion_length_max": max(lengths, default=0),
        "sampled_tokens": sum(lengths),
        **_agent_facts(rollouts),
    }


def _agent_facts(rollouts: list[Rollout]) -> dict[str, Any]:
    """Return what a step's metrics say of the work of agents, besides; nothing where none worked."""
    worked = [rollout for rollout in rollouts if rollout.agent]
    if not worked:
        return {}
    calls = [call for rollout in worked for call in rollout.calls]
    return {
        "agents": dict(Counter(str(rollout.agent.get("status", rollout.status)) for rollout in worked)),
        "agent_calls": len(calls),
        "agent_calls_mean": len(calls) / len(worked),
        "agent_seconds_mean": _mean([rollout.agent.get("seconds") for rollout in worked]),
        "rollouts_failed": dict(Counter(one.status for one in worked if one.status in FAILURES)),
        # All that was sampled, also what no agent used: it counts for the budget.
        "sampled_tokens": sum(len(call.completion_ids) for call in calls),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
