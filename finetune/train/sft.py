"""Supervised finetuning: loss = sum of -w log p over the supervised tokens / sum of w, over all ranks and microbatches of a step.

Rows of step k are a pure function of (seed, k); evaluation by generation runs on an unsharded policy, each rank its share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from finetune.config import SftConfig
from finetune.data.batches import Batch, Budget, rank_batches, step_rows
from finetune.data.prepare import Prepared, load_prepared
from finetune.model.policy import check_packing
from finetune.parallel.world import World
from finetune.records import EvalResult, Journal, StopFlag, TrainResult, jsonable
from finetune.rules import forward_tokens, global_batch, rows_per_forward, steps_of
from finetune.train.held_out import HeldOut, evaluate_held_out, held_out_loss
from finetune.train.losses import weighted_nll
from finetune.train.metrics import Stopwatch
from finetune.train.result import training_result
from finetune.train.step import (
    Job,
    Training,
    load_weights,
    log_step,
    save_checkpoint,
    start_training,
    take_step,
    unsharded_policy,
    write_final,
)


def train(job: Job, world: World, journal: Journal, stop: StopFlag) -> TrainResult:
    """Train on this rank as one of `world` and return the result, which is the same on every rank.

    Raises FinetuneError: non_finite, no_gradient, no_learning_signal, bad_checkpoint, packing_unsafe, ...
    """
    prepared = load_prepared(job.prepared_dir)
    config = job.config
    assert isinstance(config, SftConfig)
    training = start_training(job, world, journal, stop, steps_of(config, len(prepared.train)))
    if config.packing:
        check_packing(training.policy, training.module)
    watch = Stopwatch()
    if training.progress.eval_before is None:
        before = _evaluate(training, prepared)
        training.progress.eval_before = jsonable(before) if before else None
        journal.event("evaluated", step=training.progress.step, **_short(before))
    status = _steps(training, prepared, config)
    if status == "stopped":
        return training_result(training, status, None, watch)
    after = _evaluate(training, prepared)
    journal.event("evaluated", step=training.progress.step, **_short(after))
    write_final(training, prepared.report)
    return training_result(training, "succeeded", after, watch)


def _steps(training: Training, prepared: Prepared, config: SftConfig) -> str:
    """Make the steps that are left; return "succeeded", or "stopped" where a signal asked for it."""
    for step in range(training.progress.step + 1, training.num_steps + 1):
        rows = step_rows(config.seed, step, len(prepared.train), global_batch(config))
        batches, total = rank_batches(
            rows, prepared.train, _budget(config), training.world.rank, training.world.size
        )
        facts = take_step(training, step, batches, _share_of(training, total))
        more: dict[str, Any] = {"rows": [prepared.train[row].row for row in rows]}
        is_best = False
        if config.eval_every and step % config.eval_every == 0 and prepared.eval:
            held_out = _held_out(training, prepared, training.journal.heartbeat)
            more["eval_loss"] = held_out_loss(training.module, held_out)
            is_best = training.progress.take_eval(more["eval_loss"])
        log_step(
            training, step, facts, **more
        )  # before the checkpoint: a resumed run makes no line of a saved step
        is_over = (
            config.early_stopping is not None
            and training.progress.evals_without_gain >= config.early_stopping
        )
        is_last = step == training.num_steps or is_over
        if is_last or is_best or facts.stop_asked or step % config.checkpoint_every == 0:
            save_checkpoint(training)
        if is_last:
            break
        if facts.stop_asked:
            return "stopped"
    if config.early_stopping and training.progress.best_step:
        load_weights(training, training.progress.best_step)
    return "succeeded"


def _share_of(training: Training, total: float) -> Callable[[Batch], Tensor]:
    """Return what a microbatch adds to the loss of a step whose weights sum to `total` over all ranks."""
    return lambda batch: weighted_nll(training.module(batch), batch.weights_N) / total


def _held_out(training: Training, prepared: Prepared, beat: Callable[[str], None]) -> HeldOut:
    return HeldOut(prepared, training.config, training.job.source, training.world, beat)


def _evaluate(training: Training, prepared: Prepared) -> EvalResult | None:
    return evaluate_held_out(
        training.module, _held_out(training, prepared, training.beat), lambda: unsharded_policy(training)
    )


def _budget(config: SftConfig) -> Budget:
    return Budget(forward_tokens(config), rows_per_forward(config), config.packing)


def _short(result: EvalResult | None) -> dict[str, Any]:
    return (
        {"loss": result.loss, "accuracy": result.accuracy, "num_rows": result.num_rows}
        if result
        else {"num_rows": 0}
    )
