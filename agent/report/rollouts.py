"""Rollouts for a report: whole steps within a limit of bytes, every token with its text, log-probs and ratio.

Rule: what is left out is said. A completion that holds a secret is shown masked and as one piece, for its tokens would spell it.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.environment import scrub_text
from agent.report.conversations import work_of

MOST_BYTES = 6_000_000  # of all rollouts in a report
_LARGEST_SHARE = (
    6  # one step takes at most this part of it, so that the last step is in a report whose first is long
)
_MOST_STEPS = 60
_MOST_BYTES_READ = 400_000_000
_HEAD, _TAIL = 1500, 500  # tokens of a long completion that are kept
_MOST_PROMPT = 1500  # tokens of a prompt, its end
_MOST_TEXT = 6000  # characters
_MOST_EXAMPLES = 12  # of each kind


@dataclass
class Batch:
    """A file of rollouts: its head, and its lines as objects. num_unreadable: lines that are none."""

    head: dict[str, Any]
    rollouts: list[dict[str, Any]]
    num_unreadable: int = 0


def read_batch(path: Path) -> Batch | None:
    """Return what a file of finetune.rollout.ledger holds, None where it is not there or has no head."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return None
    found = []
    for line in lines:
        value = None
        with contextlib.suppress(ValueError):
            value = json.loads(line)
        found.append(value if isinstance(value, dict) else None)
    if not found or found[0] is None:
        return None
    rollouts = [item for item in found[1:] if item is not None]
    return Batch(found[0], rollouts, len(found) - 1 - len(rollouts))


def spread(count: int) -> list[int]:
    """Return 0..count-1 in an order of which every beginning is spread out: first, last, middle, quarters, ..."""
    order = list(range(count))[:1] + list(range(count))[1:][-1:]
    queue = deque([(0, count - 1)])
    while queue:
        low, high = queue.popleft()
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            queue += [(low, middle), (middle, high)]
    return order


def rollouts_of(folder: Path, secrets: Sequence[str], most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the steps that a report shows, and in words what it leaves out. folder: rollouts/ of a run."""
    paths = sorted(folder.glob("step-*.jsonl"))
    room, read = most_bytes, 0
    steps: list[dict[str, Any]] = []
    left_out: list[str] = []
    for place in spread(len(paths))[:_MOST_STEPS]:
        read += paths[place].stat().st_size
        share = min(room, max(most_bytes // _LARGEST_SHARE, 1))
        if read > _MOST_BYTES_READ or (steps and room < most_bytes // 50):
            break
        step = _step(paths[place], secrets, share)
        if step is not None:
            room -= len(json.dumps(step))
            steps.append(step)
    steps.sort(key=lambda step: int(step["step"]))
    if len(steps) < len(paths):
        left_out.append(f"{len(paths) - len(steps)} of {len(paths)} steps are not in this file")
    for step in steps:
        left_out += [f"step {step['step']}: {what}" for what in step.pop("left_out")]
    return {"steps": steps, "num_steps": len(paths), "left_out": left_out, "folder": str(folder)}


def _step(path: Path, secrets: Sequence[str], most_bytes: int) -> dict[str, Any] | None:
    """Return one step with as many whole groups, from the first, as `most_bytes` have room for."""
    batch = read_batch(path)
    if batch is None:
        return None
    trained = read_batch(path.with_name(path.name.replace("step-", "trained-", 1)))
    logps = {item.get("id"): item.get("logprobs") for item in trained.rollouts} if trained else {}
    shown = _Shown(batch.head.get("tokens") or {}, secrets)
    left_out = [f"{batch.num_unreadable} lines are no JSON"] if batch.num_unreadable else []
    groups: dict[Any, list[dict[str, Any]]] = {}
    for item in batch.rollouts:
        groups.setdefault(item.get("group"), []).append(item)
    rollouts: list[dict[str, Any]] = []
    room, num_cut = most_bytes, 0
    for number, members in enumerate(groups.values()):
        made = [shown.rollout(item, logps.get(item.get("id"))) for item in members]
        room -= len(json.dumps(made)) + shown.grown()
        if room < 0 and rollouts:
            left_out.append(f"{len(groups) - number} of {len(groups)} groups have no room")
            break
        rollouts += made
        num_cut += sum(bool(one["cut"]) for one in made)
    if num_cut:
        left_out.append(f"of {num_cut} completions the middle is cut out")
    head = batch.head
    return {
        "step": head.get("step", 0),
        "version": head.get("version"),
        "digest": str(head.get("digest", ""))[:12],
        "ledger": head.get("ledger") or {},
        "texts": shown.texts,
        "prompts": shown.prompts,
        "rollouts": rollouts,
        "left_out": left_out,
    }


@dataclass
class _Shown:
    """The rollouts of a step as they are shown. texts: each [id, text] once; a token is the place of its text there."""

    tokens: dict[str, Any]
    secrets: Sequence[str]
    texts: list[list[Any]] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    _places: dict[tuple[int, str], int] = field(default_factory=dict)
    _prompt_of: dict[tuple[int, ...], int] = field(default_factory=dict)
    _size: int = 0

    def rollout(self, item: dict[str, Any], trainer: Any) -> dict[str, Any]:
        ids = [one for one in item.get("completion_ids") or [] if isinstance(one, int)]
        sampled = _numbers(item.get("logprobs"), len(ids))
        ratios = _ratios(_numbers(trainer, len(ids)), sampled)
        kept = [*range(_HEAD), *range(len(ids) - _TAIL, len(ids))] if len(ids) > _HEAD + _TAIL else None
        written = self.written(ids, kept)
        work = None
        if item.get("calls"):
            work = self._work(item, trainer)
            ids, ratios = _sampled_ids(item), work.pop("ratios")
        return {
            "work": work,
            "id": item.get("id"),
            "group": item.get("group"),
            "sample": item.get("sample"),
            "place": item.get("place"),
            "seed": item.get("seed"),
            "version": item.get("version"),
            "status": item.get("status"),
            "reward": item.get("reward"),
            "parts": item.get("parts") or {},
            "advantage": item.get("advantage") or 0.0,
            "error": item.get("error"),
            "truncated": bool(item.get("truncated")),
            "num_tokens": len(ids),
            "prompt": self._prompt(item.get("prompt_ids") or []),
            "tokens": written,
            "logps": None if written is None else _picked(sampled, kept, 3),
            "ratios": None if written is None else _picked(ratios, kept, 4),
            "mean_ratio_distance": _mean_distance(ratios),
            "cut": [_HEAD, len(ids) - _HEAD - _TAIL] if kept else None,
            "text": _short(item.get("text"), self.secrets) if written is None else None,
            "is_masked": written is None and bool(self.tokens),
        }

    def _work(self, item: dict[str, Any], trainer: Any) -> dict[str, Any]:
        """Return the work of an agent, its logs masked, with the ratios of all its tokens and of each part's."""
        known = trainer if isinstance(trainer, list) else None
        work = work_of(item, known, lambda ids: self.written(ids, None))
        every: list[float] = []
        for span in (span for segment in work["segments"] for span in segment["spans"]):
            own = _ratios(span.pop("trainer"), span["logps"])
            every += own or []
            span["ratios"] = _picked(own, None, 4)
            span["logps"] = _picked(span["logps"], None, 3)
        for name in ("log", "verifier_log"):
            work[name] = scrub_text(work[name], list(self.secrets))
        return work | {"ratios": every or None}

    def _prompt(self, ids: list[Any]) -> int:
        key = tuple(one for one in ids if isinstance(one, int))
        if key not in self._prompt_of:
            kept = range(len(key) - _MOST_PROMPT, len(key)) if len(key) > _MOST_PROMPT else None
            self._prompt_of[key] = len(self.prompts)
            left_out = len(key) - _MOST_PROMPT if kept else 0
            self.prompts.append(
                {"tokens": self.written(key, kept), "num_tokens": len(key), "left_out": left_out}
            )
            self._size += 6 * min(len(key), _MOST_PROMPT)
        return self._prompt_of[key]

    def written(self, ids: Sequence[int], kept: Iterable[int] | None) -> list[int] | None:
        """Return the tokens by the places of their texts; None where texts are not known or spell a secret."""
        if not self.tokens and ids:
            return None
        parts = pieces(ids, self.tokens)
        joined = "".join(parts)
        if scrub_text(joined, list(self.secrets)) != joined:
            return None  # shown as masked text instead
        chosen = range(len(ids)) if kept is None else kept
        return [self._place(ids[place], parts[place]) for place in chosen]

    def _place(self, one: int, text: str) -> int:
        if (one, text) not in self._places:
            self._places[one, text] = len(self.texts)
            self.texts.append([one, text])
            self._size += len(text) + 12
        return self._places[one, text]

    def grown(self) -> int:
        """Return the bytes that texts and prompts have gained since the last look."""
        size, self._size = self._size, 0
        return size


def _sampled_ids(item: dict[str, Any]) -> list[int]:
    return [one for call in item["calls"] for one in call.get("completion_ids") or []]


def pieces(ids: Sequence[int], tokens: dict[str, Any]) -> list[str]:
    """Return what each token writes; a character that several tokens share stands at the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = []
    for one in ids:
        value = tokens.get(str(one), f"\u27e8{one}\u27e9")
        is_part = isinstance(value, list)
        written = bytes(value) if is_part else str(value).encode("utf-8", "replace")
        found.append(decoder.decode(written))
    if found:
        found[-1] += decoder.decode(b"", final=True)
    return found


def _short(text: Any, secrets: Sequence[str]) -> str:
    """Return the beginning of a text; masked before it is cut, for half a secret is not found any more."""
    return scrub_text(str(text or ""), list(secrets))[:_MOST_TEXT]


def _numbers(values: Any, count: int) -> list[float] | None:
    """Return one finite number a token, None where they are not known for all of them."""
    if not isinstance(values, list) or len(values) != count or not count:
        return None
    return [
        value if isinstance(value, int | float) and math.isfinite(value) else math.nan for value in values
    ]


def _ratios(trainer: list[float] | None, sampled: list[float] | None) -> list[float] | None:
    """Return exp(trainer's log-prob - sampler's) of each token."""
    if trainer is None or sampled is None:
        return None
    return [math.exp(min(20.0, max(-20.0, t - s))) for t, s in zip(trainer, sampled, strict=True)]


def _picked(values: list[float] | None, kept: Iterable[int] | None, digits: int) -> list[float | None] | None:
    if values is None:
        return None
    chosen = values if kept is None else [values[place] for place in kept]
    return [round(value, digits) if math.isfinite(value) else None for value in chosen]


def _mean_distance(ratios: list[float] | None) -> float | None:
    """Return the mean of |log ratio|, which orders rollouts by how far sampler and trainer are apart."""
    known = [abs(math.log(ratio)) for ratio in ratios or () if ratio > 0 and math.isfinite(ratio)]
    return round(math.fsum(known) / len(known), 5) if known else None


def examples_of(folder: Path, secrets: Sequence[str]) -> dict[str, Any] | None:
    """Return held-out rows answered greedily by the first and by the last policy that was measured: better, worse, equal."""
    paths = sorted(folder.glob("eval-*.jsonl"))
    first, last = (read_batch(paths[0]), read_batch(paths[-1])) if paths else (None, None)
    if first is None or last is None:
        return None
    after = {item.get("row"): item for item in last.rollouts if item.get("sample") == 0}
    kinds: dict[str, list[dict[str, Any]]] = {"better": [], "worse": [], "equal": []}
    counts = dict.fromkeys([*kinds, "unscored"], 0)
    for item in first.rollouts:
        other = after.get(item.get("row"))
        if item.get("sample") != 0 or other is None:
            continue
        kind = _compared(item.get("reward"), other.get("reward"))
        counts[kind] += 1
        if kind in kinds and len(kinds[kind]) < _MOST_EXAMPLES:
            kinds[kind].append(_example(item, other, first.head.get("tokens") or {}, secrets))
    steps = [first.head.get("step"), last.head.get("step")]
    return {"steps": steps, "kinds": kinds, "counts": counts, "is_one": len(paths) == 1}


def _compared(before: Any, after: Any) -> str:
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return "unscored"
    return "equal" if before == after else "better" if after > before else "worse"


def _example(
    before: dict[str, Any], after: dict[str, Any], tokens: dict[str, Any], secrets: Sequence[str]
) -> dict[str, Any]:
    prompt = "".join(pieces(before.get("prompt_ids") or [], tokens)) if tokens else ""
    return {
        "place": before.get("place"),
        "prompt": _short(prompt, secrets),
        "before": _short(before.get("text"), secrets),
        "after": _short(after.get("text"), secrets),
        "reward_before": before.get("reward"),
        "reward_after": after.get("reward"),
    }
