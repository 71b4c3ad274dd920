"""How much memory a rank and an engine will take: sums of parts that a plan can show, each from the model's sizes.

The factors of activations were fitted to measured peaks; what is no formula is a measured constant and named as such.
Nothing heavy is imported, so that a plan can forecast without loading anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config import GrpoConfig, RunConfig
from finetune.model.source import Source, is_vocabulary_sized, model_facts, text_config, weight_shapes

SHORT_ROWS, SHORT_ROW_TOKENS = (
    "short_rows",
    512,
)  # the attention kernel that keeps its probabilities, and up to where
LOGITS_CHUNK = 128  # positions whose logits exist at once

BASE_BYTES = {
    "cpu": 560_000_000,
    "cuda": 600_000_000,
}  # libraries in main memory; context and kernels on a device
# Peak over the sum of what is kept for the backward: working memory of the kernels, and what the allocator cannot give
# back. Measured on CPUs (SmolLM2-135M, bf16 and fp32, 200 to 2,000 tokens; in fp32 the peak still rises over the first
# steps, as forwards of other widths come); on cuda the allocator rounds less.
ALLOCATOR = {("cpu", 2): 1.45, ("cpu", 4): 1.75, ("cuda", 2): 1.15, ("cuda", 4): 1.15}  # by bytes of a number
RECOMPUTED_LAYERS = 7  # whose activations exist at once under gradient checkpointing, measured likewise
LOGITS_COPIES = 2.5  # of a chunk of logits in float32
# Logits of the last position of each row while a token is chosen, in float32: greedily, and by a draw in float64.
CHOICE_COPIES = {"greedy": 3.5, "drawn": 9.5}
ENGINE_BASE_BYTES = {
    "cpu": 1_400_000_000,
    "cuda": 2_500_000_000,
}  # of a server's processes, without weights and cache
OWN_DEVICE_SHARE = 0.9  # of the memory of a device that an engine has to itself


@dataclass(frozen=True)
class Answering:
    """The largest batch of prompts that a rank answers itself: rows, tokens of the longest prompt, new tokens at most."""

    rows: int
    prompt: int
    new: int
    is_drawn: bool = False


@dataclass(frozen=True)
class Workload:
    """The largest forward of a rank. num_tokens counts padding, longest is of a row; num_ranks share weights under fsdp2.

    answering: where the rank generates too, which it never does while it trains.
    """

    num_tokens: int
    longest: int
    num_ranks: int
    is_sharded: bool
    trainable: int
    answering: Answering | None = None


def forecast(source: Source, config: RunConfig, work: Workload) -> dict[str, int]:
    """Return the bytes of each part of a rank's peak."""
    facts = model_facts(source)
    width = width_of(config)
    share = work.num_ranks if work.is_sharded else 1
    layers = min(RECOMPUTED_LAYERS, facts.layers) if config.gradient_checkpointing else facts.layers
    kept = (
        layers * _kept_by_layer(source, width, _attended(config, work)) * ALLOCATOR[str(config.device), width]
    )
    if config.gradient_checkpointing:
        kept += facts.layers * facts.hidden * width
    parts = {
        "libraries": BASE_BYTES[config.device],
        "weights": facts.parameters * (4 if config.tuning == "full" else width) // share,
        "trained_weights_gradients_optimizer": work.trainable
        * (16 if config.tuning == "lora" else 12)
        // share,
        "activations": int(work.num_tokens * kept),
        "logits_chunk": int(min(LOGITS_CHUNK, work.num_tokens) * facts.vocab_rows * 4 * LOGITS_COPIES),
    }
    if work.answering is None:
        return parts
    # What training takes is free while answers are made, and the other way round.
    more = _answering_bytes(source, width, work) - parts["activations"] - parts["logits_chunk"]
    return parts | {"answering_beyond_training": max(0, more)}


def width_of(config: RunConfig) -> int:
    """Return the bytes of a number in the compute type."""
    return 2 if config.dtype == "bf16" else 4


def _answering_bytes(source: Source, width: int, work: Workload) -> int:
    """Return what answering takes: cached keys and values, the forward over the prompts, the choice of a token.

    One layer's cache exists twice while it grows. Sharded weights are not answered with: a whole copy is made.
    """
    assert work.answering is not None, "the caller looks"
    asked, facts, text = work.answering, model_facts(source), text_config(source)
    cache = asked.rows * (asked.prompt + asked.new) * cache_bytes_per_token(text, width)
    feed_forward = text.get("intermediate_size") or 4 * facts.hidden
    prefill = asked.rows * asked.prompt * 4 * (facts.hidden + feed_forward) * width
    copies = CHOICE_COPIES["drawn" if asked.is_drawn else "greedy"]
    choice = asked.rows * facts.vocab_rows * 4 * copies
    copied = facts.parameters * width if work.is_sharded else 0
    return int(cache * (1 + 1 / facts.layers) + max(prefill, choice) + copied)


def cache_bytes_per_token(text: Mapping[str, Any], width: int) -> int:
    """Return what keys and values of one token take over all layers. text: the config of the language model."""
    heads = text.get("num_attention_heads", 32)
    head = text.get("head_dim") or text.get("hidden_size", 4096) // heads
    return 2 * text.get("num_hidden_layers", 32) * text.get("num_key_value_heads", heads) * head * width


def served_cache_gib(bytes_per_token: int, max_length: int, concurrency: int, memory_bytes: int) -> int:
    """Return the GiB of a CPU server's cache: all its completions at full length, within a quarter of the memory."""
    wanted = bytes_per_token * max_length * concurrency
    return max(1, math.ceil(min(wanted, memory_bytes / 4) / 2**30))


def engine_forecast(source: Source, config: GrpoConfig, memory_bytes: int) -> dict[str, int]:
    """Return the bytes of each part of one engine, on each of its devices. memory_bytes: of the machine.

    On a cuda device the cache is what one sequence needs at the least: a server takes all of its share in any case.
    """
    facts, width = model_facts(source), width_of(config)
    per_token = cache_bytes_per_token(text_config(source), width)
    length = config.max_length or facts.context
    parts = {
        "programs": ENGINE_BASE_BYTES[config.device],
        "weights": facts.parameters * width // config.rollout_tp,
    }
    if config.device != "cpu":
        return parts | {"cache_at_least": per_token * length // config.rollout_tp}
    return parts | {"cache": served_cache_gib(per_token, length, config.concurrency, memory_bytes) * 2**30}


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
