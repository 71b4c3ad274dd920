"""What every method shares: microbatches -> gradients -> one optimizer step -> journal -> checkpoint -> stop flag.

All ranks run the same lines; `World` and the sharding door make them mean the right thing. Rank 0 alone writes, and
only what the others have already handed over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config import RunConfig
from finetune.data.batches import Batch
from finetune.errors import FinetuneError
from finetune.model.checkpoint import (
    Checkpoint,
    Progress,
    checkpoint_folder,
    newest_checkpoint,
    read_checkpoint,
    rng_state,
    rotate_checkpoints,
    set_rng_state,
    write_adapter,
    write_checkpoint,
)
from finetune.model.optimizer import (
    full_optimizer_state,
    learning_rate,
    load_optimizer_state,
    make_optimizer,
    set_learning_rate,
)
from finetune.model.policy import Policy, adapter_files, build_policy, check_head, copy_tensors
from finetune.model.source import Source
from finetune.model.whole import write_whole_model
from finetune.parallel.shard import Sharding, copy_full, full_tensor, measured_kind, reduce_on_last, shard
from finetune.parallel.world import World
from finetune.records import Journal, StopFlag
from finetune.train.metrics import Stopwatch, Tracker, peak_memory_bytes

BEAT_EVERY_S = 1.0
RECENT = 10  # steps whose mean loss stands for the loss at the end of training


@dataclass(frozen=True)
class Job:
    """What is to be trained and where: the plan as the engine needs it."""

    config: RunConfig
    source: Source
    sharding: Sharding
    prepared_dir: Path
    run_dir: Path
    engines: tuple[dict[str, Any], ...] = ()  # grpo: index, devices and url of each
    devices: tuple[str, ...] = ()  # of the ranks


@dataclass
class StepFacts:
    """One optimizer step over all ranks. loss is the step's loss; num_tokens counts inputs without padding."""

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_supervised: int
    step_s: float
    peak_memory_bytes: list[int]  # of each rank
    stop_asked: bool


@dataclass
class Training:
    """A policy in training on this rank, with all that a checkpoint must bring back."""

    job: Job
    world: World
    journal: Journal
    stop: StopFlag
    num_steps: int
    policy: Policy
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    progress: Progress
    tracker: Tracker
    resumed_from: int | None = None
    is_first_step: bool = True
    watch: Stopwatch = field(default_factory=Stopwatch)
    last_beat: tuple[str, float] = ("", 0.0)  # what was being done, and when
    is_over: bool = False  # what still goes on in another thread is to end

    @property
    def config(self) -> RunConfig:
        return self.job.config

    def beat(self, operation: str) -> None:
        """Say what is being done between steps; may be called as often as one likes.

        Raises FinetuneError(stopped) where this rank was told to stop and the checkpoints hold all there is: before the
        first step of this attempt, and after the last step of all. The process that started the ranks ends the others.
        Also where the training has ended without its caller.
        """
        if self.is_over:
            raise FinetuneError("stopped", f"the training ended while {operation}")
        now = time.monotonic()
        if self.last_beat[0] != operation or now - self.last_beat[1] >= BEAT_EVERY_S:
            self.last_beat = (operation, now)
            self.journal.heartbeat(operation)
        if self.stop.is_set and self.progress.step in (self.resumed_from or 0, self.num_steps):
            raise FinetuneError("stopped", f"told to stop while {operation}")


def start_training(job: Job, world: World, journal: Journal, stop: StopFlag, num_steps: int) -> Training:
    """Load, adapt and shard the policy, then take up the newest sound checkpoint if there is one."""
    journal.heartbeat("loading the model", step=0)
    policy = build_policy(job.config, job.source)
    check_head(policy)
    policy.to(world.device)
    module = shard(policy, policy.decoder_layers(), job.sharding, world)
    parameters = policy.trainable()
    if not parameters:
        raise FinetuneError("no_gradient", "no weight of the model is trainable with these settings")
    tracker = Tracker(job.config.report_to if world.rank == 0 else "none", job.run_dir)
    progress = Progress(step=0, world_size=world.size)
    optimizer = make_optimizer(parameters, job.config)
    training = Training(
        job, world, journal, stop, num_steps, policy, module, parameters, optimizer, progress, tracker
    )
    # Dropout differs from rank to rank; what the ranks must share was drawn before.
    torch.manual_seed(job.config.seed * 1009 + world.rank + 1)
    _resume(training)
    return training


def _resume(training: Training) -> None:
    folder, passed_over = newest_checkpoint(training.job.run_dir)
    for reason in passed_over:
        training.journal.event("warning", code="checkpoint_skipped", text=reason)
    if folder is None:
        training.journal.rewind(0)
        return
    saved = read_checkpoint(folder)
    _check_names(folder, set(saved.weights), set(training.parameters))
    for name, parameter in training.parameters.items():
        copy_full(parameter, saved.weights[name])
    load_optimizer_state(training.optimizer, training.parameters, saved.optimizer)
    training.progress = saved.progress
    if saved.progress.world_size == training.world.size:
        set_rng_state(saved.rng[training.world.rank], training.world.device)
    else:
        torch.manual_seed((training.config.seed * 1009 + training.world.rank + 1) * 31 + saved.progress.step)
    training.progress.world_size = training.world.size
    training.resumed_from = saved.progress.step
    training.journal.rewind(saved.progress.step)
    training.journal.event("resumed", step=saved.progress.step, folder=str(folder))


def _check_names(folder: Path, saved: set[str], expected: set[str]) -> None:
    if saved != expected:
        odd = sorted(saved ^ expected)[:3]
        raise FinetuneError(
            "bad_checkpoint",
            f"{folder}: its weights are not those of this model, for example {odd}",
            names=odd,
        )


def take_step(
    training: Training, step: int, batches: Iterable[Batch], share_of: Callable[[Batch], Tensor]
) -> StepFacts:
    """Make one optimizer step from this rank's microbatches and return its facts over all ranks.

    `share_of` makes the forward of a microbatch and gives its share of the step's loss; the shares of all ranks add up
    to the loss. Raises
    FinetuneError(non_finite) before a bad gradient reaches the weights, no_gradient for a weight that nothing trains.
    """
    world, config = training.world, training.config
    training.journal.heartbeat("training", step=step)
    training.watch.read()
    training.optimizer.zero_grad(set_to_none=True)
    loss, tokens, supervised = 0.0, 0, 0
    pending = list(batches)
    for index, batch in enumerate(pending):
        on_device = batch.to(world.device)
        with reduce_on_last(training.module, last=index == len(pending) - 1):
            share = share_of(on_device)
            (share * world.size).backward()
        loss += float(share.detach())
        if batch.weights_N.any():
            tokens += batch.num_tokens
            supervised += len(batch.targets_N)
    if training.is_first_step:
        _check_gradients(training)
        training.is_first_step = False
    limit = config.max_grad_norm or math.inf
    norm = float(full_tensor(nn.utils.clip_grad_norm_(training.parameters.values(), limit)))
    rate = learning_rate(config, step, training.num_steps)
    facts = _agree(training, StepFacts(loss, norm, rate, tokens, supervised, 0.0, [], training.stop.is_set))
    if not (math.isfinite(facts.loss) and math.isfinite(norm)):
        raise FinetuneError(
            "non_finite",
            f"step {step}: loss {facts.loss}, gradient norm {norm}; the weights are as before",
            step=step,
        )
    set_learning_rate(training.optimizer, rate)
    training.optimizer.step()
    training.progress.step = step
    training.progress.version += 1
    training.progress.has_moved |= norm > 0 and rate > 0
    training.progress.recent_losses = [*(training.progress.recent_losses or []), facts.loss][-RECENT:]
    facts.step_s = training.watch.read()
    return facts


def skip_step(training: Training, step: int) -> StepFacts:
    """Count a step in which nothing is to be learned: no weight and no version changes, on any rank."""
    training.journal.heartbeat("skipping a step without advantage", step=step)
    training.watch.read()
    rate = learning_rate(training.config, step, training.num_steps)
    facts = _agree(training, StepFacts(0.0, 0.0, rate, 0, 0, 0.0, [], training.stop.is_set))
    training.progress.step = step
    facts.step_s = training.watch.read()
    return facts


def _agree(training: Training, own: StepFacts) -> StepFacts:
    """Sum this step over the ranks, in the order of the ranks, so that every rank holds the same figures."""
    own.peak_memory_bytes = [peak_memory_bytes(training.world.device)]
    every = training.world.gather(own)
    own.loss = sum(facts.loss for facts in every)
    own.num_tokens = sum(facts.num_tokens for facts in every)
    own.num_supervised = sum(facts.num_supervised for facts in every)
    own.peak_memory_bytes = [peak for facts in every for peak in facts.peak_memory_bytes]
    own.stop_asked = any(facts.stop_asked for facts in every)
    return own


def _check_gradients(training: Training) -> None:
    """Find trained weights that got no gradient on any rank, which an optimizer would pass over in silence."""
    missing = {name for name, parameter in training.parameters.items() if parameter.grad is None}
    everywhere = sorted(set.intersection(*map(set, training.world.gather(missing))))
    everywhere = [
        name for name in everywhere if ".experts." not in name
    ]  # an expert that no token chose is no fault
    if everywhere:
        raise FinetuneError(
            "no_gradient",
            f"{len(everywhere)} trained weights got no gradient, first {everywhere[:3]}",
            weights=everywhere[:20],
        )


def save_checkpoint(training: Training) -> None:
    """Save together: every rank hands over its pieces and its random state, rank 0 writes."""
    step = training.progress.step
    training.journal.heartbeat(f"saving step {step}")
    weights = full_weights(training)
    optimizer = full_optimizer_state(training.optimizer, training.parameters)
    rng = training.world.gather(rng_state(training.world.device))
    if training.world.rank == 0:
        checkpoint = Checkpoint(training.job.run_dir, training.progress, weights, optimizer, rng)
        folder = write_checkpoint(
            training.job.run_dir,
            checkpoint,
            training.policy.is_adapted,
            adapter_files(training.policy, training.job.source),
        )
        rotate_checkpoints(
            training.job.run_dir, training.config.checkpoints_kept, training.progress.best_step
        )
        training.journal.event("checkpoint", step=step, folder=str(folder))
    training.journal.heartbeat(f"saved step {step}")


def load_weights(training: Training, step: int) -> None:
    """Put the weights of one of this run's checkpoints back into the policy."""
    saved = read_checkpoint(checkpoint_folder(training.job.run_dir, step))
    for name, parameter in training.parameters.items():
        copy_full(parameter, saved.weights[name])


def write_final(training: Training, report: dict[str, Any]) -> None:
    """Write adapter/ (or merged/ with tuning full) once training has come to its end.

    report: of the prepared data. Raises FinetuneError(no_learning_signal), and writes nothing, where the weights have
    not moved.
    """
    weights = full_weights(training)
    if not has_learned(training, weights):
        text = "the weights have not moved: every gradient or the learning rate was zero"
        raise FinetuneError("no_learning_signal", text, steps=training.progress.step)
    if training.world.rank != 0:
        return
    training.journal.heartbeat("writing the final weights")
    source, run_dir = training.job.source, training.job.run_dir
    if training.policy.is_adapted:
        write_adapter(run_dir / "adapter", weights, adapter_files(training.policy, source))
    else:
        write_whole_model(
            run_dir / "merged", weights, source, report.get("chat_template"), report.get("stop_token_ids", [])
        )


def has_learned(training: Training, weights: dict[str, Tensor]) -> bool:
    """Return whether training moved the weights; an adapter that starts at zero must have left it."""
    if training.policy.is_adapted and training.config.init_adapter is None:
        return any(bool(tensor.any()) for name, tensor in weights.items() if ".lora_B." in name)
    return training.progress.has_moved


def full_weights(training: Training) -> dict[str, Tensor]:
    """Return every trained weight whole, on the CPU, by its name in files; all ranks take part, in the order of names."""
    return {
        name: full_tensor(parameter.detach()).cpu().contiguous()
        for name, parameter in training.parameters.items()
    }


def log_step(training: Training, step: int, facts: StepFacts, **more: Any) -> None:
    """Append the step to metrics.jsonl and to the tracker."""
    values = {
        "loss": facts.loss,
        "learning_rate": facts.learning_rate,
        "grad_norm": facts.grad_norm,
        "num_tokens": facts.num_tokens,
        "num_supervised": facts.num_supervised,
        "step_s": round(facts.step_s, 4),
        "tokens_per_s": round(facts.num_tokens / max(facts.step_s, 1e-9), 1),
        "peak_memory_bytes": max(facts.peak_memory_bytes),
        "peak_memory_bytes_per_rank": facts.peak_memory_bytes,
        "num_steps": training.num_steps,
        **more,
    }
    training.journal.metrics(step, **values)
    training.tracker.log(step, values)


def unsharded_policy(training: Training) -> Policy:
    """Return a policy that may generate: the trained one itself, or under FSDP2 a whole copy that receives its weights."""
    if measured_kind(training.module) != "fsdp2":
        return training.policy
    weights = full_weights(training)
    random = torch.get_rng_state()
    copy = build_policy(training.config, training.job.source)
    torch.set_rng_state(random)  # making the copy drew numbers that dropout is to draw
    copy_tensors(copy, weights)
    return copy.to(training.world.device)
