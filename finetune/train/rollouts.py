"""Make the rollouts of a batch: prompts, completions, rewards, advantages, one file. One process of a node does this.

Rule: what is sampled depends on (seed, step, group, sample) and the weights, never on a rank; a completion that was lost
or could not be scored is in the file with its reason, and in no statistics.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.config import GrpoConfig
from finetune.data.batches import epoch_order, step_rows
from finetune.data.prepare import Prepared
from finetune.data.tokens import token_texts
from finetune.domains.prompts import ASKING
from finetune.domains.verifiers import Answer, Reward, VerifierSet
from finetune.errors import FinetuneError
from finetune.records import Example, Row
from finetune.rollout.engine import Call, Completion, Engine, Fault, Sampling
from finetune.rollout.ledger import SCORED, Rollout, RolloutBatch
from finetune.rules import prompts_per_batch
from finetune.train.advantages import Advantages, group_advantages, overlong_penalty

# Why a rollout is not trained, besides what verifiers say (unscorable, error, timeout, invalid).
TRUNCATED, RESAMPLED = "truncated", "zero_variance_resampled"
_FAILURES = ("server", "protocol", "error", "timeout", "invalid")
_SPARE_EPOCH = 1_000_000  # where the order of prompts that replace others begins


@dataclass
class Maker:
    """What sampling a batch takes."""

    config: GrpoConfig
    prepared: Prepared
    engine: Engine
    verifiers: VerifierSet
    tokenizer: Any
    stop_ids: list[int]
    _texts: dict[int, str | list[int]] = field(default_factory=dict)  # of the tokens met so far

    def batch(self, step: int, version: int, digest: str, name: str) -> RolloutBatch:
        """Sample and score the batch that step begins with, under the version that the engine calls `name`.

        Raises FinetuneError: rollout_failures past --max-failure-share, verifier_failed with --on-verifier-error stop.
        """
        config = self.config
        spare = self._spare_rows(step)
        wanted = batch_rows(config, step, len(self.prepared.train))
        rollouts: list[Rollout] = []
        times = {"sampling_s": 0.0, "scoring_s": 0.0}
        for number in range(1 + config.resample_zero_variance):
            first = rollouts[-1].group + 1 if rollouts else 0
            rollouts += self._sampled(step, list(enumerate(wanted, first)), name, times)
            flat = _flat_groups(rollouts)
            if not flat or number == config.resample_zero_variance:
                break
            wanted = [row for row, _ in zip(spare, flat, strict=False)]
            for rollout in rollouts:
                # What was lost to a failure keeps its reason, and counts among the failures.
                if rollout.group in flat and wanted and rollout.status not in _FAILURES:
                    rollout.status = RESAMPLED
        self._check_failures(step, rollouts)
        found = with_advantages(rollouts, config.scale_rewards)
        facts = {**times, **_facts(rollouts, found)}
        return RolloutBatch(step, version, digest, rollouts, facts, self.tokens(rollouts))

    def tokens(self, rollouts: list[Rollout]) -> dict[str, str | list[int]]:
        """Return what each token of the rollouts writes."""
        ids = {one for rollout in rollouts for one in (*rollout.prompt_ids, *rollout.completion_ids)}
        self._texts |= token_texts(self.tokenizer, ids - self._texts.keys())
        return {str(one): self._texts[one] for one in sorted(ids)}

    def _spare_rows(self, step: int) -> Iterator[int]:
        used = set(batch_rows(self.config, step, len(self.prepared.train)))
        order = epoch_order(self.config.seed, _SPARE_EPOCH + step, len(self.prepared.train))
        return (row for row in order if row not in used)

    def _sampled(
        self, step: int, groups: list[tuple[int, int]], name: str, times: dict[str, float]
    ) -> list[Rollout]:
        config = self.config
        assert config.max_completion_tokens is not None, "the plan decides it"
        sampling = Sampling(config.max_completion_tokens, self.stop_ids, config.temperature)
        calls = [
            Call(
                list(self.prepared.train[row].input_ids),
                sampling_seed(config.seed, step, group),
                config.group_size,
            )
            for group, row in groups
        ]
        began = time.perf_counter()
        outcomes = self.engine.sample(calls, sampling)
        times["sampling_s"] += time.perf_counter() - began
        rollouts = []
        for (group, row), call, found in zip(groups, calls, outcomes, strict=True):
            example = self.prepared.train[row]
            for sample, outcome in enumerate(found):
                rollout = Rollout(
                    f"{step}-{group}-{sample}",
                    group,
                    sample,
                    row,
                    f"{example.file}:{example.line}",
                    call.seed + sample,
                    name,
                    call.prompt_ids,
                )
                rollouts.append(filled(rollout, outcome, self.tokenizer))
        began = time.perf_counter()
        self.score(rollouts, [self.prepared.train_rows[self.prepared.train[one.row].row] for one in rollouts])
        times["scoring_s"] += time.perf_counter() - began
        for rollout in rollouts:
            self._limit(rollout)
        return rollouts

    def score(self, rollouts: list[Rollout], rows: Sequence[Row]) -> None:
        """Give each rollout that has a completion its reward."""
        sampled = [(one, row) for one, row in zip(rollouts, rows, strict=True) if one.status == SCORED]
        rewards = self.verifiers.score([answer_to(row, one.text, not one.truncated) for one, row in sampled])
        for (rollout, _), reward in zip(sampled, rewards, strict=True):
            take_reward(rollout, reward)
            if reward.status in _FAILURES and self.config.on_verifier_error == "stop":
                text = f"rollout {rollout.id} ({rollout.place}): verifier {reward.status}: {reward.error}"
                raise FinetuneError("verifier_failed", text[:4000], rollout=rollout.id, row=rollout.place)

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
        failed = [rollout for rollout in rollouts if rollout.status in _FAILURES]
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


def filled(rollout: Rollout, outcome: Completion | Fault, tokenizer: Any) -> Rollout:
    """Return the rollout with its completion, or with the reason why there is none."""
    if isinstance(outcome, Fault):
        return replace(rollout, status=outcome.kind, error=outcome.text)
    if outcome.version != rollout.version:
        text = f"sampled by version {outcome.version}, asked of {rollout.version}"
        return replace(rollout, status="protocol", error=text)
    return replace(
        rollout,
        completion_ids=outcome.ids,
        logprobs=outcome.logprobs,
        text=tokenizer.decode(outcome.ids, skip_special_tokens=True),
        truncated=not outcome.stopped,
    )


def answer_to(row: Row, completion: str = "", stopped: bool = True) -> Answer:
    """Return an answer to a row in the shape that verifiers get."""
    asked = next((row.values[name] for name in ASKING if row.values.get(name)), "")
    return Answer(row.values, completion, asked, stopped, row.place)


def take_reward(rollout: Rollout, reward: Reward) -> None:
    rollout.reward, rollout.parts, rollout.error = reward.value, dict(reward.parts), reward.error
    rollout.status = SCORED if reward.status == "scored" else reward.status


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
    sampled = [rollout for rollout in rollouts if rollout.completion_ids]
    lengths = [len(rollout.completion_ids) for rollout in sampled]
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
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def training_examples(rollouts: Sequence[Rollout]) -> list[Example]:
    """Return each rollout as an example of which the sampled tokens, and no others, are targets."""
    return [
        Example(
            rollout.prompt_ids + rollout.completion_ids,
            [0.0] * len(rollout.prompt_ids) + [1.0] * len(rollout.completion_ids),
            rollout.row,
            rollout.place,
            0,
        )
        for rollout in rollouts
    ]
