"""Prove on one engine which weights it answers with: by digests, by log-probs, by a probe at a larger scale.

Rule: an engine's word is no proof. Weights are read back from where it computes, and log-probs are compared with the
trainer's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from finetune.errors import FinetuneError
from finetune.rollout.canary import (
    LEAST_NOISE,
    POWER,
    WITHIN,
    Expected,
    Margin,
    Scores,
    distance,
    is_same_model,
    margin,
    must_differ,
)
from finetune.rollout.engine import BASE_VERSION
from finetune.rollout.versions import Files, VersionStore, differing

MAX_PROBES = 3  # factors that are tried on one engine

Method = Literal["base", "direct", "probe", "digest", "unchanged"]


class Engines(Protocol):
    """What is asked of the engines; `server` counts from 0. Every method raises FinetuneError(engine_failed)."""

    @property
    def num_servers(self) -> int: ...
    def activate(self, version: str, model: str | None = None) -> None: ...
    def score(self, server: int, sequences: Any, model: str) -> Scores: ...
    def load_adapter(self, server: int, name: str, folder: Path) -> None: ...
    def unload_adapter(self, server: int, name: str) -> None: ...
    def reload_weights(self, server: int, folder: Path) -> None: ...
    def reset_prefix_cache(self, server: int) -> None: ...
    def stamp_version(self, server: int, version: str) -> None: ...
    def weight_digests(self, server: int) -> dict[str, str] | None: ...
    def call_workers(
        self, server: int, method: str, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]: ...
    def list_models(self, server: int) -> list[str]: ...


@dataclass
class Served:
    """A version on the engines. name: what requests ask for; answers: what each engine last said to the canary."""

    files: Files
    name: str
    expected: Expected
    attempt: int = 0
    answers: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Proof:
    """What an engine was believed for. answer: its log-probs of the canary; acknowledged: its name for it, or its digests."""

    method: Method
    answer: list[float]
    margin: Margin | None
    noise: float
    acknowledged: str


class Unproved(Exception):
    """Why an engine was not proved to serve a version."""


class Prover:
    """Proves versions on engines. noise: mean |trainer - engine| of the version proved last, in nats; None before the first."""

    def __init__(self, engines: Engines, store: VersionStore, mode: Literal["adapter", "merged"]) -> None:
        self.engines = engines
        self.store = store
        self.mode = mode
        self.noise: float | None = None
        self._modules: dict[int, set[str] | None] = {}  # by engine; None: it has no worker extension of ours

    def prove(self, served: Served, server: int, previous: Served | None) -> Proof:
        """Return the proof that an engine serves a version; previous: what it served before, None where that is unknown.

        Raises Unproved, and FinetuneError(engine_failed).
        """
        acknowledged = self.acknowledged(served, server, is_whole=previous is None or served.attempt > 0)
        answer = self._answer(served, server, served.name)
        new = served.expected.new(1.0)
        to_new = distance(answer, new)
        noise = max(to_new, LEAST_NOISE)
        has_digests = bool(served.files.digests) and self.can_digest(server)
        if previous is None and served.files.version.is_base:
            if not has_digests and not is_same_model(answer, new):
                off = f"its log-probs lie {to_new:.3g} nats from the trainer's"
                raise Unproved(f"{off}: it serves another model")
            return Proof("base", answer, None, max(noise, self.noise or 0.0), acknowledged)
        assert self.noise is not None, "the base was proved first"
        before = self._answer_before(served, server, previous)
        is_same_answer = answer == before
        is_merged = has_digests and served.name == BASE_VERSION
        if is_merged and to_new <= WITHIN * self.noise and not is_same_answer:
            return Proof(
                "digest", answer, None, noise, acknowledged
            )  # what the trainer said before tells no more
        old = self._old(served, previous)
        offset = margin(answer, new, old)
        if is_same_answer and must_differ(new, old):
            if not is_merged:
                raise Unproved("it answers exactly as the version before")
            self.acknowledged(served, server)  # rounding may leave the served weights alone: all of them tell
        # Digests see what lies in the kernels; that this very name leads there, log-probs alone can tell. Both are asked:
        # an adapter of which a part is missing may still lie much nearer to its version than to the one before.
        if has_digests and served.name != BASE_VERSION:
            self._check_adapter(served, server)
        usual = self._noise_here(served, previous, answer, before)
        is_telling = distance(new, old) >= POWER * usual
        if is_telling and offset.proves and served.name != BASE_VERSION:
            return Proof("direct", answer, offset, noise, acknowledged)
        if not has_digests:
            return self._proved_by_logprobs(served, server, answer, offset, acknowledged)
        is_off = not offset.to_new <= WITHIN * usual  # NaN is off
        if not offset.to_new <= offset.to_old and (is_telling or is_off):
            raise Unproved(f"its weights are ours, and its log-probs are not: {_words(offset)}")
        return Proof("digest", answer, offset, noise, acknowledged)

    def _old(self, served: Served, previous: Served | None) -> list[float]:
        """Return what the trainer says under the version before; for the same canary it said so when that was new."""
        if previous is not None and previous is not served and _is_same_canary(previous, served):
            served.expected.take_old(previous.expected.new(1.0))
        return served.expected.at(1.0)[1]

    def _noise_here(
        self, served: Served, previous: Served | None, answer: list[float], before: list[float] | None
    ) -> float:
        """Return the noise to expect on this canary: on other tokens than before it may be many times what it was.

        Where the version before cannot be asked about them (merged), any noise within one model is believed, once.
        """
        assert self.noise is not None, "the base was proved first"
        if previous is None or _is_same_canary(previous, served):
            return self.noise
        new, old = served.expected.at(1.0)
        if before is not None:
            return max(self.noise, distance(before, old))
        return max(self.noise, distance(answer, new)) if is_same_model(answer, new) else self.noise

    def _check_adapter(self, served: Served, server: int) -> None:
        found = self.engines.call_workers(server, "finetune_adapter_digests", rank=served.files.rank)[0]
        if served.files.digests not in found:
            wrong = [sum(one.get(name) != own for name, own in served.files.digests.items()) for one in found]
            least = min(wrong, default=len(served.files.digests))
            raise Unproved(f"none of its {len(found)} adapters is ours: at best {least} matrices differ")

    def _answer_before(self, served: Served, server: int, previous: Served | None) -> list[float] | None:
        """Return what an engine says to the present canary under the version before; None where that cannot be told."""
        if previous is None or previous is served:
            return None
        if _is_same_canary(previous, served):
            return previous.answers.get(server)
        return None if self.mode == "merged" else self._answer(served, server, previous.name)

    def _proved_by_logprobs(
        self, served: Served, server: int, answer: list[float], found: Margin, acknowledged: str
    ) -> Proof:
        """Compare at the scale of the version itself; where that tells nothing, at larger ones, which only a probe has."""
        assert self.noise is not None, "the base was proved first"
        noise = max(found.to_new, LEAST_NOISE)
        is_off = found.to_new > WITHIN * self.noise
        tried: list[str] = []
        for factor in served.expected.telling_factors(self.noise, with_probes=self.mode == "adapter"):
            if factor == 1.0 and found.proves:
                return Proof("direct", answer, found, noise, acknowledged)
            if factor > 1.0 and (is_off or len(tried) == MAX_PROBES):
                break
            shown = found if factor == 1.0 else self._probed(served, server, factor)
            if shown.proves:
                return Proof("probe", answer, shown, self.noise, acknowledged)
            tried.append(_words(shown))
        off = f"under its own name it lies {found.to_new:.3g} nats off, at a noise of {self.noise:.3g}"
        raise Unproved("; ".join([*tried, off]))

    def acknowledged(self, served: Served, server: int, is_whole: bool = True) -> str:
        """Return the name under which an engine lists an adapter, or how many weights have our digests; raises Unproved.

        is_whole: compare all of each weight, not a sample of its columns.
        """
        if served.name != BASE_VERSION:
            if served.name not in self.engines.list_models(server):
                raise Unproved(f"it does not list {served.name}")
            return served.name
        if self.mode == "merged" and served.files.digests and self.can_digest(server):
            draw = served.files.draw
            if is_whole or draw is None:
                ours = self.store.whole_digests(served.files)
                found = self.engines.weight_digests(server) or {}
            else:
                ours = served.files.digests
                found = self.engines.call_workers(server, "finetune_sampled_digests", draw=draw)[0]
            if wrong := differing(found, ours):
                shown = ", ".join(wrong[:3])
                raise Unproved(f"{len(wrong)} of {len(found)} weights differ from ours, as {shown}")
            return f"{len(found)} digests"
        return BASE_VERSION

    def _answer(self, served: Served, server: int, name: str) -> list[float]:
        scores = self.engines.score(server, served.expected.canary.sequences, name)
        return served.expected.flat(scores)

    def _probed(self, served: Served, server: int, factor: float) -> Margin:
        """Return the margin of the same weights at a larger lora_alpha, loaded under a name of their own."""
        probe = self.store.write_probe(served.files, factor)
        name = f"probe-{self.store.served_name(served.files.version)}"
        try:
            self.engines.load_adapter(server, name, probe.folder)
            answer = self._answer(served, server, name)
            self.engines.unload_adapter(server, name)
        finally:
            self.store.remove(probe)
        return margin(answer, *served.expected.at(factor), factor)

    def modules_of(self, server: int) -> set[str] | None:
        """Return the modules that an engine has, by its worker extension; None where it has none of ours."""
        if server not in self._modules:
            try:
                answers = self.engines.call_workers(server, "finetune_weight_names")
            except FinetuneError as error:
                if error.evidence.get("status") != 404 and "has no attribute" not in error.message:
                    raise
                answers = []
            # Each of several workers (tensor parallel) holds a part of every weight, so their digests are not ours.
            one = len(answers) == 1
            self._modules[server] = {name.removesuffix(".weight") for name in answers[0]} if one else None
        return self._modules[server]

    def can_digest(self, server: int) -> bool:
        return self.modules_of(server) is not None


def _is_same_canary(one: Served, other: Served) -> bool:
    return one.expected.canary.sequences == other.expected.canary.sequences


def _words(found: Margin) -> str:
    at = f" at {found.factor:g} times its lora_alpha" if found.factor != 1 else ""
    return f"it lies {found.to_new:.3g} nats from the version and {found.to_old:.3g} from the one before{at}"
