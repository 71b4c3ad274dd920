"""How much memory a rank will take: a sum of parts that a plan can show, each from the model's sizes.

The factors of activations were fitted to measured peaks; what is no formula is a measured constant and named as such.
Nothing heavy is imported, so that a plan can forecast without loading anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config import RunConfig
from finetune.model.source import Source, is_vocabulary_sized, model_facts, text_config, weight_shapes

SHORT_ROWS, SHORT_ROW_TOKENS = (
    "short_rows",
    512,
)  # the attention kernel that keeps its probabilities, and up to where
LOGITS_CHUNK = 128  # positions whose logits exist at once

BASE_BYTES = {
    "cpu": 425_000_000,
    "cuda": 600_000_000,
}  # libraries in main memory; context and kernels on a device
# Peak over the sum of what is kept for the backward: working memory of the kernels, and what the allocator cannot give
# back. Measured on CPUs (SmolLM2-135M, bf16 and fp32, 200 to 2,000 tokens); on cuda the allocator rounds less.
ALLOCATOR = {"cpu": 1.45, "cuda": 1.15}
RECOMPUTED_LAYERS = 7  # whose activations exist at once under gradient checkpointing, measured likewise
LOGITS_COPIES = 2.5  # of a chunk of logits in float32


@dataclass(frozen=True)
class Workload:
    """The largest forward of a rank. num_tokens counts padding, longest is of a row; num_ranks share weights under fsdp2."""

    num_tokens: int
    longest: int
    num_ranks: int
    is_sharded: bool
    trainable: int


def forecast(source: Source, config: RunConfig, work: Workload) -> dict[str, int]:
    """Return the bytes of each part of a rank's peak."""
    facts = model_facts(source)
    width = 2 if config.dtype == "bf16" else 4
    share = work.num_ranks if work.is_sharded else 1
    layers = min(RECOMPUTED_LAYERS, facts.layers) if config.gradient_checkpointing else facts.layers
    kept = layers * _kept_by_layer(source, width, _attended(config, work)) * ALLOCATOR[config.device]
    if config.gradient_checkpointing:
        kept += facts.layers * facts.hidden * width
    return {
        "libraries": BASE_BYTES[config.device],
        "weights": facts.parameters * (4 if config.tuning == "full" else width) // share,
        "trained_weights_gradients_optimizer": work.trainable
        * (16 if config.tuning == "lora" else 12)
        // share,
        "activations": int(work.num_tokens * kept),
        "logits_chunk": int(min(LOGITS_CHUNK, work.num_tokens) * facts.vocab_rows * 4 * LOGITS_COPIES),
    }


def _attended(config: RunConfig, work: Workload) -> int:
    """Return how many probabilities of each head and token exist: none where attention is computed in tiles."""
    return work.longest if config.attention == SHORT_ROWS and work.longest <= SHORT_ROW_TOKENS else 0


def _kept_by_layer(source: Source, width: int, attended: int) -> float:
    """Return the bytes that a decoder layer keeps for the backward, for each token.

    Two norms keep their input in fp32 and what they scale; then their output, queries, keys, values and what attention
    gives; then four tensors of the feed-forward width (gate, its activation, up, their product).
    """
    text = text_config(source)
    hidden = model_facts(source).hidden
    heads = text.get("num_attention_heads") or 1
    attention = 1 + 2 * (text.get("num_key_value_heads") or heads) / heads
    norms = 2 * (4 + width) * hidden
    feed_forward = text.get("intermediate_size") or 4 * hidden
    return norms + (2 + attention + 1) * width * hidden + 4 * width * feed_forward + heads * attended * width


def num_trainable(config: RunConfig, source: Source) -> int:
    """Return how many numbers are trained: rank x (in + out) of each adapted matrix, or all parameters.

    0 where the model's weights are not here to be measured.
    """
    if config.tuning == "full":
        return model_facts(source).parameters
    rows = model_facts(source).vocab_rows
    shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in weight_shapes(source).items()
        if len(shape) == 2
    }
    names = None if config.lora_targets == "all-linear" else config.lora_targets.split(",")
    targets = None if names is None else tuple(f".{name.strip()}" for name in names)
    chosen = [
        shape
        for name, shape in shapes.items()
        if not is_vocabulary_sized(shape, rows) and (targets is None or f".{name}".endswith(targets))
    ]
    return config.lora_rank * sum(sum(shape) for shape in chosen)
