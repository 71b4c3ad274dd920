"""Rollouts on disk: every sampled completion of a batch with its reward and what became of it, before training uses it.

Rule: sampled = trained + excluded (reason), for rollouts and for the model calls of agents. A file appears whole (fsync,
rename) and names the policy that sampled it, so a resumed run takes it up only where it would sample under the same weights.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from finetune.data.conversation import Message
from finetune.errors import FinetuneError
from finetune.records import to_json, write_atomically

ROLLOUTS = "rollouts"  # their folder in a run folder
POLL_S = 0.05
SCORED = "scored"
RETRIED, OTHER_VERSION = (
    "retried",
    "version",
)  # why a call is not trained, besides its own status and its rollout's
Purpose = Literal["policy", "helper"]
# While a rollout runs a call is PENDING, then ANSWERED; its end decides between used and unused.
PENDING, ANSWERED, USED, UNUSED, ABORTED, REFUSED = (
    "pending",
    "answered",
    "used",
    "unused",
    "aborted",
    "refused",
)


@dataclass
class CallRecord:
    """One model call of a rollout.

    index: its place in the order of arrival. attempt: from 1, of equal requests. digest: of messages and tools.
    sampling: temperature, max_new_tokens and seed as sampled; asked: parameters of the request that differ and were not
    followed. fitted: the tool outputs that were cut. parent: the call whose answer the messages go on from.
    history: how the prompt came about: "extended" (the ids of call `extends` and more), else rendered afresh: "first"
    (no answer in it), "rewritten" (it continues no earlier call), "tools" (other tools), "fitted" (the continuation was
    too long), "template" (which cannot be continued).
    status: used, unused, aborted (the client went away), refused, server, protocol.
    """

    rollout: str
    index: int
    purpose: Purpose
    attempt: int
    digest: str
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: str | None = None
    stopped: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    fitted: list[dict[str, Any]] = field(default_factory=list)
    history: str = "first"
    extends: int | None = None
    parent: int | None = None
    status: str = PENDING
    error: str | None = None
    answer: Message | None = None
    seconds: float = 0.0


@dataclass
class Rollout:
    """One sampled completion, or the work of an agent: then the model calls are in `calls` and the completion is empty.

    status: scored, or why it is not trained; logprobs are the sampler's, one a token. agent: how its work ended: status,
    exit_code, tries, seconds, log, verifier_log. truncated: cut by the limit of tokens, or of an agent's calls.
    """

    id: str
    group: int
    sample: int
    row: int  # of the prompt, in the order of the prepared rows
    place: str  # file:line of that row
    seed: int
    version: str  # of the weights that sampled it
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    truncated: bool = False
    status: str = SCORED
    reward: float | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    advantage: float = 0.0
    error: str | None = None
    calls: list[CallRecord] = field(default_factory=list)  # of all tries, in order
    agent: dict[str, Any] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        return self.status == SCORED and self.reward is not None

    @property
    def session(self) -> str:
        """The name of the try that counts, which its calls bear."""
        return session_name(self.id, self.agent.get("tries", 1))

    @property
    def used_calls(self) -> list[CallRecord]:
        """The calls that the agent's work consists of: the policy's own that it went on with."""
        return [call for call in self.calls if why_unused(self, call) is None]

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled for it, as far as the agent used them."""
        return len(self.completion_ids) + sum(len(call.completion_ids) for call in self.used_calls)

    @property
    def last_ids(self) -> list[int]:
        """The ids of the prompt and the completion, of an agent those of its last used call."""
        last = self.used_calls[-1] if self.used_calls else self
        return last.prompt_ids + last.completion_ids


def session_name(rollout: str, tries: int) -> str:
    return rollout if tries == 1 else f"{rollout}.try{tries}"


def why_unused(rollout: Rollout, call: CallRecord) -> str | None:
    """Return why a sampled call is no part of the rollout's work: helper, retried, unused, aborted, version; or None."""
    if call.purpose != "policy":
        return call.purpose
    if call.rollout != rollout.session:
        return RETRIED
    if call.status != USED:
        return call.status
    return None if call.version == rollout.version else OTHER_VERSION


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one batch: step is the first optimizer step that trains on them, version and digest the policy's.

    tokens: what each token of them writes, by its id as text (see data.tokens.token_texts), for readers without a tokenizer.
    served: what the engine says it sampled for them (rollout.served), in a file of its own.
    """

    step: int
    version: int
    digest: str
    rollouts: list[Rollout]
    facts: dict[str, Any] = field(default_factory=dict)  # phase times and counts
    tokens: dict[str, str | list[int]] = field(default_factory=dict)
    served: list[dict[str, Any]] = field(default_factory=list)


def account(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the ledger of a batch: completions sampled, trained and excluded by reason, and of agents the calls as well.

    unanswered: calls that sampled nothing (refused, or the engine failed). It always balances.
    """
    excluded = Counter(rollout.status for rollout in rollouts if not rollout.is_trained)
    found = _balanced(len(rollouts), sum(rollout.is_trained for rollout in rollouts), excluded)
    if not any(rollout.calls for rollout in rollouts):
        return found
    calls = [(rollout, call) for rollout in rollouts for call in rollout.calls]
    sampled = [(rollout, call) for rollout, call in calls if call.completion_ids]
    reasons = [why_excluded(rollout, call) for rollout, call in sampled]
    own = _balanced(len(sampled), reasons.count(None), Counter(reason for reason in reasons if reason))
    tokens = [
        len(call.completion_ids) for (_, call), reason in zip(sampled, reasons, strict=True) if not reason
    ]
    return found | {"calls": own | {"unanswered": len(calls) - len(sampled), "trained_tokens": sum(tokens)}}


def why_excluded(rollout: Rollout, call: CallRecord) -> str | None:
    """Return why a call that sampled something is not trained; None where it is."""
    if (reason := why_unused(rollout, call)) is not None:
        return reason
    return None if rollout.is_trained else f"rollout_{rollout.status}"


def _balanced(sampled: int, trained: int, excluded: Counter[str]) -> dict[str, Any]:
    if sampled != trained + sum(excluded.values()):
        raise FinetuneError(
            "bug", f"the ledger does not balance: {sampled} sampled, {trained} trained, {excluded}"
        )
    return {"sampled": sampled, "trained": trained, "excluded": dict(excluded)}


def _packed(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as it lies on disk: of a prompt that continues an earlier call only what was added."""
    packed = asdict(rollout)
    known: dict[tuple[str, int], CallRecord] = {}
    for call, own in zip(rollout.calls, packed["calls"], strict=True):
        known[call.rollout, call.index] = call
        if call.extends is not None:
            before = known[call.rollout, call.extends]
            length = len(before.prompt_ids) + len(before.completion_ids)
            assert call.prompt_ids[:length] == before.prompt_ids + before.completion_ids, (
                "it extends that call"
            )
            own["prompt_ids"] = call.prompt_ids[length:]
    return packed


def unpacked(packed: dict[str, Any]) -> Rollout:
    """Return the rollout of a line on disk."""
    known: dict[tuple[str, int], CallRecord] = {}
    calls = []
    for own in packed.get("calls", []):
        call = CallRecord(**own)
        if call.extends is not None:
            before = known[call.rollout, call.extends]
            call.prompt_ids = [*before.prompt_ids, *before.completion_ids, *call.prompt_ids]
        known[call.rollout, call.index] = call
        calls.append(call)
    return Rollout(**packed | {"calls": calls})


def read_batch(path: Path, digest: str | None = None) -> RolloutBatch | None:
    """Return the batch of a file; None where there is none, or none sampled by the policy of this digest.

    Raises FinetuneError(bad_rollouts) for a file that is not whole.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return None
    try:
        head = json.loads(lines[0])
        if digest is not None and head["digest"] != digest:
            return None
        rollouts = [unpacked(json.loads(line)) for line in lines[1:]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FinetuneError(
            "bad_rollouts", f"{path}: no rollouts of ours: {error}", file=str(path)
        ) from error
    if len(rollouts) != head.get("num_rollouts"):
        text = f"{path}: {len(rollouts)} rollouts where {head.get('num_rollouts')} belong"
        raise FinetuneError("bad_rollouts", text, file=str(path))
    known = (head["step"], head["version"], head["digest"], rollouts, head["facts"])
    return RolloutBatch(*known, tokens=head.get("tokens", {}))


def recorded(path: Path) -> list[Path]:
    """Return the recorded batches that a path names, in order: of a run folder, of its rollouts folder, or one file."""
    if path.is_file():
        return [path]
    inner = path / ROLLOUTS
    return sorted((inner if inner.is_dir() else path).glob("step-*.jsonl"))


class RolloutFiles:
    """The rollout files of a run folder, or of the folder that a replay reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def path(self, step: int, kind: str = "step") -> Path:
        return self.folder / f"{kind}-{step:06d}.jsonl"

    def write(self, batch: RolloutBatch, kind: str = "step") -> None:
        """Put a batch on the disk, whole and synced."""
        header = {name: value for name, value in vars(batch).items() if name not in ("rollouts", "served")}
        head = {
            "kind": kind,
            **header,
            "num_rollouts": len(batch.rollouts),
            "ledger": account(batch.rollouts),
        }
        lines = [to_json(head), *(to_json(_packed(rollout)) for rollout in batch.rollouts)]
        if batch.served:  # first: a batch that is there has what it is audited by
            write_atomically(
                self.path(batch.step, f"served-{kind}"),
                "".join(to_json(one) + "\n" for one in batch.served),
            )
        write_atomically(self.path(batch.step, kind), "".join(line + "\n" for line in lines))

    def read(self, step: int, digest: str | None = None, kind: str = "step") -> RolloutBatch | None:
        """Return the batch of a step, as read_batch does."""
        return read_batch(self.path(step, kind), digest)

    def write_trained(self, step: int, logprobs: dict[str, list[float]]) -> None:
        """Put the trainer's log-probs of a batch, as training on it began, beside the sampler's: by rollout, one a token."""
        head = {"kind": "trained", "step": step, "num_rollouts": len(logprobs)}
        lines = [to_json(head)]
        for name, values in logprobs.items():
            lines.append(to_json({"id": name, "logprobs": [round(one, 6) for one in values]}))
        write_atomically(self.path(step, "trained"), "".join(line + "\n" for line in lines))

    def wait(self, step: int, digest: str, beat: Callable[[], None], kind: str = "step") -> RolloutBatch:
        """Return the batch once it is there; whoever waits is ended from outside where it never comes."""
        last_beat = 0.0
        seen: tuple[int, int] | None = None
        while True:
            stamp = _stamp(self.path(step, kind))
            if stamp is not None and stamp != seen:
                seen = stamp
                if (batch := self.read(step, digest, kind)) is not None:
                    return batch
            if time.monotonic() - last_beat > 1.0:
                last_beat = time.monotonic()
                beat()
            time.sleep(POLL_S)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino
