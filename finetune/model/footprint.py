"""How much memory a rank will take: a sum of parts that a plan can show, each from the model's sizes.

The factors of activations were fitted to measured peaks; what is no formula is a measured constant and named as such.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config import RunConfig
from finetune.model.adapter import adapter_shapes, read_adapter_config
from finetune.model.logprobs import CHUNK
from finetune.model.policy import lora_config
from finetune.model.source import Source, model_facts, text_config, weight_shapes

BASE_BYTES = {"cpu": 420_000_000, "cuda": 600_000_000}  # libraries in main memory; context and kernels on a device
SAVED_WIDTHS = 34  # values of the hidden width that a layer keeps for the backward, for each token
SAVED_FFN_WIDTHS = 8  # values of the feed-forward width, likewise


@dataclass(frozen=True)
class Workload:
    """The largest forward of a rank. num_tokens counts padding; num_ranks share the weights under fsdp2."""

    num_tokens: int
    num_ranks: int
    is_sharded: bool
    trainable: int


def forecast(source: Source, config: RunConfig, work: Workload) -> dict[str, int]:
    """Return the bytes of each part of a rank's peak."""
    facts = model_facts(source)
    feed_forward = text_config(source).get("intermediate_size") or 4 * facts.hidden
    width = 2 if config.dtype == "bf16" else 4
    share = work.num_ranks if work.is_sharded else 1
    stored = 4 if config.tuning == "full" else width
    kept_layers = 1 if config.gradient_checkpointing else facts.layers
    per_token = (SAVED_WIDTHS * facts.hidden + SAVED_FFN_WIDTHS * feed_forward) * width
    checkpoints = facts.layers * facts.hidden * width if config.gradient_checkpointing else 0
    return {
        "libraries": BASE_BYTES[config.device],
        "weights": facts.parameters * stored // share,
        "trained_weights_gradients_optimizer": work.trainable * (16 if config.tuning == "lora" else 12) // share,
        "activations": work.num_tokens * (kept_layers * per_token + checkpoints),
        "logits_chunk": CHUNK * facts.vocab_rows * 4 * 3,
    }


def num_trainable(config: RunConfig, source: Source) -> int:
    """Return how many numbers are trained: rank x (in + out) of each adapted matrix, or all parameters."""
    shapes = weight_shapes(source)
    if config.tuning == "full":
        return model_facts(source).parameters
    lora = read_adapter_config(config.init_adapter) if config.init_adapter else lora_config(config)
    if lora.target_modules == "all-linear":
        outside = ("embed_tokens", "lm_head", "wte", "wpe")
        adapted = [shape for name, shape in shapes.items() if len(shape) == 2 and name.split(".")[-2] not in outside]
        return sum(lora.r * sum(shape) for shape in adapted)
    return sum(rows * columns for rows, columns in adapter_shapes(lora, shapes).values())
