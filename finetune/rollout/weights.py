"""Digest the weights that a vLLM worker computes with: its worker extension, and the digest that both sides take.

Rule: what is reported is what the matrix products use. On a CPU vLLM packs each weight for its kernels and leaves an
empty or an unused parameter behind, so a packed weight is read back through its kernel, as a product with the identity.

A sample of a matrix is some of its columns, drawn anew for each delivery, which the engine learns after it has loaded.
Equal samples prove the other columns by chance only: an error in a share f of the columns of one matrix stays unseen
with probability (1 - f)^C, and two versions may agree on all of them after rounding. What they see well is a whole
matrix, output or token's embedding that is missing, stale or another's.

Shapes: N output features, K input features, C sampled columns.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

IDENTITY_ROWS = 512  # of the identity in one product
SAMPLED = 32  # columns of a matrix
DIGEST_THREADS = 8
DIGEST_CHUNK = 1 << 17  # numbers
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = re.compile(r".*\.\d+\.")
PACKED = ".packed"  # ends the name of the copy of an embedding that serves as the head


class ServedWeights:
    """Methods that vLLM adds to its worker class: --worker-extension-cls finetune.rollout.weights.ServedWeights."""

    def finetune_weight_digests(self) -> dict[str, str]:
        """Return the digest of each served weight, by its name in the model's files."""
        worker: Any = self
        return dict(digests(served_tensors(worker.get_model(), worker.model_config.dtype)))

    def finetune_sampled_digests(self, draw: str) -> dict[str, str]:
        """Return the digest of each served weight's sample: of the columns of a matrix that `draw` chooses."""
        worker: Any = self
        read = served_tensors(worker.get_model(), worker.model_config.dtype, draw)
        return {name: digest(sample) for name, sample in read}  # too small for threads to gain on

    def finetune_weight_names(self) -> list[str]:
        """Return the names of the served weights, as in the model's files; reads none of them."""
        worker: Any = self
        return [name for name, _, _ in _served_parts(worker.get_model())]

    def finetune_adapter_digests(self, rank: int) -> list[dict[str, str]]:
        """Return, for each adapter that is in a place of the kernels, the digest of each of its matrices.

        rank: of the adapters that are asked for; places are wider, and what lies past it must be zero.
        """
        worker: Any = self
        places = worker.model_runner.lora_manager._adapter_manager.lora_index_to_id
        return [
            dict(digests(placed_matrices(worker.get_model(), place, rank)))
            for place, adapter in enumerate(places)
            if adapter is not None
        ]

    def finetune_repack_head(self) -> int:
        """Pack the head anew where it shares its weight with the embedding; returns the number of heads packed.

        vLLM's reload writes the new embedding into the shared parameter and leaves the packed copy of the head as it was.
        """
        worker: Any = self
        heads: list[Any] = [
            layer for _, layer in _layers(worker.get_model()) if _is_head(layer) and _is_packed(layer)
        ]
        for layer in heads:
            layer.quant_method.process_weights_after_loading(layer)
        return len(heads)


def digests(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of each tensor; a few tensors are in memory at once, and hashing runs beside the reading."""
    waiting: deque[tuple[str, Future[str]]] = deque()
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        for name, tensor in tensors:
            waiting.append((name, pool.submit(digest, tensor)))
            if len(waiting) > DIGEST_THREADS:
                first, future = waiting.popleft()
                yield first, future.result()
        for name, future in waiting:
            yield name, future.result()


def digest(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's type, shape and values.

    -0 and subnormal numbers count as 0: a product with the identity loses the sign of a zero, and kernels for bf16 flush
    subnormals.
    """
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    found = hashlib.sha256(f"{plain.dtype} {tuple(tensor.shape)} ".encode())
    if not plain.is_floating_point():
        found.update(plain.view(torch.uint8).numpy().data)
        return found.hexdigest()
    kind = _BITS[plain.itemsize]
    least = int(torch.tensor(torch.finfo(plain.dtype).tiny, dtype=plain.dtype).view(kind))
    for bits in plain.view(kind).split(DIGEST_CHUNK):  # small enough for the caches of a processor
        clean = bits.masked_fill((bits & torch.iinfo(kind).max) < least, 0)
        found.update(clean.view(torch.uint8).numpy().data)
    return found.hexdigest()


def sampled(name: str, weight: Tensor, draw: str) -> Tensor:
    """Return the sample of a weight (N, K): its columns (N, C) that `draw` chooses; anything but a matrix whole."""
    return weight[:, drawn_columns(name, weight.shape[1], draw)] if weight.ndim == 2 else weight


def drawn_columns(name: str, width: int, draw: str) -> Tensor:
    """Return C column numbers below `width`, the same for all weights of a block: they may be fused in the engine."""
    if width <= SAMPLED:
        return torch.arange(width)
    block = found[0] if (found := _BLOCK.match(name)) else ""
    stream = hashlib.shake_256(f"{draw} {block} {width}".encode()).digest(8 * SAMPLED)
    return torch.tensor(
        [int.from_bytes(stream[at : at + 8], "big") % width for at in range(0, len(stream), 8)]
    )


def served_tensors(
    model: nn.Module, dtype: torch.dtype, draw: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the served weights by their names in the model's files, fused ones taken apart, in `dtype`.

    draw: yield the samples that it chooses instead.
    """
    last: tuple[int, str] = (0, "")
    whole = torch.empty(0)
    for name, layer, (kind, place) in _served_parts(model):
        if last != (id(layer), kind):
            whole, last = _read(name, layer, kind, dtype, draw), (id(layer), kind)
        rows = getattr(layer, "org_vocab_size", None)  # vLLM rounds a vocabulary up
        yield name, whole[:rows] if place is None else whole.split(_fused_sizes(layer))[place]


def placed_matrices(model: nn.Module, place: int, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the A (rank, K) and B (N, rank) that a place of the kernels holds, as `MODULE.A` and `MODULE.B`.

    B is scaled already. Modules that the adapter leaves alone are zero and left out.
    """
    for path, layer in model.named_modules():
        if not isinstance(getattr(layer, "lora_a_stacked", None), tuple):
            continue  # no adapted layer, or the embedding or the head, which no adapter of ours has
        parts = _parts(model, path, len(layer.lora_a_stacked))
        for module, a, b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            a, b = a[place, 0], b[place, 0]
            if not a.any() and not b.any():
                continue
            past = "" if not a[rank:].any() and not b[:, rank:].any() else ".past-its-rank"
            yield f"{module}.A{past}", a[:rank]
            yield f"{module}.B{past}", b[:, :rank]


def _parts(model: nn.Module, module: str, count: int) -> list[str]:
    """Return the modules of the model's files that were fused into one of `count` parts: itself where that is not known."""
    last = module.rpartition(".")[2]
    fused = getattr(model, "packed_modules_mapping", {}).get(last, [])
    return [module.removesuffix(last) + part for part in fused] if len(fused) == count > 1 else [module]


def _served_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, int | None]]]:
    """Yield (name in the files, layer, (kind of reading, place among fused ones)) without reading a weight."""
    layers = list(_layers(model))
    has_head = any(_is_head(layer) for _, layer in layers)
    for path, layer in layers:
        module = path.replace(".base_layer", "")
        parts = _parts(model, module, len(_fused_sizes(layer)))
        for kind, _ in layer.named_parameters(recurse=False):
            for place, part in enumerate(parts):
                yield f"{part}.{kind}", layer, (kind, place if len(parts) > 1 else None)
        if _is_embedding(layer) and not has_head and _is_packed(layer):
            yield f"{module}.weight{PACKED}", layer, (PACKED, None)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, layer in model.named_modules():
        if next(layer.named_parameters(recurse=False), None):
            yield path, layer


def _read(name: str, layer: Any, kind: str, dtype: torch.dtype, draw: str | None) -> Tensor:
    looks_up = _is_embedding(layer) and kind != PACKED
    if kind in ("weight", PACKED) and _is_packed(layer) and not looks_up:
        width = layer.embedding_dim if hasattr(layer, "embedding_dim") else layer.input_size_per_partition
        columns = torch.arange(width) if draw is None else drawn_columns(name, width, draw)
        return _unpacked(layer, width, columns, dtype)
    weight = layer.get_parameter(kind).data
    return (weight if draw is None else sampled(name, weight, draw)).to(dtype)


def _unpacked(layer: Any, width: int, columns_C: Tensor, dtype: torch.dtype) -> Tensor:
    """Return columns (N, C) of the weight that a packed layer multiplies with: (I_C W^T)^T, exact as each sum has one term."""
    products = []
    with torch.inference_mode():
        for part in columns_C.split(IDENTITY_ROWS):
            rows_CK = torch.zeros(len(part), width, dtype=dtype)
            rows_CK[torch.arange(len(part)), part] = 1
            products.append(layer.cpu_linear(rows_CK, layer.weight, None))
        return torch.cat(products).T.contiguous()


def _fused_sizes(layer: Any) -> list[int]:
    """Return the output features of the modules that vLLM fused into this layer; [] for a layer of one module."""
    sizes = getattr(layer, "output_partition_sizes", None) or []
    return list(sizes) if len(sizes) > 1 else []


def _is_packed(layer: nn.Module) -> bool:
    return hasattr(layer, "cpu_linear") and getattr(layer, "weight", torch.empty(0)).ndim <= 2


def _is_embedding(layer: nn.Module) -> bool:
    return hasattr(layer, "org_vocab_size") and not _is_head(layer)


def _is_head(layer: nn.Module) -> bool:
    return any(kind.__name__ == "ParallelLMHead" for kind in type(layer).__mro__)  # vLLM's; known by its name
