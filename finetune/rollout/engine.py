"""What the training asks of whatever samples: exact token ids and log-probs, under a known version of the weights.

Rule: nothing is re-tokenised. What is trained are the ids that were served, and every request carries all sampling
parameters, so that no server fills in its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

BASE_VERSION = "base"  # the untouched model; also version 0 and every version whose LoRA-B is all zero


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; temperature 0 takes the most likely token. No top-k, top-p or penalties."""

    max_new_tokens: int
    stop_ids: list[int]
    temperature: float = 0.0


@dataclass(frozen=True)
class Call:
    """`count` completions of one prompt; completion i is drawn with the seed `seed` + i."""

    prompt_ids: list[int]
    seed: int = 0
    count: int = 1


@dataclass
class Completion:
    """What followed one prompt, with the stop token if there is one; logprobs are at the sampling temperature (at 1 for 0)."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False  # by a stop token; otherwise the limit cut it
    version: str = BASE_VERSION  # of the weights that sampled it


@dataclass(frozen=True)
class Fault:
    """Why there is no completion. server: the engine failed; protocol: it answered something that cannot be trained."""

    kind: Literal["server", "protocol"]
    text: str


class Engine(Protocol):
    """An engine samples under the version that was last delivered to it."""

    def sample(self, calls: Sequence[Call], sampling: Sampling) -> list[list[Completion | Fault]]:
        """Return `count` outcomes for each call, in order; a lost completion is a Fault and never shifts the others."""
        ...

    def close(self) -> None: ...
