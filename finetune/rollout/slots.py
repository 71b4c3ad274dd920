"""A server as the engine sees it, and the room for so many completions at once on it.

Rule: who came first gets in first, however much room it needs, so that a large request is not overtaken for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from finetune.rollout.control import Control
from finetune.rollout.server import ManagedServer


class Slots:
    """Room of `size`; used by the tasks of one event loop."""

    def __init__(self, size: int) -> None:
        self.size = self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(count)
            raise

    def give(self, count: int) -> None:
        self._free += count
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._free):
            wanted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= wanted
                turn.set_result(None)


@dataclass
class ServerState:
    """One server as the engine sees it. starts: counts restarts, so that many lost requests cause one.

    is_open: cleared while it is restarted and has not its weights again; completions wait for it.
    """

    index: int
    managed: ManagedServer | None
    control: Control
    slots: Slots
    starts: int = 0
    restarts_in_a_row: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)

    async def enter(self, count: int) -> None:
        """Take room for completions, of a server that has its weights."""
        while True:
            await self.is_open.wait()
            await self.slots.take(count)
            if self.is_open.is_set():
                return
            self.slots.give(count)

    @property
    def scores_alone(self) -> bool:
        """Whether a scoring request must be the server's only request.

        vLLM's CPU backend with adapters enabled dies of prompt log-probs in a batch of several requests (0.32: the head's
        adapter indices are those of the sampled tokens). Of a running server we do not know whether it is such a one.
        """
        settings = self.managed.settings if self.managed else None
        return settings is None or (settings.lora_rank is not None and not settings.devices)
