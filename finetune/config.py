"""Every setting of every method, each declared once; and the arithmetic and the rules that bind several of them.

A value of "auto" or None is decided by the plan before the engine sees it; the engine gets concrete values only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from finetune.errors import FinetuneError
from finetune.knobs import knob


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every method needs: model, data, ranks, step arithmetic, optimizer, adapter, checkpoints."""

    model: str = knob(
        help="model folder, Hub id, builtin:smollm2-135m or builtin:tiny[?vocabulary=N&context=N&template=NAME&seed=N&tied=1]"
    )
    data: list[str] = knob(
        help="training rows: files, folders, Hub ids or builtin:arithmetic; weights as a.jsonl:0.7"
    )
    out: str = knob("auto", help="run folder; auto makes runs/<run id>", identity=False)
    revision: str | None = knob(None, help="revision of a Hub model", advanced=True)
    trust_remote_code: bool = knob(
        False, help="let the model folder run its own code (dangerous)", advanced=True
    )
    domain: str = knob(
        "auto",
        help="what a row means and how an answer scores: auto, text, math, or a Python file with the four functions",
    )
    eval_data: list[str] = knob([], help="held-out rows; without them --eval-fraction of the training rows")
    eval_fraction: float = knob(
        0.05,
        at_least=0,
        below=1,
        help="share of the training rows held out when there is no --eval-data (rounded down)",
    )
    eval_every: int | None = knob(
        None, at_least=1, help="evaluate held-out loss every so many steps; none: before and after only"
    )
    eval_rows: int = knob(200, at_least=1, help="held-out rows used at most")
    split_seed: int = knob(0, at_least=0, help="seed of the held-out split", advanced=True)
    data_format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"] = knob(
        "auto", help="form of the rows"
    )
    map: list[str] = knob([], help="columns to rename, as prompt=question completion=answer")
    system_prompt: str | None = knob(None, help="system turn put before every conversation that has none")
    chat_template: str | None = knob(
        None, help="chat template instead of the model's: a file or a name (chatml)"
    )
    chat_template_args: list[str] = knob(
        [], help="template arguments as key=value (thinking switches)", advanced=True
    )
    max_length: int | None = knob(
        None, at_least=8, help="tokens of a row at most; none: the model's context, 2048 at most"
    )
    on_long: Literal["error", "truncate-prompt", "drop"] = knob(
        "error", help="what becomes of longer rows; never cut in silence"
    )
    on_bad_row: Literal["error", "drop"] = knob(
        "error", help="what becomes of rows that cannot be trained (empty answer, bad roles)"
    )
    epochs: float = knob(1.0, above=0, at_most=1000, help="passes over the rows, unless --max-steps is given")
    max_steps: int | None = knob(None, at_least=1, help="optimizer steps, instead of --epochs")
    global_batch_size: int | None = knob(
        None,
        at_least=1,
        help="rows of one optimizer step over all ranks; none: 16, or from --batch-size-per-gpu",
    )
    batch_size_per_gpu: int | None = knob(
        None, at_least=1, help="rows of one forward on one rank", identity=False, advanced=True
    )
    gradient_accumulation: int | None = knob(
        None, at_least=1, help="forwards of one step on one rank", identity=False, advanced=True
    )
    micro_batch_tokens: int | None = knob(
        None,
        at_least=8,
        help="tokens, padding included, of one forward at most; none: 8192 on cuda, 1024 on cpu",
        identity=False,
    )
    learning_rate: float = knob(2e-4, at_least=0, at_most=1, help="peak learning rate of AdamW")
    schedule: Literal["cosine", "linear", "constant"] = knob("cosine", help="learning rate after the warmup")
    warmup_ratio: float = knob(
        0.03, at_least=0, below=1, help="share of the steps with a rising learning rate (rounded down)"
    )
    weight_decay: float = knob(0.0, at_least=0, at_most=1, help="decoupled weight decay of AdamW")
    max_grad_norm: float = knob(1.0, at_least=0, help="gradients are clipped to this norm; 0: never")
    tuning: Literal["lora", "full"] = knob("lora", help="train adapters, or all weights")
    lora_rank: int = knob(16, at_least=1, at_most=512, help="rank of the adapters")
    lora_alpha: float = knob(32.0, above=0, help="adapters are scaled by alpha / rank")
    lora_dropout: float = knob(0.0, at_least=0, below=1, help="dropout before the adapters")
    lora_targets: str = knob(
        "all-linear",
        help="modules that get adapters: all-linear (never embeddings or lm_head), or names with commas",
    )
    init_adapter: str | None = knob(None, help="adapter to start from (a warm start, not a resume)")
    dtype: Literal["auto", "bf16", "fp32"] = knob(
        "auto", help="compute type; adapters and optimizer are fp32 always"
    )
    gradient_checkpointing: bool | None = knob(
        None, help="recompute activations to save memory; none: on cuda yes, on cpu no", identity=False
    )
    attention: Literal["auto", "sdpa", "short_rows", "eager", "flash_attention_2"] = knob(
        "auto",
        help="attention kernel; auto: sdpa, on the cpu short_rows, which is faster below 512 tokens",
        identity=False,
        advanced=True,
    )
    num_gpus: int = knob(
        1, at_least=1, at_most=64, help="ranks: devices on cuda, processes on cpu", identity=False
    )
    device: Literal["auto", "cuda", "cpu"] = knob("auto", help="where to train", identity=False)
    parallel: Literal["auto", "ddp", "fsdp2"] = knob(
        "auto", help="how several ranks share the work", identity=False
    )
    profile: str | None = knob(None, help="Accelerate YAML instead of --parallel", identity=False)
    deterministic: bool = knob(False, help="deterministic kernels on cuda", advanced=True, identity=False)
    threads: int | None = knob(
        None, at_least=1, help="CPU threads of a rank; none: cores / ranks", advanced=True, identity=False
    )
    distributed_timeout: float = knob(
        1800.0, at_least=5, help="seconds after which a collective gives up", advanced=True, identity=False
    )
    seed: int = knob(
        0, at_least=0, at_most=2**31 - 1, help="seed of the row order, the adapters' start and dropout"
    )
    checkpoint_every: int = knob(50, at_least=1, help="steps between checkpoints", identity=False)
    checkpoints_kept: int = knob(
        2, at_least=1, help="newest checkpoints kept, besides the best", identity=False, advanced=True
    )
    early_stopping: int | None = knob(
        None, at_least=1, help="stop after so many evaluations without a lower loss", advanced=True
    )
    report_to: Literal["none", "tensorboard"] = knob(
        "none", help="tracker beside metrics.jsonl", identity=False, advanced=True
    )


@dataclass(frozen=True, kw_only=True)
class SftConfig(RunConfig):
    """Supervised finetuning on conversations, prompt-completion pairs or text."""

    learn: Literal["all", "last"] = knob("all", help="assistant turns that are learned")
    packing: bool = knob(
        False, help="put several rows into one sequence (they never attend to each other)", identity=False
    )


DEFAULT_GLOBAL_BATCH = 16
DEFAULT_MAX_LENGTH = 2048
DEFAULT_FORWARD_TOKENS = {"cuda": 8192, "cpu": 1024}


def global_batch(config: RunConfig) -> int:
    """Return the rows of one optimizer step: as asked, or batch per GPU x accumulation x ranks, or 16.

    Raises FinetuneError(batch_arithmetic) where the three contradict each other, with the nearest numbers that do not.
    """
    per_gpu, accumulation, ranks, asked = (
        config.batch_size_per_gpu,
        config.gradient_accumulation,
        config.num_gpus,
        config.global_batch_size,
    )
    if per_gpu and accumulation:
        product = per_gpu * accumulation * ranks
        if asked and asked != product:
            raise FinetuneError(
                "batch_arithmetic",
                f"global_batch_size {asked} is not batch_size_per_gpu {per_gpu} x gradient_accumulation {accumulation}"
                f" x num_gpus {ranks} = {product}; give --global-batch-size {product} or leave one of the three out",
                valid=[product],
            )
        return product
    return asked or (per_gpu or accumulation or 0) * ranks or DEFAULT_GLOBAL_BATCH


def rows_per_forward(config: RunConfig) -> int | None:
    """Return the rows of one forward at most, where the user set them by batch per GPU or by accumulation."""
    if config.batch_size_per_gpu:
        return config.batch_size_per_gpu
    if config.gradient_accumulation:
        return max(1, math.ceil(global_batch(config) / (config.gradient_accumulation * config.num_gpus)))
    return None


def forward_tokens(config: RunConfig) -> int:
    """Return the tokens of one forward at most, padding included; a longer row goes alone."""
    return config.micro_batch_tokens or DEFAULT_FORWARD_TOKENS["cuda" if config.device == "cuda" else "cpu"]


def steps_of(config: RunConfig, num_rows: int) -> int:
    """Return the optimizer steps of the run: the short last step of each epoch counts as one."""
    if config.max_steps is not None:
        return config.max_steps
    whole, part = divmod(config.epochs, 1.0)
    size = global_batch(config)
    return int(whole) * math.ceil(num_rows / size) + math.ceil(round(part * num_rows, 6) / size)


def contradictions(config: RunConfig, set_by_user: set[str]) -> Iterator[FinetuneError]:
    """Yield what cannot be meant: settings of the user that contradict each other or that nothing would read."""

    def without_effect(name: str, reason: str) -> Iterator[FinetuneError]:
        if name in set_by_user:
            yield FinetuneError(
                "setting_without_effect", f"{name}: has no effect {reason}; leave it out", setting=name
            )

    try:
        global_batch(config)
    except FinetuneError as error:
        yield error
    if config.tuning == "full":
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "init_adapter"):
            yield from without_effect(name, "with tuning full")
    elif config.init_adapter:
        for name in ("lora_rank", "lora_alpha", "lora_targets"):
            yield from without_effect(name, "with init_adapter, which brings its own")
    if config.max_steps is not None:
        yield from without_effect("epochs", "beside max_steps")
    if config.eval_data:
        for name in ("eval_fraction", "split_seed"):
            yield from without_effect(name, "beside eval_data")
    elif config.eval_fraction == 0:
        yield from without_effect("split_seed", "with eval_fraction 0, which holds out no rows")
    if config.early_stopping and not config.eval_every:
        yield FinetuneError(
            "settings_conflict",
            "early_stopping needs eval_every: without it the loss is evaluated at the end only",
            setting="early_stopping",
        )
    if config.profile and "parallel" in set_by_user:
        yield FinetuneError(
            "settings_conflict",
            "profile and parallel both say how ranks share the work; give one of them",
            setting="parallel",
        )
    if config.device == "cpu" and "deterministic" in set_by_user and config.deterministic:
        yield from without_effect(
            "deterministic", "on the cpu, which is deterministic at a fixed number of threads"
        )


def idle_at_size_one(config: RunConfig, set_by_user: set[str]) -> list[str]:
    """Return the settings of several ranks that a single rank does not read: a warning, so that one command line scales."""
    if config.num_gpus > 1:
        return []
    return sorted(set_by_user & {"parallel", "distributed_timeout"})
