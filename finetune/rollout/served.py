"""What an engine sampled, written down between engine and callers: the account that rollouts are audited by.

Rule: it is taken from the engine's own answers, before any bridge or ledger sees them, and holds no tokens, only digests of
them and of their log-probs: who alters a record must alter both.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from finetune.rollout.engine import Call, Completion, Engine, Fault, Sampling


class ServedEngine:
    """The engine, whose every completion of one batch is entered in `records`; any thread may call.

    base: the engine of the untouched base, entered in the same records; None where there is none.
    """

    def __init__(self, engine: Engine, base: Engine | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.base: ServedEngine | None = None
        self._engine = engine
        if base is not None:
            self.base = ServedEngine(base)
            self.base.records = self.records

    def sample(self, calls: Sequence[Call], sampling: Sampling) -> list[list[Completion | Fault]]:
        found = self._engine.sample(calls, sampling)
        records = [
            _record(call, call.seed + place, outcome)
            for call, outcomes in zip(calls, found, strict=True)
            for place, outcome in enumerate(outcomes)
            if isinstance(outcome, Completion)
        ]
        self.records.extend(records)  # in one go, whatever other threads do
        return found

    def close(self) -> None:
        """The engine stays open: it is not ours."""


def _record(call: Call, seed: int, outcome: Completion) -> dict[str, Any]:
    return {
        "seed": seed,
        "version": outcome.version,
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": len(outcome.ids),
        "prompt_sha256": ids_digest(call.prompt_ids),
        "completion_sha256": ids_digest(outcome.ids),
        "logprobs_sha256": logprobs_digest(outcome.logprobs),
    }


def ids_digest(ids: Sequence[int]) -> str:
    """Return the sha256 of token ids, each as 4 bytes, little-endian."""
    packed = array("I", ids)
    assert packed.itemsize == 4, "every platform of ours has 4 bytes"
    return hashlib.sha256(packed.tobytes()).hexdigest()


def logprobs_digest(logprobs: Sequence[float]) -> str:
    """Return the sha256 of log-probs, each as 8 bytes, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(logprobs)}d", *logprobs)).hexdigest()
