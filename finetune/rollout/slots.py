"""Room for so many completions at once on one server.

Rule: who came first gets in first, however much room it needs, so that a large request is not overtaken for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque


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
