"""How the rollouts of a batch are filled: with completions of the engine that verifiers score, or (agents.py) with work.

Rule: what has no completion or no reward says why, and shifts no other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from finetune.config import GrpoConfig
from finetune.domains.prompts import ASKING
from finetune.domains.verifiers import Answer, Reward, VerifierSet
from finetune.errors import FinetuneError
from finetune.records import Row
from finetune.rollout.engine import Call, Completion, Fault, Sampling
from finetune.rollout.ledger import SCORED, Rollout
from finetune.rollout.served import ServedEngine

# Why a rollout was lost to a failure: not to be counted as a bad answer. server, protocol: the engine; sandbox; agent: its
# program crashed; timeout; limit: what it left is too large to be judged; verifier, error, invalid: no proper reward.
FAILURES = ("server", "protocol", "sandbox", "agent", "timeout", "limit", "verifier", "error", "invalid")


@dataclass
class Draw:
    """How rollouts are sampled, and the seconds that it took so far."""

    engine: ServedEngine
    temperature: float
    sampling_s: float = 0.0
    scoring_s: float = 0.0

    @property
    def times(self) -> dict[str, float]:
        return {"sampling_s": self.sampling_s, "scoring_s": self.scoring_s}


class Sampler(Protocol):
    """Fills rollouts. rows[i] is the row of rollouts[i]; those of one group stand together, with seeds one apart."""

    def sample(self, rollouts: Sequence[Rollout], rows: Sequence[Row], draw: Draw) -> list[Rollout]:
        """Return the rollouts, in order, each with its completion (or its calls) and its reward, or the reason for none."""
        ...


@dataclass
class CompletionSampler:
    """One completion of the engine for each rollout, scored by verifiers."""

    config: GrpoConfig
    verifiers: VerifierSet
    tokenizer: Any
    stop_ids: list[int]

    def sample(self, rollouts: Sequence[Rollout], rows: Sequence[Row], draw: Draw) -> list[Rollout]:
        assert self.config.max_completion_tokens is not None, "the plan decides it"
        sampling = Sampling(self.config.max_completion_tokens, self.stop_ids, draw.temperature)
        groups = [list(group) for _, group in itertools.groupby(rollouts, key=lambda one: one.group)]
        calls = [Call(group[0].prompt_ids, group[0].seed, len(group)) for group in groups]
        began = time.perf_counter()
        outcomes = draw.engine.sample(calls, sampling)
        draw.sampling_s += time.perf_counter() - began
        made = [
            filled(rollout, outcome, self.tokenizer)
            for group, found in zip(groups, outcomes, strict=True)
            for rollout, outcome in zip(group, found, strict=True)
        ]
        began = time.perf_counter()
        self.score(made, rows)
        draw.scoring_s += time.perf_counter() - began
        return made

    def score(self, rollouts: Sequence[Rollout], rows: Sequence[Row]) -> None:
        """Give each rollout that has a completion its reward; raises verifier_failed with --on-verifier-error stop."""
        sampled = [(one, row) for one, row in zip(rollouts, rows, strict=True) if one.status == SCORED]
        rewards = self.verifiers.score([answer_to(row, one.text, not one.truncated) for one, row in sampled])
        for (rollout, _), reward in zip(sampled, rewards, strict=True):
            take_reward(rollout, reward)
            if reward.status in FAILURES and self.config.on_verifier_error == "stop":
                text = f"rollout {rollout.id} ({rollout.place}): verifier {reward.status}: {reward.error}"
                raise FinetuneError("verifier_failed", text[:4000], rollout=rollout.id, row=rollout.place)


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
