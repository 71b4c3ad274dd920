"""Rollouts on disk: every sampled completion of a batch with its reward and what became of it, before training uses it.

Rule: sampled = trained + excluded (reason). A file appears whole (fsync, rename) and names the policy that sampled it,
so a resumed run takes it up again only where it would sample under the very same weights.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.records import to_json, write_atomically

ROLLOUTS = "rollouts"  # their folder in a run folder
POLL_S = 0.05
SCORED = "scored"


@dataclass
class Rollout:
    """One sampled completion. status: scored, or why it is not trained; logprobs are the sampler's, one a token."""

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
    truncated: bool = False  # cut by the limit
    status: str = SCORED
    reward: float | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    advantage: float = 0.0
    error: str | None = None

    @property
    def is_trained(self) -> bool:
        return self.status == SCORED and self.reward is not None


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one batch: step is the first optimizer step that trains on them, version and digest the policy's.

    tokens: what each token of them writes, by its id as text (see data.tokens.token_texts), for readers without a tokenizer.
    """

    step: int
    version: int
    digest: str
    rollouts: list[Rollout]
    facts: dict[str, Any] = field(default_factory=dict)  # phase times and counts
    tokens: dict[str, str | list[int]] = field(default_factory=dict)


def account(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the ledger of a batch: completions sampled, trained and excluded by reason; it always balances."""
    excluded = Counter(rollout.status for rollout in rollouts if not rollout.is_trained)
    trained = sum(rollout.is_trained for rollout in rollouts)
    assert len(rollouts) == trained + sum(excluded.values()), (
        "a rollout is in none or in two columns of the ledger"
    )
    return {"sampled": len(rollouts), "trained": trained, "excluded": dict(excluded)}


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
        rollouts = [Rollout(**json.loads(line)) for line in lines[1:]]
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
        header = {name: value for name, value in vars(batch).items() if name != "rollouts"}
        head = {
            "kind": kind,
            **header,
            "num_rollouts": len(batch.rollouts),
            "ledger": account(batch.rollouts),
        }
        lines = [to_json(head), *(to_json(asdict(rollout)) for rollout in batch.rollouts)]
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
