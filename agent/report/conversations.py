"""An agent's rollout as a report shows it: its segments as the policy read and wrote them, and what the boxes said.

Rule: the segments are those that training makes of the calls; what is no part of them is counted with its reason.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from finetune.rollout.ledger import Rollout, unpacked, why_unused
from finetune.train.segments import Segment, rollout_segments

_MOST_GIVEN, _MOST_SAMPLED = 1200, 2000  # tokens of one part that are kept
_MOST_LOG = 6000  # characters

# Tokens -> the places of their texts, or None where they must not be shown.
Writer = Callable[[Sequence[int]], list[int] | None]


def work_of(item: dict[str, Any], trainer: list[float] | None, write: Writer) -> dict[str, Any]:
    """Return the work of an agent. item: a rollout as it lies on disk; trainer: its log-probs, segment by segment."""
    rollout = unpacked(item)
    segments = rollout_segments(0, rollout)
    counts = [one.num_targets for one in segments]
    known = trainer if trainer is not None and len(trainer) == sum(counts) else None
    ends = list(itertools.accumulate(counts, initial=0))
    parts = [None if known is None else known[start:end] for start, end in itertools.pairwise(ends)]
    agent = rollout.agent
    return {
        "segments": [_segment(one, own, write) for one, own in zip(segments, parts, strict=True)],
        "not_used": _not_used(rollout),
        "facts": {
            name: agent[name] for name in ("task", "status", "steps", "tries", "seconds") if name in agent
        },
        "log": str(agent.get("log") or "")[-_MOST_LOG:],
        "verifier_log": str(agent.get("verifier_log") or "")[-_MOST_LOG:],
    }


def _not_used(rollout: Rollout) -> dict[str, int]:
    reasons = [why_unused(rollout, call) for call in rollout.calls if call.completion_ids]
    unanswered = sum(not call.completion_ids for call in rollout.calls)
    return dict(Counter(one for one in reasons if one)) | ({"unanswered": unanswered} if unanswered else {})


def _segment(segment: Segment, trainer: list[float] | None, write: Writer) -> dict[str, Any]:
    spans = []
    place = seen = 0
    for is_target, run in itertools.groupby(segment.targets):
        size = len(list(run))
        ids = segment.ids[place : place + size]
        sampled = segment.logprobs[seen : seen + size] if is_target else None
        own = None if trainer is None or not is_target else trainer[seen : seen + size]
        spans.append(_span(ids, sampled, own, write))
        place += size
        seen += size if is_target else 0
    return {
        "history": segment.history,
        "parent": segment.parent,
        "num_calls": len(segment.calls),
        "num_tokens": len(segment.ids),
        "spans": spans,
    }


def _span(
    ids: list[int], sampled: list[float] | None, trainer: list[float] | None, write: Writer
) -> dict[str, Any]:
    """Return tokens that were given, of which the end is kept, or that were sampled, of which the beginning is."""
    tokens = write(ids)
    most = _MOST_GIVEN if sampled is None else _MOST_SAMPLED
    kept = slice(-most, None) if sampled is None else slice(most)
    return {
        "sampled": sampled is not None,
        "tokens": None if tokens is None else tokens[kept],
        "left_out": max(0, len(ids) - most),
        "logps": None if sampled is None or tokens is None else sampled[kept],
        "trainer": None if trainer is None or tokens is None else trainer[kept],
    }
