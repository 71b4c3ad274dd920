"""Rollouts -> segments: sequences of token ids of which the sampled ones, and no others, are trained.

Rule: each sampled token of a trained call is a target in exactly one segment, after exactly the tokens that it was sampled
after. A call whose prompt is the whole of a segment and more continues that segment (the same gradient, and what they
share is read once); one whose history was rewritten, compacted or branched begins another. What a rollout weighs does not
depend on how many segments it has: losses divide by its tokens, not by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from finetune.errors import FinetuneError
from finetune.records import Example
from finetune.rollout.ledger import CallRecord, Rollout, account


@dataclass
class Segment:
    """One causal sequence of a rollout.

    rollout: its place in the batch. targets: one a token, whether it was sampled here. logprobs: the sampler's, of the
    targets. calls: places in Rollout.calls, in order; history: why it is no continuation (see CallRecord.history);
    parent: the segment, by its place among those of the rollout, whose answer it goes on from.
    """

    rollout: int
    ids: list[int]
    targets: list[bool]
    logprobs: list[float]
    calls: list[int] = field(default_factory=list)
    history: str = "first"
    parent: int | None = None

    @property
    def num_targets(self) -> int:
        return len(self.logprobs)


def batch_segments(rollouts: Sequence[Rollout], merge: bool = True) -> list[Segment]:
    """Return the segments of all trained rollouts, those of one rollout together, in order.

    merge: continue segments where a call continues one exactly; otherwise each call is a segment of its own. Raises
    FinetuneError(bug) where the targets are not the tokens that the ledger counts as trained.
    """
    found: list[Segment] = []
    for place, rollout in enumerate(rollouts):
        if rollout.is_trained:
            found += rollout_segments(place, rollout, merge)
    num_agent = sum(one.num_targets for one in found if rollouts[one.rollout].calls)
    counted = account(rollouts).get("calls", {}).get("trained_tokens", 0)
    if num_agent != counted:
        raise FinetuneError(
            "bug", f"segments hold {num_agent} sampled tokens, the ledger counts {counted} as trained"
        )
    return found


def rollout_segments(place: int, rollout: Rollout, merge: bool = True) -> list[Segment]:
    """Return the segments of one rollout, whatever became of it."""
    return _of_agent(place, rollout, merge) if rollout.calls else _of_completion(place, rollout)


def _of_completion(place: int, rollout: Rollout) -> list[Segment]:
    if not rollout.completion_ids:
        return []
    return [_begun(place, rollout.prompt_ids, rollout.completion_ids, rollout.logprobs)]


def _begun(place: int, prompt: list[int], completion: list[int], logprobs: list[float]) -> Segment:
    targets = [False] * len(prompt) + [True] * len(completion)
    return Segment(place, prompt + completion, targets, list(logprobs))


def _of_agent(place: int, rollout: Rollout, merge: bool) -> list[Segment]:
    segments: list[Segment] = []
    holder: dict[int, int] = {}  # index of a call -> the segment that trains it
    number = {id(call): index for index, call in enumerate(rollout.calls)}
    for call in rollout.used_calls:
        before = None if call.parent is None else holder.get(call.parent)
        if merge and before is not None and _continues(call, segments[before]):
            at = before
            _extend(segments[at], call)
        else:
            at = len(segments)
            own = _begun(place, call.prompt_ids, call.completion_ids, call.logprobs)
            # What extends a call and still begins a segment has gone on from the same answer as another call before it.
            own.history = "branched" if merge and call.history == "extended" else call.history
            own.parent = before
            segments.append(own)
        segments[at].calls.append(number[id(call)])
        holder[call.index] = at
    return segments


def _extend(segment: Segment, call: CallRecord) -> None:
    added = call.prompt_ids[len(segment.ids) :]
    segment.ids += added + call.completion_ids
    segment.targets += [False] * len(added) + [True] * len(call.completion_ids)
    segment.logprobs += call.logprobs


def _continues(call: CallRecord, segment: Segment) -> bool:
    """Whether the prompt is the whole of the segment and more; by its ids, whatever the record says of itself."""
    return len(call.prompt_ids) > len(segment.ids) and call.prompt_ids[: len(segment.ids)] == segment.ids


def segment_examples(segments: Sequence[Segment], rollouts: Sequence[Rollout]) -> list[Example]:
    """Return each segment as an example whose targets are its sampled tokens."""
    return [
        Example(
            segment.ids,
            [float(is_target) for is_target in segment.targets],
            rollouts[segment.rollout].row,
            rollouts[segment.rollout].place,
            0,
        )
        for segment in segments
    ]


def tokens_per_rollout(segments: Sequence[Segment], num_rollouts: int) -> list[int]:
    """Return |o_i|: the sampled tokens of each rollout over all its segments; 0 for one that is not trained."""
    counts = [0] * num_rollouts
    for segment in segments:
        counts[segment.rollout] += segment.num_targets
    return counts
