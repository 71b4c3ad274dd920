"""The model calls of one rollout: what each was given and sampled, which went on from which, and which one was used.

Rule: every call that was begun has a record, and of several attempts at one request only that is used whose answer the
agent went on with.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune.data.conversation import Message, Tools
from finetune.errors import FinetuneError
from finetune.rollout.engine import Call, Completion, Fault, Sampling
from finetune.rollout.fitting import fit_messages
from finetune.rollout.ledger import (
    ABORTED,
    ANSWERED,
    PENDING,
    REFUSED,
    UNUSED,
    USED,
    CallRecord,
    Purpose,
)
from finetune.rollout.transcript import Transcript


@dataclass(frozen=True)
class CallLimits:
    """What each call of a plan may use. headroom: tokens that fitting leaves free for turns to come.

    least_new_tokens: a conversation that cannot be cut enough for max_new_tokens is still answered with so many.
    """

    context: int
    max_new_tokens: int
    temperature: float
    headroom: int = 0
    least_new_tokens: int = 16


@dataclass(eq=False)
class ModelCall:
    """A call on its way: the record that it fills, and what it answers."""

    record: CallRecord
    messages: list[Message]
    tools: Tools | None
    began: float
    sampling: Sampling | None = None
    has_successor: bool = False  # a later request holds its answer
    is_dropped: bool = False  # nothing is sampled for it: its client left before, or the engine failed

    @property
    def call(self) -> Call:
        return Call(self.record.prompt_ids, self.record.sampling["seed"])


class UsedUp(Exception):
    """The rollout has no policy call left."""


class RolloutCalls:
    """All calls of one rollout; any thread may call. max_calls: policy calls that are sampled, whoever waits for them."""

    def __init__(
        self,
        rollout: str,
        seed: int,
        transcript: Transcript,
        limits: CallLimits,
        max_calls: int | None = None,
    ) -> None:
        self._rollout, self._seed, self._transcript, self._limits = rollout, seed, transcript, limits
        self._max_calls = max_calls
        self._calls: list[ModelCall] = []
        # Never held while a conversation is tokenised: the bridge's loop waits for it.
        self._lock = threading.Lock()

    def begin(self, messages: list[Message], tools: Tools | None, purpose: Purpose) -> ModelCall:
        """Enter a request and return its call, with the prompt that it is to be answered for.

        Raises UsedUp, and there is no call; FinetuneError, and the call is refused: too_long where even cut tool outputs
        leave no room, and what the template raises.
        """
        began = time.monotonic()
        digest = hashlib.sha256(_canonical([messages, tools]).encode()).hexdigest()
        with self._lock:
            if purpose == "policy" and self._max_calls is not None and self._num_spent() >= self._max_calls:
                raise UsedUp
            call = self._entered(messages, tools, purpose, digest, began)
        try:
            self._set_prompt(call)
        except FinetuneError as error:
            with self._lock:
                call.record.status, call.record.error = REFUSED, f"{error.code}: {error.message}"[:2000]
            raise
        return call

    def _num_spent(self) -> int:
        """Return how many policy calls have been sampled or will be, also for clients that have left."""
        spent = (PENDING, ANSWERED, ABORTED)
        return sum(
            call.record.purpose == "policy" and call.record.status in spent and not call.is_dropped
            for call in self._calls
        )

    def _entered(
        self, messages: list[Message], tools: Tools | None, purpose: Purpose, digest: str, began: float
    ) -> ModelCall:
        same = [one for one in self._calls if (one.record.digest, one.record.purpose) == (digest, purpose)]
        record = CallRecord(self._rollout, len(self._calls), purpose, len(same) + 1, digest)
        parent = self._parent(messages, purpose)
        if parent is not None:
            parent.has_successor, record.parent = True, parent.record.index
        call = ModelCall(record, messages, tools, began)
        self._calls.append(call)
        return call

    def _parent(self, messages: list[Message], purpose: Purpose) -> ModelCall | None:
        """Return the answered call whose messages and answer are the longest beginning of `messages`; of equals the last."""
        found: ModelCall | None = None
        for call in self._calls:
            length, answer = len(call.messages), call.record.answer
            if answer is None or call.record.purpose != purpose or length >= len(messages):
                continue
            if messages[:length] != call.messages or not _is_same_answer(messages[length], answer):
                continue
            if found is None or length >= len(found.messages):
                found = call
        return found

    def _set_prompt(self, call: ModelCall) -> None:
        record, limits = call.record, self._limits
        most = limits.context - limits.max_new_tokens
        longer = self._continued(call)
        if longer is not None and len(longer) <= most:
            record.prompt_ids, record.history, record.extends = longer, "extended", record.parent
        else:
            fitted = fit_messages(
                call.messages,
                lambda messages: len(self._transcript.prompt_ids(messages, call.tools)),
                most,
                limits.headroom,
            )
            if (
                longer is not None
                and not fitted.cuts
                and len(longer) + limits.least_new_tokens <= limits.context
            ):
                record.prompt_ids, record.history, record.extends = longer, "extended", record.parent
            else:
                record.prompt_ids = self._transcript.prompt_ids(fitted.messages, call.tools)
                record.fitted = fitted.cuts
        room = min(limits.max_new_tokens, limits.context - len(record.prompt_ids))
        if room < min(limits.least_new_tokens, limits.max_new_tokens):
            text = f"the conversation has {len(record.prompt_ids)} tokens, in a context of {limits.context}"
            raise FinetuneError("too_long", text)
        call.sampling = Sampling(room, self._transcript.stop_ids, limits.temperature)
        seed = _number([self._seed, record.purpose, record.digest, record.attempt])
        record.sampling = {"temperature": limits.temperature, "max_new_tokens": room, "seed": seed}

    def _continued(self, call: ModelCall) -> list[int] | None:
        """Return the ids that continue an earlier call exactly; else None, and the record says why."""
        record = call.record
        if record.parent is None:
            is_new = all(message["role"] != "assistant" for message in call.messages)
            record.history = "first" if is_new else "rewritten"
            return None
        parent = self._calls[record.parent]
        if parent.tools != call.tools:
            record.history = "tools"
            return None
        before = parent.record
        assert before.answer is not None, "a parent has been answered"
        length = len(parent.messages)
        ids = self._transcript.continued_ids(
            parent.messages,
            before.answer,
            call.messages[length + 1 :],
            call.tools,
            before.prompt_ids + before.completion_ids,
            before.stopped,
        )
        record.history = "template" if ids is None else "fitted"
        return ids

    # How a call ends

    def sampled(self, call: ModelCall, outcome: Completion | Fault) -> None:
        """Put into the record what the engine returned."""
        record = call.record
        with self._lock:
            record.seconds = time.monotonic() - call.began
            if isinstance(outcome, Fault):
                if record.status == PENDING:
                    record.status = outcome.kind
                record.error = record.error or outcome.text
                call.is_dropped = True
                return
            record.completion_ids, record.logprobs = list(outcome.ids), list(outcome.logprobs)
            record.version, record.stopped = outcome.version, outcome.stopped

    def answered(self, call: ModelCall, answer: Message) -> None:
        """Say what the agent is told, before it is told: its next request may come at once."""
        with self._lock:
            call.record.answer, call.record.status = answer, ANSWERED

    def aborted(self, call: ModelCall, why: str) -> None:
        """Say that the client went away before it had the whole answer."""
        with self._lock:
            call.record.status, call.record.error = ABORTED, why

    def dropped(self, call: ModelCall) -> None:
        """Say that nothing is sampled for it: its client left while it waited."""
        with self._lock:
            call.is_dropped = True

    def records(self) -> list[CallRecord]:
        """Return the records in order of arrival, each with its final status. The rollout has ended."""
        with self._lock:
            attempts: dict[tuple[str, str], list[ModelCall]] = {}
            for call in self._calls:
                if call.record.status == ANSWERED or (call.record.status == ABORTED and call.has_successor):
                    attempts.setdefault((call.record.digest, call.record.purpose), []).append(call)
                elif call.record.status == PENDING:
                    call.record.status, call.record.error = ABORTED, "the rollout ended before the answer"
            for answered in attempts.values():
                # Where the agent went on with no answer to this request, it was the last one that mattered.
                gone_on_with = [call for call in answered if call.has_successor] or answered[-1:]
                for call in answered:
                    call.record.status = USED if call in gone_on_with else UNUSED
            return [replace(call.record) for call in self._calls]

    def counts(self) -> dict[str, int]:
        """Return how many policy calls there are of each status so far."""
        found: dict[str, int] = {}
        with self._lock:
            for call in self._calls:
                if call.record.purpose == "policy":
                    found[call.record.status] = found.get(call.record.status, 0) + 1
        return found

    def last_policy_call(self) -> CallRecord | None:
        with self._lock:
            own = [call.record for call in self._calls if call.record.purpose == "policy"]
        return own[-1] if own else None


def call_id(record: CallRecord, place: int) -> str:
    """Return the id of a tool call: the same whenever the same rollout comes to the same point."""
    return f"call_{_number([record.rollout, record.digest, record.attempt, place]):010x}"


def _is_same_answer(told: Message, answer: Message) -> bool:
    """Whether a message of the agent is an answer of ours. Space around the text may be lost, and the ids of tool calls."""
    if told["role"] != "assistant" or told["content"].strip() != answer["content"].strip():
        return False
    theirs, ours = told.get("tool_calls") or [], answer.get("tool_calls") or []
    return len(theirs) == len(ours) and all(map(_is_same_call, theirs, ours))


def _is_same_call(theirs: Message, ours: Message) -> bool:
    is_same_id = theirs.get("id") in (None, ours.get("id"))
    return is_same_id and _canonical(theirs["function"]) == _canonical(ours["function"])


def _canonical(value: Any) -> str:
    """Return JSON that is equal for equal values: keys in order, and 1.0 as 1, which JavaScript makes of it."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(parts: Sequence[Any]) -> int:
    """Return 40 bits that are a function of the parts."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:5], "big")
