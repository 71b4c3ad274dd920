"""Agents of every kind at once: whatever they do, each sampled call is trained or excluded with a reason, and read back so.

1,000 rollouts of random requests: conversations that go on, requests asked again, clients that leave, calls side by side,
compaction, sub-agents, helper calls, engines that fail, tries that are lost.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent.auditing import audit
from finetune.rollout.calls import CallLimits, ModelCall, RolloutCalls
from finetune.rollout.engine import Completion, Fault
from finetune.rollout.ledger import CallRecord, Rollout, RolloutBatch, RolloutFiles, account, session_name
from finetune.rollout.served import ids_digest, logprobs_digest
from finetune.rollout.transcript import Transcript
from finetune.train.segments import batch_segments
from tests.rollout.scripted import tiny_chat

ROLLOUTS, VERSION = 1000, "step-1"
LIMITS = CallLimits(4096, 16, 1.0)


class Agent:
    """A made-up agent: it keeps some conversations, and at each turn does something that agents do."""

    def __init__(self, name: str, transcript: Transcript, draw: random.Random) -> None:
        self.calls = RolloutCalls(name, 7, transcript, LIMITS)
        self.transcript, self.draw = transcript, draw
        self.conversations: list[list[dict[str, Any]]] = [self.task()]
        self.served: list[dict[str, Any]] = []
        self.open: list[tuple[ModelCall, list[dict[str, Any]]]] = []

    def task(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"task {self.draw.randrange(9)}"}]

    def turn(self) -> None:
        kind = self.draw.choice(
            ("go on", "go on", "again", "branch", "compact", "sub-agent", "helper", "finish")
        )
        messages = self.draw.choice(self.conversations)
        if kind == "branch":
            self.conversations.append(list(messages))
        elif kind == "compact":
            messages[:] = [*self.task(), {"role": "user", "content": "so far: much was done"}]
        elif kind == "sub-agent":
            self.conversations.append(self.task())
        elif kind == "finish" and self.open:
            self.answer(*self.open.pop(self.draw.randrange(len(self.open))))
            return
        call = self.calls.begin(list(messages), None, "helper" if kind == "helper" else "policy")
        self.open.append((call, messages))
        if kind == "again":  # the same request once more, before the first was answered or after
            self.open.append((self.calls.begin(list(messages), None, "policy"), messages))
        if self.draw.random() < 0.8:
            self.answer(*self.open.pop())

    def answer(self, call: ModelCall, messages: list[dict[str, Any]]) -> None:
        """Sample for a call, tell the agent or find it gone, and perhaps go on from the answer."""
        if self.draw.random() < 0.1:
            self.calls.sampled(call, Fault(self.draw.choice(("server", "protocol")), "it broke"))
            return
        ids = [self.draw.randrange(5, 300) for _ in range(self.draw.randint(1, 5))]
        outcome = Completion(ids, [-1.0] * len(ids), False, VERSION)
        self.served.append(
            {
                "seed": call.record.sampling["seed"],
                "version": VERSION,
                "prompt_sha256": ids_digest(call.record.prompt_ids),
                "completion_sha256": ids_digest(ids),
                "logprobs_sha256": logprobs_digest(outcome.logprobs),
            }
        )
        self.calls.sampled(call, outcome)
        if self.draw.random() < 0.15:
            self.calls.aborted(call, "the client left")
            return
        said = {"role": "assistant", "content": self.transcript.text_of(ids, stopped=False)}
        self.calls.answered(call, said)
        if self.draw.random() < 0.8:
            messages += [said, {"role": "user", "content": f"output {self.draw.randrange(99)}"}]


def worked(place: int, transcript: Transcript, draw: random.Random) -> tuple[Rollout, list[dict[str, Any]]]:
    """Return a rollout of one to three tries, and what the engine served for all of them."""
    name, tries = f"1-{place}-0", draw.choice((1, 1, 1, 2, 3))
    records: list[CallRecord] = []
    served: list[dict[str, Any]] = []
    for number in range(1, tries + 1):
        agent = Agent(session_name(name, number), transcript, draw)
        for _ in range(draw.randint(0, 7)):
            agent.turn()
        records += agent.calls.records()
        served += agent.served
    status = draw.choice(("scored", "scored", "scored", "timeout", "agent", "verifier"))
    reward = draw.random() if status == "scored" else None
    fields: dict[str, Any] = {"reward": reward, "status": status, "calls": records, "agent": {"tries": tries}}
    return Rollout(name, place, 0, 0, "t:1", place, VERSION, [], **fields), served


@pytest.mark.slow
def test_whatever_agents_do_every_sampled_call_is_trained_or_excluded(tmp_path: Path) -> None:
    transcript, draw = Transcript(tiny_chat()), random.Random(11)
    made = [worked(place, transcript, draw) for place in range(ROLLOUTS)]
    rollouts, served = [one for one, _ in made], [line for _, lines in made for line in lines]
    ledger = account(rollouts)["calls"]
    assert ledger["sampled"] == len(served) == ledger["trained"] + sum(ledger["excluded"].values())
    wanted = {
        "helper",
        "unused",
        "aborted",
        "retried",
        "rollout_timeout",
        "rollout_agent",
        "rollout_verifier",
    }
    assert wanted <= ledger["excluded"].keys(), "every kind of call came up"
    segments = batch_segments(rollouts)
    assert sum(one.num_targets for one in segments) == ledger["trained_tokens"]
    assert {"first", "rewritten", "branched"} <= {one.history for one in segments}
    assert Counter(len(one.calls) > 1 for one in segments)[True] > 100, "and many calls continue others"

    (tmp_path / "run").mkdir()
    RolloutFiles(tmp_path / "run" / "rollouts").write(RolloutBatch(1, 0, "d", rollouts, served=served))
    again = RolloutFiles(tmp_path / "run" / "rollouts").read(1)
    assert again is not None
    assert [vars(one) for one in again.rollouts] == [vars(one) for one in rollouts]
    answer = audit(tmp_path / "run")
    assert answer.errors == [], [str(error) for error in answer.errors]
    assert (answer.data["matched"], answer.data["trained"]) == (len(served), ledger["trained"])
