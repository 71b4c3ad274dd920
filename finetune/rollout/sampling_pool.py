"""Samples for many callers at once: calls that wait together go to the engine together.

Rule: a caller gets its own outcome or its own fault; what befalls one batch is told to all in it and ends no other.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from dataclasses import dataclass, field

from finetune.errors import FinetuneError, boundary
from finetune.rollout.engine import Call, Completion, Engine, Fault, Sampling

Outcome = Completion | Fault


@dataclass
class _Waiting:
    call: Call
    sampling: Sampling
    future: concurrent.futures.Future[Outcome] = field(default_factory=concurrent.futures.Future)


class SamplingPool:
    """`threads` threads that ask one engine.

    One thread for an engine in this process: whatever came while it was busy is the next batch. As many as there are
    agents for a server that batches by itself: then each call is asked for as it comes. gather_s: how long a thread that
    was idle waits for calls to come together.
    """

    def __init__(
        self, engine: Engine, threads: int = 1, gather_s: float = 0.01, name: str = "policy"
    ) -> None:
        self.errors: list[FinetuneError] = []  # what the engine raised, in order
        self._engine = engine
        self._gather_s = gather_s if threads == 1 else 0.0
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._threads = [
            threading.Thread(target=self._work, name=f"sampling {name} {number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call, sampling: Sampling) -> concurrent.futures.Future[Outcome]:
        """Return the future outcome of a call for one completion; a call that has not begun can be cancelled."""
        assert call.count == 1, "each outcome goes to one caller"
        waiting = _Waiting(call, sampling)
        with self._changed:
            if not self._is_open:
                waiting.future.set_result(Fault("server", "the bridge was closed"))
            else:
                self._waiting.append(waiting)
                self._changed.notify()
        return waiting.future

    def close(self) -> None:
        """Tell all that wait that nothing comes, and wait for what is being sampled."""
        with self._changed:
            self._is_open = False
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for waiting in left:
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_result(Fault("server", "the bridge was closed"))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            started = [waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()]
            if not started:
                continue
            outcomes = self._sampled(started)
            for waiting, outcome in zip(started, outcomes, strict=True):
                waiting.future.set_result(outcome)

    def _next_batch(self) -> list[_Waiting] | None:
        """Return calls that are drawn alike; all that wait where one thread does all the work, else one."""
        with self._changed:
            was_idle = not self._waiting
            while not self._waiting:
                if not self._is_open:
                    return None
                self._changed.wait()
            if was_idle and self._gather_s:
                self._changed.wait_for(lambda: not self._is_open, self._gather_s)
            if not self._waiting:
                return []
            first = self._waiting[0]
            taken = [one for one in self._waiting if one.sampling == first.sampling]
            taken = taken if len(self._threads) == 1 else taken[:1]
            chosen = {id(one) for one in taken}
            self._waiting = deque(one for one in self._waiting if id(one) not in chosen)
            return taken

    def _sampled(self, batch: list[_Waiting]) -> list[Outcome]:
        try:
            with boundary("engine_failed", "the engine"):
                found = self._engine.sample([waiting.call for waiting in batch], batch[0].sampling)
                return [outcome for _, (outcome,) in zip(batch, found, strict=True)]
        except FinetuneError as error:
            self.errors.append(error)
            return [Fault("server", f"{error.code}: {error.message}"[:2000])] * len(batch)
