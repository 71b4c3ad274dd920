"""Where the batches of rollouts come from: sampled live by one process of the node, or replayed from files.

Rule: a batch is on the disk before anybody trains on it, and every rank reads it from there, so no rank waits in a
collective while completions are sampled, and a resumed run takes up what is there.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from finetune.config import GrpoConfig
from finetune.data.prepare import Prepared
from finetune.errors import FinetuneError
from finetune.records import EvalResult
from finetune.rollout.ledger import ROLLOUTS, Rollout, RolloutBatch, RolloutFiles, read_batch, recorded
from finetune.train.delivery import CanaryScorer, Deliverer, PolicyVersion, current_version, deliver_together
from finetune.train.policy_step import lora_b_norm
from finetune.train.rollouts import Maker, with_advantages
from finetune.train.step import Training

# Sequences of a canary and their tokens. Where the server holds our extension and a whole copy of each weight, digests
# prove, and log-probs are asked beside them of few tokens: on the cpu a token under an adapter costs some 15 ms.
CANARY = (4, 96)
CANARY_BESIDE_DIGESTS = (1, 16)


class Source(Protocol):
    """What the loop asks for: the rollouts of a batch, and a measurement on held-out rows. All ranks call both."""

    def batch(self, step: int) -> tuple[RolloutBatch, dict[str, Any]]:
        """Return the batch that optimizer step `step` begins with, and metrics of how it came about."""
        ...

    def evaluate(self, step: int) -> EvalResult | None:
        """Measure the present policy; None where nothing is held out or nothing can answer."""
        ...


class LiveSource:
    """Batches sampled by the present policy, or by one that lags behind by --max-staleness batches.

    maker and deliverer are None but in the process that owns the engine.
    """

    def __init__(
        self, training: Training, prepared: Prepared, maker: Maker | None, deliverer: Deliverer | None
    ) -> None:
        config = training.config
        assert isinstance(config, GrpoConfig), "only grpo samples"
        self.training, self.prepared, self.config = training, prepared, config
        self.maker, self.deliverer = maker, deliverer
        self.files = RolloutFiles(training.job.run_dir / ROLLOUTS)
        self._scorer = CanaryScorer(training)
        self._has_digests = not config.vllm_url and config.rollout_tp == 1
        self._canary_size = CANARY_BESIDE_DIGESTS if self._has_digests else CANARY
        first = [list(example.input_ids) for example in prepared.train[: self._canary_size[0]]]
        self._canary = canary_sequences(first, *self._canary_size)
        self._is_first_canary = True
        self._delivered = ("", "")  # digest, and the name that the engines know it by
        self._report: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(
            max_workers=max(1, config.max_staleness), thread_name_prefix="sampling"
        )
        self._running: dict[int, Future[None]] = {}
        self._digests: dict[int, str] = {}  # of the version that samples the batch which a step begins

    def batch(self, step: int) -> tuple[RolloutBatch, dict[str, Any]]:
        began = time.perf_counter()
        version = current_version(self.training)
        ahead = range(step, step + (self.config.max_staleness + 1) * self.config.passes, self.config.passes)
        wanted = [first for first in ahead if first <= self.training.num_steps and first not in self._digests]
        # One rank looks and tells: a file that another finds later would have it leave out a collective.
        known = self.training.world.broadcast({first: self._known(first) for first in wanted})
        self._digests |= {first: digest or version.digest for first, digest in known.items()}
        missing = [first for first, digest in known.items() if digest is None]
        if missing:
            version = self._deliver(version)
            for first in missing:
                self._start(first, version)
        found = self._await(step)
        waited = time.perf_counter() - began
        del self._digests[step]
        staleness = version.number - found.version
        if staleness > self.config.max_staleness * self.config.passes:
            text = f"step {step}: its rollouts are {staleness} versions old, --max-staleness is {self.config.max_staleness}"
            raise FinetuneError("bug", text)
        report, self._report = self._report, {}
        self._choose_canary(found)
        return found, {
            **found.facts,
            **report,
            "policy_version": found.version,
            "staleness": staleness,
            "lora_b_norm": lora_b_norm(version.weights),
            "rollouts_reused": not missing or step not in missing,
            "wait_s": round(waited, 4),
            "sampling_tokens_per_s": round(
                found.facts.get("sampled_tokens", 0) / max(found.facts.get("sampling_s", 0.0), 1e-9), 1
            ),
        }

    def _choose_canary(self, found: RolloutBatch) -> None:
        """Take the next canary from what was trained last; beside digests keep it: what was said to it needs no asking again."""
        if self._has_digests and not self._is_first_canary:
            return
        self._is_first_canary = False
        taught = [one for one in found.rollouts if one.advantage] or found.rollouts
        self._canary = canary_sequences([one.last_ids for one in taught], *self._canary_size)

    def _known(self, first: int) -> str | None:
        """Return the digest of a batch that is on the disk already, sampled by a version that this run knows."""
        batch = self.files.read(first)
        known = self.training.progress.digests or {}
        if batch is None or known.get(str(batch.version)) != batch.digest:
            return None
        return batch.digest

    def _deliver(self, version: PolicyVersion) -> PolicyVersion:
        """Hand the version to the engine once; sampling that is under way keeps the version it began with.

        Return it by the name that the engine knows: a step may leave all weights as they were.
        """
        digest, name = self._delivered
        if digest == version.digest:
            return replace(version, name=name)
        self.training.journal.heartbeat(f"delivering version {version.number}")
        if self.deliverer is not None:
            for future in self._running.values():
                future.result()  # weights are replaced in place, or the engine is this process
        report = deliver_together(self._scorer, self.deliverer, version, self._canary)
        self._delivered = (version.digest, version.name)
        self._report = report
        self.training.journal.event("sync", version=version.number, name=version.name, **report)
        return version

    def _start(self, first: int, version: PolicyVersion) -> None:
        if self.maker is None:
            return
        self.training.journal.heartbeat(f"sampling the batch of step {first}")
        if self.config.max_staleness:
            self._running[first] = self._pool.submit(self._make, first, version)
        else:
            self._make(first, version)

    def _make(self, first: int, version: PolicyVersion) -> None:
        assert self.maker is not None, "only the owner of the engine samples"
        self.files.write(self.maker.batch(first, version.number, version.digest, version.name))

    def _await(self, step: int) -> RolloutBatch:
        if (future := self._running.pop(step, None)) is not None:
            future.result()

        def beat() -> None:
            self.training.beat(f"waiting for the rollouts of step {step}")

        return self.files.wait(step, self._digests[step], beat)

    def evaluate(self, step: int) -> EvalResult | None:
        """Answer every held-out row once greedily and --eval-samples times by sampling; the file of answers stays."""
        if not self.prepared.eval:
            return None
        version = current_version(self.training)
        is_missing = self.files.read(step, version.digest, "eval") is None
        if self.training.world.broadcast(is_missing):
            version = self._deliver(version)
            if self.maker is not None:
                self.training.beat("answering held-out rows")
                answers = self.maker.held_out(step, version.number, version.digest, version.name)
                self.files.write(answers, "eval")

        def beat() -> None:
            self.training.beat("waiting for the answers to held-out rows")

        return measured(self.files.wait(step, version.digest, beat, "eval").rollouts)

    def close(self) -> None:
        # A batch that is being sampled ahead would hold up our end, and its heartbeats would hide that we are done.
        self.training.is_over = not all(future.done() for future in self._running.values())
        self._pool.shutdown(wait=False, cancel_futures=True)


def canary_sequences(candidates: list[list[int]], count: int, tokens: int) -> list[list[int]]:
    """Return the sequences on which a sync is proved: the ends of a few that were trained on: there versions differ most."""
    fit = [ids for ids in candidates if len(ids) > 1]
    step = max(1, len(fit) // count)
    return [ids[-tokens:] for ids in fit[::step][:count]]


def measured(rollouts: list[Rollout]) -> EvalResult:
    """Return accuracy of the greedy answers, row by row, and the mean of the sampled ones; unscored answers are in neither."""
    greedy = [rollout.reward if rollout.is_trained else None for rollout in rollouts if rollout.sample == 0]
    sampled = [rollout.reward for rollout in rollouts if rollout.sample > 0 and rollout.is_trained]
    return EvalResult(
        loss=None,
        num_tokens=sum(rollout.num_sampled for rollout in rollouts),
        num_rows=len(greedy),
        accuracy=_mean([score for score in greedy if score is not None]),
        scores=greedy,
        sampled_accuracy=_mean([score for score in sampled if score is not None]),
    )


def _mean(scores: list[float]) -> float | None:
    return math.fsum(scores) / len(scores) if scores else None


class ReplaySource:
    """Batches as another run recorded them, advantages made anew from their rewards; nothing samples.

    path: what `recorded` takes; the batch of a single file is that of the first step, whichever it was.
    """

    def __init__(self, path: Path, config: GrpoConfig) -> None:
        self.path, self.config = path, config
        files = recorded(path)
        self._files = {1 if path.is_file() else int(file.stem.removeprefix("step-")): file for file in files}

    def batch(self, step: int) -> tuple[RolloutBatch, dict[str, Any]]:
        file = self._files.get(step)
        found = read_batch(file) if file else None
        if found is None:
            text = f"replay: {self.path} has no batch of step {step}; the recorded run made fewer steps, or others"
            raise FinetuneError("file_missing", text, setting="replay", step=step)
        with_advantages(found.rollouts, self.config.scale_rewards)
        return found, {**found.facts, "policy_version": found.version, "replayed": True}

    def evaluate(self, step: int) -> EvalResult | None:
        return None

    def close(self) -> None:
        """Nothing to leave behind."""
