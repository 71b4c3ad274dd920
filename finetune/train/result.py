"""What a training reports at its end: how far it came, what it cost, and whether held-out rows are answered better."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from finetune.errors import FinetuneError
from finetune.parallel.shard import measured_kind, sharding_facts
from finetune.records import EvalResult, TrainResult
from finetune.train.evaluate import lift
from finetune.train.metrics import Stopwatch, peak_memory_bytes
from finetune.train.step import Training


def training_result(
    training: Training, status: str, after: EvalResult | None, watch: Stopwatch
) -> TrainResult:
    progress = training.progress
    before = EvalResult(**progress.eval_before) if progress.eval_before else None
    recent = progress.recent_losses or []
    own = {"peak_memory_bytes": peak_memory_bytes(training.world.device), **sharding_facts(training.module)}
    ranks = training.world.gather(own)
    facts = {
        "parallel": measured_kind(training.module),
        "world_size": training.world.size,
        "local_parameter_bytes": [rank["local_parameter_bytes"] for rank in ranks],
        "parameter_bytes": ranks[0]["parameter_bytes"],
        "num_dtensors": ranks[0]["num_dtensors"],
        "peak_memory_bytes": [rank["peak_memory_bytes"] for rank in ranks],
        "trainable_parameters": sum(parameter.numel() for parameter in training.parameters.values()),
        "training_s": round(watch.read(), 2),
        "best_step": progress.best_step,
        "effective_update": progress.has_moved,
        "policy_version": progress.version,
        "resumed_from": training.resumed_from,
    }
    return TrainResult(
        status=status,
        steps=progress.step,
        train_loss=math.fsum(recent) / len(recent) if recent else None,
        eval_before=_summary(before),
        eval_after=_summary(after),
        lift=_lift(before, after, training.config.seed),
        facts=facts,
    )


def _summary(result: EvalResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {name: value for name, value in asdict(result).items() if name not in ("scores", "row_losses")}


def _lift(before: EvalResult | None, after: EvalResult | None, seed: int) -> dict[str, Any] | None:
    """Compare both policies row by row: by score where there are scores, else by the loss they save."""
    if before is None or after is None:
        return None
    if before.scores and after.scores:
        return {"of": "accuracy", **lift(before.scores, after.scores, seed)}
    if not before.row_losses or not after.row_losses:
        raise FinetuneError("bug", "evaluations without rows cannot be compared")
    return {
        "of": "loss saved",
        **lift([-loss for loss in before.row_losses], [-loss for loss in after.row_losses], seed),
    }
