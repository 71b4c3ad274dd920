"""Batches of agents' rollouts made by hand, whose calls grow one conversation each, for replays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from finetune.rollout.ledger import CallRecord, Rollout, RolloutBatch, RolloutFiles
from tests.train.runs import VOCABULARY


def conversation(
    name: str,
    draw: random.Random,
    num_calls: int,
    tokens: tuple[int, int] = (2, 6),
    opening: Sequence[int] = (),
) -> list[CallRecord]:
    """Return calls that each continue the one before exactly, of random ids; opening: with which the first prompt begins."""
    calls: list[CallRecord] = []
    for index in range(num_calls):
        before = calls[-1].prompt_ids + calls[-1].completion_ids if calls else list(opening)
        added = draw.randint(*tokens) if calls or not opening else 0  # all of a group are asked the same
        prompt = before + [draw.randrange(5, VOCABULARY) for _ in range(added)]
        completion = [draw.randrange(5, VOCABULARY) for _ in range(draw.randint(*tokens))]
        calls.append(
            CallRecord(
                name, index, "policy", 1, f"{name}-{index}", prompt, completion,
                [-draw.uniform(4.0, 6.0) for _ in completion], "base", True, {"seed": index},
                history="extended" if calls else "first",
                extends=index - 1 if calls else None, parent=index - 1 if calls else None, status="used",
            )
        )  # fmt: skip
    return calls


def torn(calls: list[CallRecord], at: set[int]) -> list[CallRecord]:
    """Return the same calls, of which those at these places say nothing of what they continue: segments of their own."""
    return [
        CallRecord(**vars(one) | ({"history": "rewritten", "extends": None, "parent": None} if place in at else {}))
        for place, one in enumerate(calls)
    ]  # fmt: skip


def agent_rollout(
    name: str, group: int, sample: int, reward: float | None, calls: list[CallRecord]
) -> Rollout:
    return Rollout(
        name, group, sample, 0, "task.md:1", sample, "base", [], reward=reward,
        status="scored" if reward is not None else "agent", calls=calls, agent={"tries": 1, "status": "finished"},
    )  # fmt: skip


def write_batches(folder: Path, rollouts: list[Rollout], steps: int) -> Path:
    """Write the same rollouts as the batches of the first steps, where a replay finds them."""
    for step in range(1, steps + 1):
        RolloutFiles(folder / "rollouts").write(RolloutBatch(step, 0, "made", rollouts))
    return folder
