"""Where this process stands among the training processes, and every collective they share.

A world of one has the same methods, and there each of them is the identity, so a training step holds no test of rank.
Groups are opened with the backend "cpu:gloo,cuda:nccl", so that objects and tensors of either device can travel.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """One process among `size`; `rank` counts from 0 over all nodes."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @classmethod
    def single(cls, device: str = "cpu") -> World:
        return cls(device=torch.device(device))

    def sum(self, value: float) -> float:
        """Return the sum of a number over all ranks, in float64."""
        if self.size == 1:
            return float(value)
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def max(self, value: int) -> int:
        if self.size == 1:
            return value
        most = torch.tensor(value, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(self.max(int(flag)))

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks, in the order of the ranks, on every rank."""
        if self.size == 1:
            return [item]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, item)
        return parts

    def broadcast(self, item: Any) -> Any:
        """Return rank 0's item on every rank."""
        if self.size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextlib.contextmanager
def joined_world(
    rank: int, size: int, device: torch.device, timeout_s: float, store: dist.Store | None
) -> Iterator[World]:
    """Open the process group for the time of the block; a failing block leaves it without waiting for the others.

    Without a store the group meets where the environment says (torchrun's ranks).
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, **options)
    yield World(rank, size, device)
    leave_world(30.0)


def leave_world(limit_s: float) -> None:
    """Wait for the others, then destroy the group, within `limit_s`: results are on disk, so a late peer may be left behind."""

    def leave() -> None:
        with contextlib.suppress(RuntimeError):  # a peer that has already gone is no failure here
            dist.barrier()
        dist.destroy_process_group()

    leaver = threading.Thread(target=leave, daemon=True)
    leaver.start()
    leaver.join(limit_s)
