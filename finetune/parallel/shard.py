"""A plain module in, the same module as all ranks train it out: as it is, DDP, or FSDP2; and full tensors back.

Both DDP and FSDP2 average gradients over ranks; the loss is multiplied by the world size instead of changing that,
because the other way needs a flag on every FSDP module under gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from finetune.parallel.world import World


@dataclass(frozen=True)
class Sharding:
    """How several ranks share a module: kind ddp or fsdp2, and what FSDP2 does with its pieces."""

    kind: str
    reshard: bool = True
    cpu_offload: bool = False


def shard(module: nn.Module, layers: Sequence[nn.Module], sharding: Sharding, world: World) -> nn.Module:
    """Return `module` as every rank trains it; `layers` are the parts of it that FSDP2 gathers one at a time."""
    if world.size == 1:
        return module
    if sharding.kind == "ddp":
        devices = [world.device] if world.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices)
    mesh = init_device_mesh(world.device.type, (world.size,))
    offload = CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=sharding.reshard, offload_policy=offload)
    fully_shard(module, mesh=mesh, reshard_after_forward=sharding.reshard, offload_policy=offload)
    return module


@contextlib.contextmanager
def reduce_on_last(module: nn.Module, last: bool) -> Iterator[None]:
    """Let gradients cross ranks only in the last microbatch of a step."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        yield
    elif isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
    else:
        yield


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor of which each rank may hold a piece; every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_full(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into one of which each rank may hold a piece only."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            whole = distribute_tensor(
                whole.to(target.device, target.dtype),
                target.device_mesh,
                target.placements,
                src_data_rank=None,
            )
        target.copy_(whole)


def sharding_facts(module: nn.Module) -> dict[str, int]:
    """Measure what this rank holds: bytes of parameters here and over all ranks, and how many are pieces (DTensors)."""
    parameters = list(module.parameters())
    pieces = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    local = sum(
        _num_bytes(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
        for parameter in parameters
    )
    return {
        "local_parameter_bytes": local,
        "parameter_bytes": sum(_num_bytes(p) for p in parameters),
        "num_dtensors": len(pieces),
    }


def measured_kind(module: nn.Module) -> str:
    """Return how the module is really shared, read off the module: none, ddp or fsdp2."""
    if isinstance(module, DistributedDataParallel):
        return "ddp"
    return "fsdp2" if isinstance(module, FSDPModule) else "none"


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
