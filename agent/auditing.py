"""The verb `rollouts audit`: is every sampled call of a run where the ledger says, token for token.

Rule: it reads the files for itself, without the code that wrote them or trained on them, and believes none of their sums:
what the engine served is matched with what was recorded, call by call, by digests of the ids that it makes anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.render import Answer
from finetune.errors import FinetuneError

_MOST_FAULTS = 20
_SAME = 1e-6  # rewards of a group that differ by less give no advantage


@dataclass(frozen=True)
class _Sampled:
    """One completion as a file records it. reason: why it is not trained, None where it is."""

    where: str
    seed: int
    version: str
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    reason: str | None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.seed, self.version, _digest(self.prompt), _digest(self.completion))


@dataclass
class _Audit:
    """What was counted and what was found wrong, over all files."""

    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)

    def wrong(self, file: Path, text: str) -> None:
        self.faults.append(f"{file.name}: {text}")


def audit(run_dir: Path) -> Answer:
    """Audit the rollouts of a run; answers with an error audit_failed for what does not hold.

    Raises FinetuneError(file_missing) where the run has recorded none.
    """
    folder = run_dir / "rollouts"
    files = sorted([*folder.glob("step-*.jsonl"), *folder.glob("eval-*.jsonl")])
    if not files:
        raise FinetuneError("file_missing", f"{folder} holds no rollouts", file=str(folder))
    found = _Audit()
    plan = _Plan.read(run_dir / "plan.json")
    told = _told_ledgers(run_dir / "metrics.jsonl")
    _check_complete(folder, {file.name for file in files}, told, plan, found)
    steps = [_audited(file, told, plan, found) for file in files]
    data = {
        "files": len(files),
        **dict(found.counts),
        "excluded": dict(found.excluded),
        "num_faults": len(found.faults),
        "steps": steps,
    }
    counts = found.counts
    text = (
        f"{counts['sampled']} sampled calls, {counts['matched']} matched with the engine's records token for token,"
        f" {counts['trained']} trained, {sum(found.excluded.values())} excluded with a reason"
    )
    errors = [FinetuneError("audit_failed", fault) for fault in found.faults[:_MOST_FAULTS]]
    status = "failed" if errors else "done"
    return Answer("rollouts", status, text, run_dir=run_dir, data=data, errors=errors, pages="steps")


@dataclass(frozen=True)
class _Plan:
    """What the plan says of batches: how many optimizer steps train on each, and what divides advantages."""

    passes: int = 1
    scale: str = "group"

    @classmethod
    def read(cls, path: Path) -> _Plan:
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
            return cls(settings["passes"]["value"], settings["scale_rewards"]["value"])
        except (FileNotFoundError, KeyError):  # no plan, or one of a time without these settings
            return cls()
        except (ValueError, TypeError) as error:
            raise FinetuneError(
                "bad_rollouts", f"{path}: no plan of rollouts: {error}", file=str(path)
            ) from error


def _check_complete(
    folder: Path, names: set[str], told: dict[int, dict[str, Any]], plan: _Plan, found: _Audit
) -> None:
    """Check that each batch which the engine, the trainer or the metrics tell of has its records."""
    for kind, of in (("served-", ""), ("trained-", "step-")):
        for path in sorted(folder.glob(f"{kind}*.jsonl")):
            if (wanted := of + path.name.removeprefix(kind)) not in names:
                found.wrong(path, f"{wanted}, the records of what it tells of, is not there")
    for step in told:
        first = (step - 1) // plan.passes * plan.passes + 1
        if (wanted := f"step-{first:06d}.jsonl") not in names:
            found.wrong(folder / wanted, f"it is not there, but metrics.jsonl has a ledger for step {step}")


def _told_ledgers(path: Path) -> dict[int, dict[str, Any]]:
    """Return step -> the ledger in its metrics; a line that is none is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("ledger"), dict):
            found[value.get("step", 0)] = value["ledger"]
    return found


def _audited(file: Path, told: dict[int, dict[str, Any]], plan: _Plan, found: _Audit) -> dict[str, Any]:
    head, *rollouts = _lines(file)
    before = len(found.faults)
    sampled = [one for rollout in rollouts for one in _sampled(file, rollout, found)]
    if head.get("num_rollouts") != len(rollouts):
        found.wrong(file, f"holds {len(rollouts)} rollouts, its head says {head.get('num_rollouts')}")
    for one in sampled:
        if len(one.logprobs) != len(one.completion):
            text = f"{one.where}: {len(one.completion)} tokens and {len(one.logprobs)} log-probs"
            found.wrong(file, text)
    matched = _match(file, sampled, found)
    trained = [one for one in sampled if one.reason is None]
    found.counts.update(
        sampled=len(sampled),
        matched=matched,
        trained=len(trained),
        sampled_tokens=sum(len(one.completion) for one in sampled),
        trained_tokens=sum(len(one.completion) for one in trained),
    )
    found.excluded.update(one.reason for one in sampled if one.reason is not None)
    kind = file.name.partition("-")[0]
    step = int(head.get("step", 0))
    _check_ledger(file, head.get("ledger") or {}, rollouts, sampled, found)
    if kind == "step" and step in told and told[step] != head.get("ledger"):
        found.wrong(file, f"metrics.jsonl has another ledger for step {step}")
    if kind == "step":
        _check_trained(file, trained, found)
        _check_advantages(file, rollouts, plan.scale, found)
    return {
        "file": file.name,
        "calls": len(sampled),
        "matched": matched,
        "trained": len(trained),
        "faults": len(found.faults) - before,
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise FinetuneError("bad_rollouts", f"{file}: {error}", file=str(file)) from error


def _sampled(file: Path, rollout: dict[str, Any], found: _Audit) -> Iterator[_Sampled]:
    """Yield what a rollout sampled: its completion, or the calls of its agent."""
    is_scored = rollout["status"] == "scored" and rollout["reward"] is not None
    lost = None if is_scored else rollout["status"]
    calls = rollout.get("calls") or []
    if not calls and rollout["completion_ids"]:
        prompt, completion = rollout["prompt_ids"], rollout["completion_ids"]
        yield _Sampled(
            rollout["id"], rollout["seed"], rollout["version"], prompt, completion, rollout["logprobs"], lost
        )
    tries = (rollout.get("agent") or {}).get("tries", 1)
    last = rollout["id"] if tries == 1 else f"{rollout['id']}.try{tries}"
    whole: dict[tuple[str, int], list[int]] = {}  # prompt and completion of each call
    for call in calls:
        where = f"{call['rollout']}, call {call['index']}"
        prompt = call["prompt_ids"]
        if call["extends"] is not None:
            before = whole.get((call["rollout"], call["extends"]))
            if before is None:
                found.wrong(file, f"{where}: goes on from call {call['extends']}, which is not there")
                before = []
            prompt = before + prompt
        whole[call["rollout"], call["index"]] = prompt + call["completion_ids"]
        if call["completion_ids"]:
            reason = _reason(call, last, rollout["version"])
            if reason is None and lost is not None:
                reason = f"rollout_{lost}"
            seed, version = call["sampling"]["seed"], call["version"]
            yield _Sampled(where, seed, version, prompt, call["completion_ids"], call["logprobs"], reason)


def _reason(call: dict[str, Any], last: str, version: str) -> str | None:
    if call["purpose"] == "helper":
        return "helper"
    if call["rollout"] != last:
        return "retried"
    if call["status"] == "used":
        return None if call["version"] == version else "version"
    return str(call["status"])


def _match(file: Path, sampled: list[_Sampled], found: _Audit) -> int:
    """Match records with what the engine served, each with one; return how many were."""
    path = file.with_name(f"served-{file.name}")
    if not path.exists():
        if sampled:
            found.wrong(file, f"{path.name} is not there: what the engine served is not known")
        return 0
    served: dict[tuple[Any, ...], list[str | None]] = {}  # of each key the digests of the log-probs
    for line in _lines(path):
        key = (line["seed"], line["version"], line["prompt_sha256"], line["completion_sha256"])
        served.setdefault(key, []).append(line.get("logprobs_sha256"))
    matched = 0
    for one in sampled:
        digests = served.get(one.key, [])
        if not digests:
            found.wrong(file, f"{one.where}: the engine served no such tokens (seed {one.seed})")
            continue
        matched += 1
        own = _digest(one.logprobs, "d")
        if own not in digests:
            found.wrong(file, f"{one.where}: the engine gave other log-probs (seed {one.seed})")
        digests.remove(own if own in digests else digests[0])
    for key, digests in served.items():
        if digests:
            text = f"the engine served {len(digests)} completions of seed {key[0]} that no record holds"
            found.wrong(file, text)
    return matched


def _check_ledger(
    file: Path,
    ledger: dict[str, Any],
    rollouts: list[dict[str, Any]],
    sampled: list[_Sampled],
    found: _Audit,
) -> None:
    lost = Counter(
        one["status"] for one in rollouts if not (one["status"] == "scored" and one["reward"] is not None)
    )
    own: dict[str, Any] = {
        "sampled": len(rollouts),
        "trained": len(rollouts) - lost.total(),
        "excluded": dict(lost),
    }
    if any(one.get("calls") for one in rollouts):
        reasons = Counter(one.reason for one in sampled if one.reason is not None)
        trained = [one for one in sampled if one.reason is None]
        own["calls"] = {
            "sampled": len(sampled),
            "trained": len(trained),
            "excluded": dict(reasons),
            "unanswered": sum(len(one.get("calls") or []) for one in rollouts) - len(sampled),
            "trained_tokens": sum(len(one.completion) for one in trained),
        }
    if ledger != own:
        found.wrong(file, f"its ledger says {json.dumps(ledger)}, its lines say {json.dumps(own)}")


def _check_trained(file: Path, trained: list[_Sampled], found: _Audit) -> None:
    """Check that the trainer scored as many tokens of each rollout as were sampled for it, where it wrote them down."""
    path = file.with_name(file.name.replace("step-", "trained-", 1))
    if not path.exists():
        return
    tokens: Counter[str] = Counter()
    for one in trained:
        tokens[one.where.partition(",")[0].partition(".try")[0]] += len(one.completion)
    lines = _lines(path)[1:]
    if missing := tokens.keys() - {line["id"] for line in lines}:
        found.wrong(path, f"{', '.join(sorted(missing))}: said to be trained, and not there")
    for line in lines:
        if len(line["logprobs"]) != tokens[line["id"]]:
            text = f"{line['id']}: {tokens[line['id']]} tokens sampled, {len(line['logprobs'])} trained"
            found.wrong(path, text)


def _check_advantages(file: Path, rollouts: list[dict[str, Any]], scale: str, found: _Audit) -> None:
    """Check each advantage against the rewards of its group: (R - mean) / (deviation + 1e-4)."""
    rewards = {
        one["id"]: (one["group"], float(one["reward"]))
        for one in rollouts
        if one["status"] == "scored" and one["reward"] is not None
    }
    every = [reward for _, reward in rewards.values()]
    for one in rollouts:
        expected = 0.0
        if one["id"] in rewards:
            group, reward = rewards[one["id"]]
            own = [other for its_group, other in rewards.values() if its_group == group]
            if len(own) > 1 and max(own) - min(own) >= _SAME:
                spread = statistics.stdev(every if scale == "batch" else own)
                divisor = 1.0 if scale == "none" else spread + 1e-4
                expected = (reward - statistics.fmean(own)) / divisor
        if not math.isclose(one["advantage"], expected, rel_tol=1e-6, abs_tol=1e-9):
            text = f"{one['id']}: the advantage is {one['advantage']}, its group's rewards give {expected}"
            found.wrong(file, text)


def _digest(values: Sequence[float], form: str = "I") -> str:
    """Return the sha256 of numbers, little-endian: token ids in 4 bytes each, log-probs (form d) in 8."""
    return hashlib.sha256(struct.pack(f"<{len(values)}{form}", *values)).hexdigest()
