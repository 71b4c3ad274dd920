"""Segments by hand: which calls continue which, what is a target, and that what the ledger counts is what is trained."""

from __future__ import annotations

import random
from typing import Any

import pytest

from finetune.errors import FinetuneError
from finetune.rollout.ledger import CallRecord, Rollout, account
from finetune.train import segments as module
from finetune.train.segments import Segment, batch_segments, segment_examples, tokens_per_rollout


def call(index: int, prompt: list[int], completion: list[int], **about: Any) -> CallRecord:
    fields = {"purpose": "policy", "attempt": 1, "digest": str(index), "status": "used", "version": "v"}
    return CallRecord(
        "r", index, prompt_ids=prompt, completion_ids=completion,
        logprobs=[-0.1 * token for token in completion], **fields | about,
    )  # fmt: skip


def rollout(calls: list[CallRecord], **about: Any) -> Rollout:
    fields = {"status": "scored", "reward": 1.0, "calls": calls, "agent": {"tries": 1}}
    return Rollout("r", 0, 0, 5, "p:1", 0, "v", [], **fields | about)


def shape(segment: Segment) -> tuple[list[int], list[int], list[int]]:
    """Return ids, places of the targets, and calls."""
    return segment.ids, [place for place, is_target in enumerate(segment.targets) if is_target], segment.calls


def test_a_call_that_continues_another_exactly_is_one_segment_with_it():
    first = call(0, [1, 2], [3, 4])
    second = call(1, [1, 2, 3, 4, 5, 6], [7], parent=0, extends=0, history="extended")
    (one,) = batch_segments([rollout([first, second])])
    assert shape(one) == ([1, 2, 3, 4, 5, 6, 7], [2, 3, 6], [0, 1])
    assert one.logprobs == pytest.approx([-0.3, -0.4, -0.7])
    assert (one.history, one.parent, one.rollout) == ("first", None, 0)


def test_unmerged_each_call_is_a_segment_with_its_own_completion_alone_as_targets():
    first = call(0, [1, 2], [3, 4])
    second = call(1, [1, 2, 3, 4, 5], [7], parent=0, extends=0, history="extended")
    found = batch_segments([rollout([first, second])], merge=False)
    assert [shape(one) for one in found] == [([1, 2, 3, 4], [2, 3], [0]), ([1, 2, 3, 4, 5, 7], [5], [1])]


def test_a_rewritten_history_begins_a_segment_that_knows_where_it_comes_from():
    first = call(0, [1, 2], [3, 4])
    rewritten = call(1, [1, 9, 5], [7], parent=0, history="template")
    after = call(2, [1, 9, 5, 7, 8], [6], parent=1, extends=1, history="extended")
    one, two = batch_segments([rollout([first, rewritten, after])])
    assert shape(two) == ([1, 9, 5, 7, 8, 6], [3, 5], [1, 2])
    assert (one.parent, two.parent, two.history) == (None, 0, "template")


def test_of_two_calls_that_go_on_from_one_answer_the_second_branches_off():
    first = call(0, [1], [2])
    left = call(1, [1, 2, 3], [4], parent=0, extends=0, history="extended")
    right = call(2, [1, 2, 5], [6], parent=0, extends=0, history="extended")
    one, two = batch_segments([rollout([first, left, right])])
    assert shape(one) == ([1, 2, 3, 4], [1, 3], [0, 1])
    assert shape(two) == ([1, 2, 5, 6], [3], [2]), "the first answer is trained once"
    assert (two.history, two.parent) == ("branched", 0)


def test_what_a_record_says_of_itself_is_not_believed_without_the_ids():
    first = call(0, [1, 2], [3])
    liar = call(1, [1, 2, 4, 5], [6], parent=0, extends=0, history="extended")
    assert len(batch_segments([rollout([first, liar])])) == 2


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"purpose": "helper"}, "helper"),
        ({"status": "unused"}, "unused"),
        ({"status": "aborted"}, "aborted"),
        ({"version": "older"}, "version"),
        ({"rollout": "r.try0"}, "retried"),
    ],
)
def test_what_is_no_part_of_the_work_is_excluded_with_its_reason(about: dict[str, Any], reason: str):
    kept, other = call(0, [1], [2, 3]), call(1, [4], [5])
    for name, value in about.items():
        setattr(other, name, value)
    work = [rollout([kept, other])]
    assert [shape(one) for one in batch_segments(work)] == [([1, 2, 3], [1, 2], [0])]
    assert account(work) == {
        "sampled": 1,
        "trained": 1,
        "excluded": {},
        "calls": {
            "sampled": 2,
            "trained": 1,
            "excluded": {reason: 1},
            "unanswered": 0,
            "trained_tokens": 2,
        },
    }


def test_of_several_tries_the_last_alone_is_trained():
    lost, kept = call(0, [1], [2]), call(0, [1], [9, 9])
    kept.rollout = "r.try2"
    work = [rollout([lost, kept], agent={"tries": 2})]
    assert [shape(one) for one in batch_segments(work)] == [([1, 9, 9], [1, 2], [1])]
    assert account(work)["calls"]["excluded"] == {"retried": 1}


def test_a_lost_rollout_trains_nothing_and_its_calls_say_why():
    work = [rollout([call(0, [1], [2])], status="timeout", reward=None)]
    assert batch_segments(work) == []
    found = account(work)
    assert (found["trained"], found["excluded"]) == (0, {"timeout": 1})
    assert found["calls"]["excluded"] == {"rollout_timeout": 1}


def test_a_completion_is_one_segment_and_examples_weigh_its_tokens_alone():
    plain = Rollout("a", 0, 0, 3, "p:4", 0, "v", [1, 2], [3, 4], [-1.0, -2.0], reward=0.0)
    worked = rollout([call(0, [1], [2]), call(1, [7], [8, 9], parent=None)])
    found = batch_segments([plain, worked])
    assert [one.rollout for one in found] == [0, 1, 1]
    assert tokens_per_rollout(found, 3) == [2, 3, 0]
    example = segment_examples(found, [plain, worked])[0]
    assert (example.input_ids, example.weights, example.row) == ([1, 2, 3, 4], [0, 0, 1, 1], 3)


def test_segments_that_lose_a_token_are_refused(monkeypatch: pytest.MonkeyPatch):
    real = module._begun
    monkeypatch.setattr(module, "_begun", lambda *parts: real(*parts[:2], parts[2][:-1], parts[3][:-1]))
    with pytest.raises(FinetuneError, match="the ledger counts 2 as trained"):
        batch_segments([rollout([call(0, [1], [2, 3])])])


def test_every_sampled_token_is_a_target_once_after_what_it_was_sampled_after():
    draw = random.Random(0)
    for _ in range(300):
        calls = random_calls(draw)
        for merge in (True, False):
            found = batch_segments([rollout(calls)], merge)
            trained = sorted(
                (tuple(one.ids[:place]), one.ids[place])
                for one in found
                for place, is_target in enumerate(one.targets)
                if is_target
            )
            sampled = sorted(
                (tuple(one.prompt_ids + one.completion_ids[:place]), token)
                for one in calls
                for place, token in enumerate(one.completion_ids)
            )
            assert trained == sampled


def random_calls(draw: random.Random) -> list[CallRecord]:
    """Return a tree of calls: each continues an earlier one exactly, rewrites it, or begins anew."""
    calls: list[CallRecord] = []
    for index in range(draw.randint(1, 8)):
        parent = draw.choice([None, *calls]) if calls else None
        added = [draw.randrange(50) for _ in range(draw.randint(1, 4))]
        kind = draw.choice(("extended", "rewritten")) if parent else "first"
        before = parent.prompt_ids + parent.completion_ids if parent and kind == "extended" else []
        about = {"parent": parent and parent.index, "history": kind}
        if kind == "extended" and parent:
            about["extends"] = parent.index
        completion = [draw.randrange(50) for _ in range(draw.randint(1, 4))]
        calls.append(call(index, before + added, completion, **about))
    return calls
