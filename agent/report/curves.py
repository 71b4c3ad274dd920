"""Curves of a run: which metrics share a chart, thinned so that a chart stays light; every number that was logged is in one.

A point is [step, value]; a value that was not finite is None and leaves a gap.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent.report.reading import RunRecord

MOST_POINTS = 1200  # of one line
_MOST_RANKS = 8  # more of them are shown as the least and the most
Points = list[list[float | None]]


@dataclass(frozen=True)
class Chart:
    """Lines that share axes. names: metrics, * stands for any ending; is_main: also in report.png and on top."""

    title: str
    names: tuple[str, ...]
    unit: str = ""
    note: str = ""
    is_main: bool = False
    is_log: bool = False


@dataclass
class Line:
    """One curve; is_sparse: measured now and then, so its points are drawn too."""

    name: str
    points: Points
    is_sparse: bool = False


CHARTS = (
    Chart("Loss", ("loss", "held_out/loss"), is_main=True),
    Chart("Held-out accuracy", ("held_out/accuracy", "held_out/sampled_accuracy"), is_main=True),
    Chart("Reward", ("reward_mean", "reward/*"), is_main=True),
    Chart("Spread of rewards", ("reward_std",)),
    Chart(
        "Completion length", ("completion_length_mean", "completion_length_max"), "tokens", is_main=True
    ),
    Chart("KL to the reference", ("kl",), "nats", is_main=True),
    Chart(
        "Mismatch of sampler and trainer",
        ("logp_gap_mean", "logp_gap_k3", "prob_gap_mean"),
        note="mean |log-prob gap|, its k3 estimate, and mean |probability gap|, over trained tokens",
        is_main=True,
        is_log=True,
    ),
    Chart("Entropy", ("entropy",), "nats", is_main=True),
    Chart("Gradient norm", ("grad_norm",), is_main=True),
    Chart("Learning rate", ("learning_rate",), is_main=True),
    Chart("Tokens per second", ("tokens_per_s", "sampling_tokens_per_s"), is_main=True),
    Chart("Peak memory per rank", ("memory/*",), "GiB", is_main=True),
    Chart("Seconds of a step", ("step_s", "sampling_s", "scoring_s", "sync_s", "sync_proof_s", "wait_s"), "s"),
    Chart("Ratio and clipping", ("ratio_*", "clip_share_*")),
    Chart("Correction of the sampler", ("correction_*",)),
    Chart("Shares of groups and completions", ("zero_variance_share", "truncated_share")),
    Chart("Policy", ("lora_b_norm", "policy_version", "staleness")),
    Chart(
        "Counts of a step",
        ("num_tokens", "num_supervised", "sampled_tokens", "completions_*", "groups_*", "rewards_*", "rollouts_*", "ledger/*"),
    ),
)  # fmt: skip
_NO_CURVE = {"step", "num_steps", "peak_memory_bytes"}
_HELD_OUT = {"eval_loss": "loss", "eval_accuracy": "accuracy", "eval_sampled_accuracy": "sampled_accuracy"}


def charts_of(run: RunRecord) -> list[dict[str, Any]]:
    """Return the charts of a run that have anything to show, in order; what no chart names comes last, one chart each."""
    lines = lines_of(run)
    charts, used = [], set()
    for chart in CHARTS:
        names = [name for wanted in chart.names for name in fnmatch.filter(lines, wanted) if name not in used]
        used |= set(names)
        own = [lines[name] for name in names if _is_worth_it(lines[name])]
        if own:
            charts.append(_document(chart, own))
    rest = [line for name, line in lines.items() if name not in used and _is_worth_it(line)]
    return charts + [_document(Chart(line.name, ()), [line]) for line in rest]


def compared(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return one chart for each main metric that any of the runs has, a line for each run."""
    every = [lines_of(run) for run in runs]
    charts = []
    for chart in CHARTS:
        if not chart.is_main:
            continue
        wanted = [name for pattern in chart.names for name in _anywhere(every, pattern)]
        for name in dict.fromkeys(wanted):
            own = [
                Line(label, lines[name].points, lines[name].is_sparse)
                for label, lines in zip(labels, every, strict=True)
                if name in lines and _is_worth_it(lines[name])
            ]
            if own:
                title = chart.title if len(chart.names) == 1 and "*" not in chart.names[0] else name
                one = Chart(title, (), chart.unit, is_main=name == wanted[0], is_log=chart.is_log)
                charts.append(_document(one, own))
    return charts


def _anywhere(every: Sequence[dict[str, Line]], pattern: str) -> list[str]:
    return [name for lines in every for name in fnmatch.filter(lines, pattern)]


def lines_of(run: RunRecord) -> dict[str, Line]:
    """Return every number of metrics.jsonl by its name as a line over steps, and what was measured on held-out rows."""
    found: dict[str, Line] = {}
    held_out: dict[str, dict[int, float | None]] = {}
    for entry in run.metrics:
        lost = entry.get("non_finite") or []
        for name, value in _flat(entry):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in _HELD_OUT and (is_number or name in lost):
                held_out.setdefault(_HELD_OUT[name], {})[entry["step"]] = _finite(value)
            elif name not in _NO_CURVE and (is_number or name in lost):
                line = found.setdefault(name, Line(name, []))
                line.points.append([entry["step"], _finite(value)])
    for event in run.events_of("evaluated"):
        for name in _HELD_OUT.values():
            if isinstance(event.get(name), int | float) and isinstance(event.get("step"), int):
                held_out.setdefault(name, {})[event["step"]] = _finite(event[name])
    for name, points in held_out.items():
        ordered: Points = [[step, points[step]] for step in sorted(points)]
        found[f"held_out/{name}"] = Line(f"held-out {name.replace('_', ' ')}", ordered, is_sparse=True)
    return found | _memory(run)


def _flat(entry: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a line of metrics by name; those of an inner object as outer/inner."""
    for name, value in entry.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", one) for inner, one in value.items())
        else:
            yield name, value


def _memory(run: RunRecord) -> dict[str, Line]:
    """Return the peak memory of each rank in GiB; of many ranks the least and the most."""
    ranks: dict[str, Line] = {}
    for entry in run.metrics:
        peaks = entry.get("peak_memory_bytes_per_rank") or [entry.get("peak_memory_bytes")]
        gib = [peak / 2**30 for peak in peaks if isinstance(peak, int | float)]
        named = {f"rank {rank}": value for rank, value in enumerate(gib)}
        if len(gib) > _MOST_RANKS:
            named = {"the least of the ranks": min(gib), "the most of the ranks": max(gib)}
        for name, value in named.items():
            ranks.setdefault(f"memory/{name}", Line(name, [])).points.append([entry["step"], value])
    return ranks


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _is_worth_it(line: Line) -> bool:
    """Whether a line says anything: a KL of a run without a reference is 0 throughout, as are counts of faults."""
    return any(value for _, value in line.points) or line.name in ("loss", "reward_mean")


def _document(chart: Chart, lines: list[Line]) -> dict[str, Any]:
    most = max(len(line.points) for line in lines)
    thinned = f"{MOST_POINTS} of {most} points drawn" if most > MOST_POINTS else ""
    return {
        "title": chart.title,
        "unit": chart.unit,
        "note": "; ".join(filter(None, (chart.note, thinned))),
        "main": chart.is_main,
        "log": chart.is_log and all(value is None or value > 0 for line in lines for _, value in line.points),
        "lines": [
            {"name": line.name, "points": thin(line.points), "sparse": line.is_sparse} for line in lines
        ],
    }


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return [[step, None if value is None else float(f"{value:.6g}")] for step, value in points]
    size = len(points) / (most // 2)
    kept: Points = []
    for number in range(most // 2):
        part = points[int(number * size) : int((number + 1) * size)]
        known = [point for point in part if point[1] is not None]
        if not known:
            kept.append(part[0])
            continue
        ends = {id(point): point for point in (min(known, key=_value), max(known, key=_value))}
        kept += sorted(ends.values(), key=lambda point: point[0] or 0)
    return thin(kept, max(len(kept), most))


def _value(point: list[float | None]) -> float:
    return point[1] or 0.0
