"""Tell by log-probs which version of the policy an engine serves: the rule of the proof, as arithmetic.

Rule: what is served must lie nearer to the version that it should be than to the one before, by a factor, and on a scale
where the two lie apart by more than the noise between trainer and engine. Whatever is not a number proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

NEARER = 3.0  # times nearer to the version than to the one before
POWER = 10.0  # times the noise by which the two must lie apart for that to be a proof
FACTORS = tuple(4.0**power for power in range(1, 8))  # of lora_alpha, for a probe
LEAST_NOISE = 1e-5  # nats; between two programs in fp32 (measured: 7e-6)
WITHIN = 4.0  # times the noise by which a proved version may lie off under its own name
TELLING = 8  # log-probs that must differ between two versions on our side before the engine's must too

Scores = list[list[float]]


@dataclass(frozen=True)
class Canary:
    """Token ids to compare log-probs on, and where the trainer's come from.

    score(factor) and previous(factor) return log p(ids[t] | ids[:t]) for t >= 1 of each sequence, of the new version and
    of the one that was served before, with their LoRA scale times `factor` (the base and a whole model: as they are).
    Each is asked once for a factor at most, score before previous, in rising order of factors; previous only where
    digests do not tell.
    """

    sequences: Sequence[Sequence[int]]
    score: Callable[[float], Scores]
    previous: Callable[[float], Scores]


@dataclass
class Expected:
    """What the trainer says to a canary; kept, so that an engine can be proved again without asking."""

    canary: Canary
    _new: dict[float, list[float]] = field(default_factory=dict)
    _old: dict[float, list[float]] = field(default_factory=dict)

    def new(self, factor: float) -> list[float]:
        """Return the log-probs of the new version alone: each of the two costs a forward pass of the trainer."""
        if factor not in self._new:
            self._new[factor] = self.flat(self.canary.score(factor))
        return self._new[factor]

    def at(self, factor: float) -> tuple[list[float], list[float]]:
        """Return the log-probs of the new version and of the one before, in one list each."""
        new = self.new(factor)
        if factor not in self._old:
            self._old[factor] = self.flat(self.canary.previous(factor))
        return new, self._old[factor]

    def take_old(self, logps: list[float]) -> None:
        """Take what the trainer said of the version before, when that was new, for what it would say now."""
        self._old.setdefault(1.0, logps)

    def close(self) -> None:
        """Ask the trainer nothing more, which goes on to other weights: what it has not said is NaN, which proves nothing."""
        sequences = self.canary.sequences
        untold = [[math.nan] * (len(ids) - 1) for ids in sequences]
        self.canary = Canary(sequences, lambda _: untold, lambda _: untold)

    def flat(self, scores: Scores) -> list[float]:
        assert [len(row) + 1 for row in scores] == [len(ids) for ids in self.canary.sequences]
        return [value for row in scores for value in row]

    def telling_factors(self, noise: float, with_probes: bool) -> Iterator[float]:
        """Yield the factors, 1 first, at which the two versions lie apart by POWER times the noise."""
        for factor in (1.0, *(FACTORS if with_probes else ())):
            if distance(*self.at(factor)) >= POWER * noise:
                yield factor


@dataclass(frozen=True)
class Margin:
    """Mean |difference of log-probs| (nats) of what is served to the version and to the one before, at a LoRA factor."""

    to_new: float
    to_old: float
    factor: float = 1.0

    @property
    def proves(self) -> bool:
        return self.to_new * NEARER < self.to_old  # false for NaN, and where nothing differs

    @property
    def ratio(self) -> float:
        return self.to_old / self.to_new if self.to_new else math.inf


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean |difference| of two lists of log-probs, in nats."""
    return math.fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def margin(
    served: Sequence[float], new: Sequence[float], old: Sequence[float], factor: float = 1.0
) -> Margin:
    """Return how far what is served lies from the new version and from the old one."""
    return Margin(distance(served, new), distance(served, old), factor)


def is_same_model(served: Sequence[float], ours: Sequence[float]) -> bool:
    """Whether these are log-probs of one model, judged without another version: nearer to each other than to a shift by one.

    A model of other weights is as far from ours as our own log-probs of neighbouring tokens are from each other.
    """
    return margin(served, ours, [*ours[1:], ours[0]]).proves


def must_differ(new: Sequence[float], old: Sequence[float]) -> bool:
    """Whether two versions differ at so many places that an engine which changed over must show a difference too."""
    return sum(a != b for a, b in zip(new, old, strict=True)) >= TELLING
