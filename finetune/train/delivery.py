"""Bring the policy of the training to the engine that samples: gathered whole, named, proved.

Every rank calls `Delivery.current` and `Delivery.deliver`, which gather; the process that owns the engine hands over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from finetune.config import GrpoConfig
from finetune.data.batches import Budget, rank_batches
from finetune.errors import FinetuneError
from finetune.model.policy import Policy, adapter_files, build_policy, copy_tensors
from finetune.parallel.shard import measured_kind
from finetune.records import Example
from finetune.rollout.canary import Canary
from finetune.rollout.engine import BASE_VERSION, Call, Completion, Engine, Fault, Sampling
from finetune.rollout.local import LocalEngine
from finetune.rollout.sync import Syncer, SyncReport
from finetune.rollout.versions import Version, adapter_version, base_version, whole_version
from finetune.rollout.vllm import VllmEngine
from finetune.rules import forward_tokens
from finetune.train.step import Training, full_weights

_DIGESTS_KEPT = 8


@dataclass(frozen=True)
class PolicyVersion:
    """The weights at one moment. number: how often they were changed; name: what engines call them."""

    number: int
    name: str
    digest: str
    weights: dict[str, Tensor]


class Deliverer(Protocol):
    """Hands a version to the engine and proves that it serves it; returns what is told of that in metrics."""

    @property
    def engine(self) -> Engine: ...

    @property
    def base(self) -> Engine | None:
        """An engine of the untouched base, beside the policy's; None where the weights of the base are not kept."""
        ...

    def deliver(self, version: PolicyVersion, canary: Canary) -> dict[str, Any]: ...


def weights_digest(weights: dict[str, Tensor]) -> str:
    """Return the sha256 of all trained weights, by name."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def current_version(training: Training) -> PolicyVersion:
    """Gather the policy and name it; a policy that is still its base model is called so. All ranks take part."""
    weights = full_weights(training)
    number = training.progress.version
    digest = weights_digest(weights)
    known = dict(training.progress.digests or {})
    known[str(number)] = digest
    newest = sorted(known, key=int)[-_DIGESTS_KEPT:]
    training.progress.digests = {name: known[name] for name in newest}
    return PolicyVersion(number, version_name(training, number, weights), digest, weights)


def version_name(training: Training, number: int, weights: dict[str, Tensor]) -> str:
    """Return base for weights that change nothing (LoRA-B all zero, untouched whole weights), else a name of its own."""
    if training.policy.is_adapted:
        is_base = not any(bool(tensor.any()) for name, tensor in weights.items() if ".lora_B." in name)
    else:
        is_base = number == 0
    return BASE_VERSION if is_base else f"step-{number:06d}"


class LocalDelivery:
    """The engine in this process. It answers with a copy of its own where the training changes weights meanwhile."""

    def __init__(self, training: Training) -> None:
        config = training.config
        assert isinstance(config, GrpoConfig), "only grpo samples"
        self._copy: Policy | None = None
        if measured_kind(training.module) == "fsdp2" or config.max_staleness:
            self._copy = build_policy(training.config, training.job.source).to(training.world.device)
        policy = self._copy or training.policy
        bare = (lambda: policy.adapter_scaled(0.0)) if policy.is_adapted else None
        self.engine: LocalEngine = LocalEngine(
            policy.generator, BASE_VERSION, lambda: training.beat("sampling"), bare
        )
        self.base = self.engine.base

    def deliver(self, version: PolicyVersion, canary: Canary) -> dict[str, Any]:
        if self._copy is not None:
            copy_tensors(self._copy, version.weights)
        self.engine.version = version.name
        return {"sync_method": "copied", "sync_version": version.name}


@dataclass(frozen=True)
class BaseEngine:
    """The untouched base of servers that hold adapters beside it; of no use where weights are reloaded."""

    engine: VllmEngine

    def sample(self, calls: Sequence[Call], sampling: Sampling) -> list[list[Completion | Fault]]:
        return self.engine.answers(calls, sampling, BASE_VERSION, BASE_VERSION)

    def close(self) -> None:
        """The servers are another's."""


class FleetDelivery:
    """vLLM servers: each version goes to all of them through the syncer, the base first."""

    def __init__(self, training: Training, engine: VllmEngine, syncer: Syncer) -> None:
        self.training = training
        self.engine: Engine = engine
        # Merged weights are reloaded over those of the base.
        self.base: Engine | None = BaseEngine(engine) if syncer.mode == "adapter" else None
        self._revive = engine.revive
        self._syncer = syncer
        self._met_base = False

    def deliver(self, version: PolicyVersion, canary: Canary) -> dict[str, Any]:
        if not self._met_base and version.name != BASE_VERSION:
            bare = Canary(canary.sequences, lambda _: canary.previous(0.0), lambda _: canary.previous(0.0))
            self._delivered(base_version, bare)
        self._met_base = True
        return self._delivered(lambda: self._served(version), canary).facts

    def _delivered(self, version: Callable[[], Version], canary: Canary) -> SyncReport:
        """Deliver a version, once more where a server had died meanwhile: it is started again first."""
        self._revive()
        try:
            return self._syncer.deliver(version(), canary)
        except FinetuneError as error:
            if error.code != "sync_unproved" or not self._revive():
                raise
        return self._syncer.deliver(version(), canary)

    def _served(self, version: PolicyVersion) -> Version:
        training = self.training
        if version.name == BASE_VERSION:
            return base_version(version.number)
        if training.policy.is_adapted:
            files = adapter_files(training.policy, training.job.source)
            return adapter_version(version.number, version.weights, files)
        return whole_version(version.number, tuple(version.weights.items()))


class CanaryScorer:
    """The trainer's log-probs of canary sequences, under the present weights and those that were served before.

    All ranks keep the weights before, their own part of them: where the policy is sharded a forward needs every rank.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self._before: dict[str, Tensor] | None = None  # None: the base was served before

    def remember(self) -> None:
        """Take the present weights for those that are served now."""
        self._before = {
            name: parameter.detach().clone() for name, parameter in self.training.parameters.items()
        }

    def scores(self, factor: float, is_before: bool, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log p(ids[t] | ids[:t]) for t >= 1 of each sequence, at temperature 1, LoRA scale times `factor`."""
        if not is_before:
            return self._scored(factor, sequences)
        if self._before is None:
            return self._scored(0.0, sequences)
        now = {name: parameter.detach().clone() for name, parameter in self.training.parameters.items()}
        try:
            for name, parameter in self.training.parameters.items():
                parameter.data.copy_(self._before[name])
            return self._scored(factor, sequences)
        finally:
            for name, parameter in self.training.parameters.items():
                parameter.data.copy_(now[name])

    def _scored(self, factor: float, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        training = self.training
        # Unsharded weights are scored without the wrap: the other ranks need not take part.
        module = training.module if self.is_shared else training.policy
        examples = [
            Example(list(ids), [0.0] + [1.0] * (len(ids) - 1), place, "canary", 0)
            for place, ids in enumerate(sequences)
        ]
        budget = Budget(forward_tokens(training.config))
        batches, _ = rank_batches(range(len(examples)), examples, budget, 0, 1)
        found: dict[int, list[float]] = {}
        with torch.no_grad(), training.policy.adapter_scaled(factor):
            for batch in batches:
                logps_N = module(batch.to(training.world.device)).cpu()
                for place in batch.row_N.unique().tolist():
                    found[place] = logps_N[batch.row_N == place].tolist()
        return [found[place] for place in range(len(examples))]

    @property
    def is_shared(self) -> bool:
        return measured_kind(self.training.module) == "fsdp2"


def deliver_together(
    scorer: CanaryScorer,
    deliverer: Deliverer | None,
    version: PolicyVersion,
    sequences: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Have the owner of the engine deliver and prove a version; the others help to score where the policy is sharded."""
    world = scorer.training.world

    def ask(factor: float, is_before: bool) -> list[list[float]]:
        if scorer.is_shared:
            world.broadcast((factor, is_before))
        return scorer.scores(factor, is_before, sequences)

    report: dict[str, Any] = {}
    if deliverer is not None:
        canary = Canary(sequences, lambda factor: ask(factor, False), lambda factor: ask(factor, True))
        report = deliverer.deliver(version, canary)
        if scorer.is_shared:
            world.broadcast(None)
    elif scorer.is_shared:
        while (asked := world.broadcast(None)) is not None:
            factor, is_before = asked
            scorer.scores(factor, is_before, sequences)
    scorer.remember()
    return report
