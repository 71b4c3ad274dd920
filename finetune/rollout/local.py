"""Sample completions with the model in this process: no server, no settings taken from the model's folder.

Rule: what a prompt gets depends on the weights, the sampling and its seed, not on which prompts share its batch (up to
the rounding of the kernels).

Tensors: B row, P longest own part of a prompt, K cached position, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from finetune.errors import FinetuneError
from finetune.rollout.engine import BASE_VERSION, Call, Completion, Engine, Fault, Sampling

BATCH_TOKENS = 8192


def generate(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    batch_tokens: int = BATCH_TOKENS,
    beat: Callable[[], None] = lambda: None,
) -> list[Completion]:
    """Return one completion per prompt, in the order of the prompts.

    seeds: of each prompt; its place where they are left out. batch_tokens: prompt and new tokens of one batch at most,
    padding included. beat: called before each token of a batch; what it raises ends the sampling. Raises
    FinetuneError(too_long) for a prompt that is empty or leaves no room for max_new_tokens in the model's context.
    """
    _check_lengths(model, prompts, sampling)
    seeds = range(len(prompts)) if seeds is None else seeds
    completions = [Completion() for _ in prompts]
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), _contiguous_head(model):
            for indices in _batches(prompts, sampling, batch_tokens):
                batch = _Batch(
                    [completions[index] for index in indices],
                    torch.stack([_uniforms(seeds[index], sampling.max_new_tokens) for index in indices]),
                    *_prefilled(model, [prompts[index] for index in indices]),
                )
                _complete(model, batch, sampling, beat)
    finally:
        model.train(was_training)
    return completions


@contextlib.contextmanager
def _contiguous_head(model: PreTrainedModel) -> Iterator[None]:
    """Give the output layer contiguous input: for the slice of the last position torch would repeat its weight for each row.

    That costs the size of the head times the rows of a batch in memory, 1.7 GB for 30 rows of SmolLM2.
    """
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def _check_lengths(model: PreTrainedModel, prompts: Sequence[list[int]], sampling: Sampling) -> None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or float("inf")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= context - sampling.max_new_tokens:
            text = f"prompt {index}: {len(prompt)} tokens and {sampling.max_new_tokens} new ones, in a context of {context}"
            raise FinetuneError("too_long", text, index=index)


def _batches(prompts: Sequence[list[int]], sampling: Sampling, batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices of prompts of like length, longest first: little padding, and a lack of memory shows at once."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
    while order:
        rows = max(1, batch_tokens // (len(prompts[order[0]]) + sampling.max_new_tokens))
        yield order[:rows]
        order = order[rows:]


def _uniforms(seed: int, count: int) -> Tensor:
    """Return the random numbers of one prompt, one a token: a function of its seed alone."""
    digest = hashlib.sha256(str(seed).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.rand(count, generator=generator, dtype=torch.float64)


@dataclass
class _Batch:
    """Rows that still go on, and what the model is to see next of each."""

    completions: list[Completion]
    uniforms_BT: Tensor
    cache: DynamicCache
    ids_BP: Tensor
    mask_BK: Tensor
    positions_BP: Tensor

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.ids_BP.device)
        self.cache.batch_select_indices(index)
        self.completions = [self.completions[row] for row in rows]
        self.uniforms_BT, self.ids_BP = self.uniforms_BT[index.cpu()], self.ids_BP[index]
        self.mask_BK, self.positions_BP = self.mask_BK[index], self.positions_BP[index]

    def advance(self, tokens_B: Tensor) -> None:
        self.ids_BP, self.positions_BP = tokens_B[:, None], self.positions_BP[:, -1:] + 1
        self.mask_BK = torch.cat([self.mask_BK, torch.ones_like(self.ids_BP)], dim=1)


def _complete(model: PreTrainedModel, batch: _Batch, sampling: Sampling, beat: Callable[[], None]) -> None:
    """Extend the completions of a batch token by token; rows that have ended leave it."""
    stop_ids, can_drop = set(sampling.stop_ids), attends_to_all(model)
    for step in range(sampling.max_new_tokens):
        beat()
        logits_BV = _next_logits(model, batch)
        tokens_B, logprobs_B = choose(
            logits_BV, sampling.temperature, batch.uniforms_BT[:, step].to(logits_BV.device)
        )
        for completion, token, logprob in zip(
            batch.completions, tokens_B.tolist(), logprobs_B.tolist(), strict=True
        ):
            if not completion.stopped:
                completion.ids.append(token)
                completion.logprobs.append(logprob)
                completion.stopped = token in stop_ids
        batch.advance(tokens_B)
        going = [row for row, completion in enumerate(batch.completions) if not completion.stopped]
        if not going:
            return
        if can_drop and len(going) < len(batch.completions):
            batch.keep(going)


def _next_logits(model: PreTrainedModel, batch: _Batch) -> Tensor:
    output = model(
        input_ids=batch.ids_BP,
        attention_mask=batch.mask_BK,
        position_ids=batch.positions_BP,
        past_key_values=batch.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1].float()


def choose(logits_BV: Tensor, temperature: float, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token and its log-prob for each row: the most likely one, or the one at `uniforms_B` of the distribution."""
    logps_BV = torch.log_softmax(logits_BV / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens_B = logps_BV.argmax(dim=-1)
    else:
        cumulated_BV = logps_BV.double().exp().cumsum(dim=-1)
        goals_B1 = (uniforms_B * cumulated_BV[:, -1])[:, None]  # the sum is 1 but for rounding
        tokens_B = torch.searchsorted(cumulated_BV, goals_B1, right=True)[:, 0].clamp(
            max=logits_BV.shape[-1] - 1
        )
    return tokens_B, logps_BV.gather(1, tokens_B[:, None])[:, 0]


def attends_to_all(model: PreTrainedModel) -> bool:
    """Whether every layer keeps all keys and values, so that its cache can be shared between rows and cut by rows."""
    config = model.config.get_text_config()
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    kinds = getattr(config, "layer_types", None) or (["sliding_attention"] if has_window else [])
    return set(kinds) <= {"full_attention"}


def _prefilled(
    model: PreTrainedModel, prompts: list[list[int]]
) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
    """Return the cache of what all prompts share, and the rest of each prompt with its mask and positions, padded left."""
    cache = DynamicCache(config=model.config)
    prefix = _shared_prefix(prompts) if attends_to_all(model) else []
    if prefix:
        model(
            input_ids=torch.tensor([prefix], device=model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_repeat_interleave(len(prompts))
    longest = max(map(len, prompts)) - len(prefix)
    own = [prompt[len(prefix) :] for prompt in prompts]
    gaps = [longest - len(part) for part in own]
    ids_BP = torch.tensor(
        [[0] * gap + part for gap, part in zip(gaps, own, strict=True)], device=model.device
    )
    mask_BK = torch.tensor(
        [[1] * len(prefix) + [0] * gap + [1] * (longest - gap) for gap in gaps], device=model.device
    )
    positions_BP = (mask_BK.cumsum(dim=1) - 1)[:, len(prefix) :].clamp(min=0)
    return cache, ids_BP, mask_BK, positions_BP


def _shared_prefix(prompts: list[list[int]]) -> list[int]:
    """Return the tokens with which all prompts begin (mostly a system prompt), less than the whole of any of them.

    What the first and the last prompt in order share, all between them share.
    """
    pairs = zip(min(prompts)[:-1], max(prompts)[:-1], strict=False)
    return [token for token, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


class LocalEngine:
    """An engine in this process: `model` answers with the weights that it holds at the moment, known as `version`.

    bare: makes the model its untouched base meanwhile; None where it has no adapter to leave out. Any thread may call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        version: str,
        beat: Callable[[], None] = lambda: None,
        bare: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model = model
        self.version = version
        self.beat = beat
        self._bare = bare
        self.lock = threading.Lock()  # the base is the same model for a moment

    @property
    def base(self) -> Engine | None:
        """An engine that answers as the untouched base, whatever this one holds; None where that cannot be."""
        return None if self._bare is None else _BareEngine(self, self._bare)

    def sample(self, calls: Sequence[Call], sampling: Sampling) -> list[list[Completion | Fault]]:
        with self.lock:
            return self.answers(calls, sampling, self.version)

    def answers(
        self, calls: Sequence[Call], sampling: Sampling, version: str
    ) -> list[list[Completion | Fault]]:
        prompts = [call.prompt_ids for call in calls for _ in range(call.count)]
        seeds = [call.seed + place for call in calls for place in range(call.count)]
        found = iter(generate(self.model, prompts, sampling, seeds, beat=self.beat))
        return [[replace(next(found), version=version) for _ in range(call.count)] for call in calls]

    def close(self) -> None:
        """Nothing to leave behind."""


@dataclass(frozen=True)
class _BareEngine:
    """The engine without its adapter."""

    engine: LocalEngine
    bare: Callable[[], contextlib.AbstractContextManager[Any]]

    def sample(self, calls: Sequence[Call], sampling: Sampling) -> list[list[Completion | Fault]]:
        with self.engine.lock, self.bare():
            return self.engine.answers(calls, sampling, BASE_VERSION)

    def close(self) -> None:
        """The engine is another's."""
