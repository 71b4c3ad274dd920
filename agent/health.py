"""What the metrics of a run say of its health: rules of thumb over windows of steps, each with a hint.

Every rule reads names that training writes into metrics.jsonl, and one odd step breaks none. A loss of 0 is what the
first pass of grpo has, so no rule reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]
Found = dict[str, str]

WINDOW = 20  # steps that most rules look at
_FEW = 5  # steps that suffice where a value can hardly be chance
_FEWEST_EVALS = 3
_MARGIN = 0.05  # what a mean or an accuracy must change by to count as changed


@dataclass(frozen=True)
class Rule:
    """Broken where the sum of the named values is bad in each of the last `window` steps that have one of them."""

    hint_id: str
    names: tuple[str, ...]
    is_bad: Callable[[float], bool]
    text: str
    window: int = WINDOW


RULES: tuple[Rule, ...] = (
    Rule("no_learning_signal", ("grad_norm",), lambda value: value == 0, "nothing has been learned", _FEW),
    Rule("gradient_large", ("grad_norm",), lambda value: value > 100, "gradients have been very large"),
    Rule("rewards_zero", ("reward_mean",), lambda value: value == 0, "no completion has had a reward"),
    Rule("groups_equal", ("zero_variance_share",), lambda value: value >= 0.9, "nearly all groups have had equal rewards"),
    Rule("completions_cut", ("truncated_share",), lambda value: value >= 0.8, "most completions have been cut"),
    Rule("low_entropy", ("entropy",), lambda value: value < 0.01, "the policy has hardly varied"),
    Rule("kl_high", ("kl",), lambda value: value > 2, "the policy has been far from its reference"),
    Rule("sampler_mismatch", ("logp_gap_k3",), lambda value: value > 0.01, "sampler and trainer have differed"),
    Rule("correction_heavy", ("correction_limited_share",), lambda value: value > 0.5, "most tokens have been limited"),
    Rule("clipping_heavy", ("clip_share_low", "clip_share_high"), lambda value: value > 0.5, "most tokens have been clipped"),
)  # fmt: skip


def health(lines: Sequence[Line]) -> list[Found]:
    """Return the rules that the last steps break, worst first, as {"hint_id", "text"}; lines: those of metrics.jsonl."""
    found = [*_not_finite(lines[-WINDOW:]), *_loss_rises(lines)]
    found += [_entry(rule.hint_id, text) for rule in RULES if (text := _broken(rule, lines))]
    found += _lost_shares(lines[-_FEW:]) + _slow_sync(lines[-WINDOW:]) + _held_out_falls(lines)
    return found


def rule_names() -> set[str]:
    """Return every name of metrics.jsonl that a rule reads."""
    plain = "loss eval_loss eval_accuracy step_s sync_s sync_proof_s sampling_s"
    counts = "rollouts_lost rewards_missing completions_total"
    return {name for rule in RULES for name in rule.names} | set(f"{plain} {counts}".split())


class HealthWatch:
    """Tells what has newly gone wrong: each broken rule once, and again only after it had mended."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def news(self, lines: Sequence[Line]) -> list[Found]:
        """Return the entries of health() that the last look had not."""
        now = health(lines)
        new = [entry for entry in now if entry["hint_id"] not in self._known]
        self._known = {entry["hint_id"] for entry in now}
        return new


def _entry(hint_id: str, text: str) -> Found:
    return {"hint_id": hint_id, "text": text}


def _values(lines: Sequence[Line], name: str) -> list[float]:
    return [line[name] for line in lines if isinstance(line.get(name), int | float)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _broken(rule: Rule, lines: Sequence[Line]) -> str | None:
    """Return what to say where a rule is broken."""
    sums = [
        sum(own)
        for line in lines[-rule.window :]
        if (own := [v for n in rule.names for v in _values([line], n)])
    ]
    if len(sums) < rule.window or not all(map(rule.is_bad, sums)):
        return None
    return f"{rule.text} for {rule.window} steps ({' + '.join(rule.names)} {sums[-1]:.3g})"


def _not_finite(lines: Sequence[Line]) -> list[Found]:
    lost = {name for line in lines for name in ("loss", "grad_norm") if name in line and line[name] is None}
    return [_entry("non_finite", f"{' and '.join(sorted(lost))} is not finite")] if lost else []


def _loss_rises(lines: Sequence[Line]) -> list[Found]:
    """Compare the last steps with the best ones before, where the loss is one that should fall: without rewards."""
    losses = _values(lines, "loss")
    if len(losses) < 3 * WINDOW or _values(lines, "reward_mean"):
        return []
    now = _mean(losses[-WINDOW:])
    best = min(
        _mean(losses[start : start + WINDOW]) for start in range(0, len(losses) - 2 * WINDOW + 1, WINDOW)
    )
    if now <= 1.5 * best + _MARGIN:
        return []
    return [_entry("loss_rises", f"the loss of the last {WINDOW} steps is {now:.3g}; it has been {best:.3g}")]


def _lost_shares(lines: Sequence[Line]) -> list[Found]:
    """Compare what was lost to the engine, and what no verifier could score, with what was sampled."""
    if len(lines) < _FEW:
        return []
    found = []
    for hint_id, name, limit, what in (
        ("rollouts_lost", "rollouts_lost", 0.02, "rollouts were lost"),
        ("rewards_missing", "rewards_missing", 0.5, "completions had no reward"),
    ):
        shares = [
            line[name] / max(line["completions_total"] + line.get("rollouts_lost", 0), 1)
            for line in lines
            if _values([line], name) and _values([line], "completions_total")
        ]
        if len(shares) == len(lines) and min(shares) > limit:
            found.append(_entry(hint_id, f"{shares[-1]:.0%} of the {what} in each of {len(lines)} steps"))
    return found


def _slow_sync(lines: Sequence[Line]) -> list[Found]:
    """Compare the time of handing over weights with that of the work that it serves."""
    shares = [
        (line["sync_s"] + line.get("sync_proof_s", 0.0))
        / max(line["step_s"] + line.get("sampling_s", 0.0), 1e-9)
        for line in lines
        if _values([line], "sync_s") and _values([line], "step_s")
    ]
    if len(shares) < WINDOW // 2 or min(shares) <= 1:
        return []
    text = f"a sync has taken {_mean(shares):.1f} times as long as sampling and training, for {len(shares)} steps"
    return [_entry("slow_sync", text)]


def _held_out_falls(lines: Sequence[Line]) -> list[Found]:
    """Compare how training goes with how held-out rows go: both must be in the metrics, and go apart."""
    losses, accuracies = _values(lines, "eval_loss"), _values(lines, "eval_accuracy")
    rewards, trained = _values(lines, "reward_mean"), _values(lines, "loss")
    rising = losses[-_FEWEST_EVALS:]
    if (
        len(losses) >= _FEWEST_EVALS
        and sorted(set(rising)) == rising
        and rising[-1] > (1 + _MARGIN) * min(losses)
        and _mean(trained[-_FEW:]) < _mean(trained[:_FEW])
    ):
        text = f"the held-out loss has risen from {min(losses):.3g} to {rising[-1]:.3g} while the training loss fell"
        return [_entry("held_out_falls", text)]
    if (
        len(accuracies) >= _FEWEST_EVALS
        and max(accuracies) - accuracies[-1] > _MARGIN
        and accuracies[-1] <= min(accuracies[-_FEWEST_EVALS:])
        and len(rewards) >= 2 * WINDOW
        and _mean(rewards[-WINDOW:]) > _mean(rewards[:WINDOW]) + _MARGIN
    ):
        text = f"held-out accuracy has fallen from {max(accuracies):.3g} to {accuracies[-1]:.3g} while the reward rose"
        return [_entry("held_out_falls", text)]
    return []
