"""Reinforcement learning with group-relative advantages: sync, prove, sample, score, compare within groups, train.

The order of a step: the present policy reaches the engine and is proved there; completions are sampled and scored;
rewards become advantages over whole groups; then every rank trains its share of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.config import GrpoConfig
from finetune.data.prepare import Prepared, load_prepared
from finetune.domains.prompts import domain_of
from finetune.domains.verifiers import open_verifiers
from finetune.errors import FinetuneError
from finetune.model.adapter import load_adapter_tensors
from finetune.model.builtin import load_tokenizer
from finetune.parallel.shard import copy_full
from finetune.parallel.world import World
from finetune.records import EvalResult, Journal, StopFlag, TrainResult, jsonable
from finetune.rollout.fleet import Fleet, start_fleet
from finetune.rollout.ledger import ROLLOUTS, RolloutFiles, account
from finetune.rules import steps_of
from finetune.train.agents import AgentSampler, tool_chat
from finetune.train.delivery import Deliverer, FleetDelivery, LocalDelivery
from finetune.train.metrics import Stopwatch
from finetune.train.policy_step import BatchTraining
from finetune.train.result import training_result
from finetune.train.rollouts import Maker
from finetune.train.sampling import CompletionSampler, Sampler
from finetune.train.source import LiveSource, ReplaySource, Source
from finetune.train.step import Job, Training, log_step, save_checkpoint, start_training, write_final

# What is said of the rollouts of a run that learned nothing.
_TOLD = "groups_total groups_zero_variance groups_lone completions_total completions_truncated rewards_missing".split()


def train(job: Job, world: World, journal: Journal, stop: StopFlag) -> TrainResult:
    """Train on this rank as one of `world` and return the result, which is the same on every rank.

    Raises FinetuneError: sync_unproved, rollout_failures, verifier_failed, engine_failed and its kin, non_finite,
    no_gradient, no_learning_signal, bad_checkpoint, ...
    """
    prepared = load_prepared(job.prepared_dir)
    config = job.config
    assert isinstance(config, GrpoConfig), "the method says so"
    with contextlib.ExitStack() as stack:
        fleet = _start_engines(job, world, stack)
        training = start_training(job, world, journal, stop, steps_of(config, len(prepared.train)))
        source = _source(training, prepared, fleet, stack)
        watch = Stopwatch()
        if training.progress.eval_before is None:
            before = source.evaluate(training.progress.step)
            training.progress.eval_before = jsonable(before) if before else None
            journal.event("evaluated", step=training.progress.step, **_short(before))
        if _steps(training, source) == "stopped":
            return training_result(training, "stopped", None, watch)
        after = source.evaluate(training.progress.step)
        journal.event("evaluated", step=training.progress.step, **_short(after))
        try:
            write_final(training, prepared.report)
        except FinetuneError as error:
            raise _explained(error, job.run_dir) from error
        return training_result(training, "succeeded", after, watch)


def _source(
    training: Training, prepared: Prepared, fleet: Fleet | None, stack: contextlib.ExitStack
) -> Source:
    config = training.config
    assert isinstance(config, GrpoConfig), "the method says so"
    if config.replay:
        return ReplaySource(Path(config.replay), config)
    maker = deliverer = None
    if training.world.rank == 0:
        deliverer = _deliverer(training, fleet)
        tokenizer = load_tokenizer(training.job.source)
        sampler = _sampler(training, prepared, tokenizer, stack)
        maker = Maker(config, prepared, deliverer.engine, sampler, tokenizer, deliverer.base)
    source = LiveSource(training, prepared, maker, deliverer)
    stack.callback(source.close)
    return source


def _sampler(training: Training, prepared: Prepared, tokenizer: Any, stack: contextlib.ExitStack) -> Sampler:
    config = training.config
    assert isinstance(config, GrpoConfig), "the method says so"
    if config.tasks:
        return AgentSampler(config, tool_chat(config, tokenizer), lambda: training.beat("agents at work"))
    verifiers = open_verifiers(
        config.verifier,
        config.verifier_args,
        domain_of(config),
        config.verifier_timeout,
        config.verifier_workers,
    )
    stack.enter_context(verifiers)
    return CompletionSampler(config, verifiers, tokenizer, prepared.report["stop_token_ids"])


def _start_engines(job: Job, world: World, stack: contextlib.ExitStack) -> Fleet | None:
    """Start the servers while the model is loaded; they end with this process whatever happens."""
    config = job.config
    assert isinstance(config, GrpoConfig), "the method says so"
    if world.rank != 0 or config.engine == "local" or config.replay:
        return None
    fleet = start_fleet(config, job.source, job.run_dir, job.engines, set(job.devices))
    stack.callback(fleet.close)
    return fleet


def _deliverer(training: Training, fleet: Fleet | None) -> Deliverer:
    if fleet is None:
        return LocalDelivery(training)
    engine, syncer = fleet.connect(training.beat, training.journal.event)
    training.journal.event("engines", count=engine.num_servers)
    return FleetDelivery(training, engine, syncer)


def _steps(training: Training, source: Source) -> str:
    """Make the steps that are left; return "succeeded", or "stopped" where a signal asked for it."""
    config = training.config
    assert isinstance(config, GrpoConfig), "the method says so"
    reference = _reference(training) if config.beta else None
    while (first := training.progress.step + 1) <= training.num_steps:
        training.watch.read()
        batch, facts = source.batch(first)
        work = BatchTraining(training, batch.rollouts, reference)
        stop_asked = False
        for step, step_facts, own in work.steps(first):
            more = {**facts, **own, "ledger": account(batch.rollouts)}
            is_last = step == training.num_steps
            at_end = is_last or (step - first + 1) == config.passes
            if at_end and config.eval_every and _is_due(first, step, config.eval_every) and not is_last:
                more |= _measured(source.evaluate(step), training)
            log_step(training, step, step_facts, **more)
            stop_asked |= step_facts.stop_asked
        _record_trained(training, first, work)
        step = training.progress.step
        if stop_asked or step == training.num_steps or _is_due(first, step, config.checkpoint_every):
            save_checkpoint(training)
        if stop_asked and step < training.num_steps:
            return "stopped"
    return "succeeded"


def _record_trained(training: Training, first: int, work: BatchTraining) -> None:
    """Keep what the trainer thought of each sampled token, where it was asked; all ranks take part."""
    logps = work.trainer_logps() if work.has_signal else {}
    if logps and training.world.rank == 0:
        RolloutFiles(training.job.run_dir / ROLLOUTS).write_trained(first, logps)


def _is_due(first: int, last: int, every: int) -> bool:
    """Whether one of the steps from `first` to `last` is a multiple of `every`."""
    return last // every > (first - 1) // every


def _measured(result: EvalResult | None, training: Training) -> dict[str, Any]:
    if result is None:
        return {}
    training.journal.event("evaluated", step=training.progress.step, **_short(result))
    return {"eval_accuracy": result.accuracy, "eval_sampled_accuracy": result.sampled_accuracy}


def _short(result: EvalResult | None) -> dict[str, Any]:
    if result is None:
        return {"num_rows": 0}
    names = ("accuracy", "sampled_accuracy", "num_rows", "num_tokens")
    return {name: value for name, value in asdict(result).items() if name in names}


def _reference(training: Training) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what makes forwards those of the reference: the bare model, or the start adapter as it was."""
    config = training.config
    assert isinstance(config, GrpoConfig), "the method says so"
    if config.reference == "base" or not config.init_adapter:
        return lambda: training.policy.adapter_scaled(0.0)
    shapes = {name: tuple(parameter.shape) for name, parameter in training.parameters.items()}
    start = load_adapter_tensors(config.init_adapter, shapes)

    @contextlib.contextmanager
    def swapped() -> Iterator[None]:
        now = {name: parameter.detach().clone() for name, parameter in training.parameters.items()}
        for name, parameter in training.parameters.items():
            copy_full(parameter, start[name])
        try:
            yield
        finally:
            for name, parameter in training.parameters.items():
                parameter.data.copy_(now[name])

    return swapped


def _explained(error: FinetuneError, run_dir: Path) -> FinetuneError:
    """Say of a run that learned nothing what its rollouts were like."""
    if error.code != "no_learning_signal":
        return error
    files = RolloutFiles(run_dir / ROLLOUTS)
    totals: dict[str, int] = {}
    for path in sorted(files.folder.glob("step-*.jsonl")):
        batch = files.read(int(path.stem.removeprefix("step-")))
        for name in _TOLD:
            totals[name] = totals.get(name, 0) + int((batch.facts if batch else {}).get(name) or 0)
    told = ", ".join(f"{name} {count}" for name, count in totals.items())
    return FinetuneError(error.code, f"{error.message} ({told})", **error.evidence, **totals)
