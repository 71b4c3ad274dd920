"""The figures on top of a report and what held-out rows say; numbers, sizes and times as people read them."""

from __future__ import annotations

import time
from typing import Any

from agent.report.reading import RunRecord


def number(value: Any) -> str:
    """Return a number short and exact enough to read; a dash where it is not known."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def size(num_bytes: Any) -> str:
    if not isinstance(num_bytes, int | float):
        return "–"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:g} bytes"


def duration(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def moment(stamp: Any) -> str:
    if not isinstance(stamp, int | float):
        return "–"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(stamp))


def figures(run: RunRecord) -> list[dict[str, str]]:
    """Return the figures on top of a report: label, value, and what stands in small print below it."""
    result, found = run.result, []
    steps, total = run.last("step"), run.state.get("num_steps") or run.last("num_steps")
    found.append(
        _figure("steps", number(steps or result.get("steps") or 0), f"of {number(total)}" if total else "")
    )
    if run.last("reward_mean") is not None:
        rewards = [line["reward_mean"] for line in run.metrics if line.get("reward_mean") is not None]
        ends = min(5, len(rewards))
        first, last = sum(rewards[:ends]) / ends, sum(rewards[-ends:]) / ends
        found.append(
            _figure("reward", f"{number(first)} → {number(last)}", f"mean of the first and last {ends} steps")
        )
    elif run.last("loss") is not None:
        loss = result.get("train_loss")
        found.append(
            _figure(
                "training loss", number(run.last("loss") if loss is None else loss), "mean of the last steps"
            )
        )
    held_out = held_out_of(run)
    for row in held_out["rows"]:
        if row["before"] != "–" or row["after"] != "–":
            found.append(
                _figure(f"held-out {row['name']}", f"{row['before']} → {row['after']}", held_out["on"])
            )
    if held_out["lift"]:
        found.append(
            _figure(
                f"lift of {held_out['lift']['of']}", held_out["lift"]["mean"], held_out["lift"]["interval"]
            )
        )
    speeds = [line["tokens_per_s"] for line in run.metrics if line.get("tokens_per_s")]
    if speeds:
        found.append(
            _figure(
                "tokens per second", number(round(sum(speeds) / len(speeds), 1)), "in training steps, mean"
            )
        )
    peaks = run.manifest.get("peak_memory_bytes_per_rank") or run.last("peak_memory_bytes_per_rank")
    if isinstance(peaks, list) and peaks:
        found.append(
            _figure(
                "peak memory",
                size(max(peaks)),
                f"most of {len(peaks)} ranks" if len(peaks) > 1 else "one rank",
            )
        )
    elif run.last("peak_memory_bytes"):
        found.append(_figure("peak memory", size(run.last("peak_memory_bytes")), ""))
    seconds = _seconds(run)
    return [*found, _figure("time", duration(seconds), _attempts_line(run))] if seconds else found


def _figure(label: str, value: str, below: str) -> dict[str, str]:
    return {"label": label, "value": value, "below": below}


def _seconds(run: RunRecord) -> float | None:
    """Return how long all attempts together took, the present one up to its last sign of life."""
    total = 0.0
    for attempt in run.attempts:
        end = attempt.get("ended") or run.state.get("heartbeat") or attempt.get("started")
        total += max(0.0, (end or 0) - (attempt.get("started") or 0))
    return total or None


def _attempts_line(run: RunRecord) -> str:
    return f"{len(run.attempts)} attempts" if len(run.attempts) > 1 else "one attempt"


def held_out_of(run: RunRecord) -> dict[str, Any]:
    """Return what held-out rows say before and after training, and the lift with its interval where there is one."""
    before, after = (run.result.get(name) or _measured(run, name) for name in ("eval_before", "eval_after"))
    before, after = before or {}, after or {}
    names = [
        name
        for name in ("loss", "accuracy", "sampled_accuracy")
        if any(isinstance(side.get(name), int | float) for side in (before, after))
    ]
    rows = [
        {
            "name": name.replace("_", " "),
            "before": number(before.get(name)),
            "after": number(after.get(name)),
            "change": _change(before.get(name), after.get(name)),
        }
        for name in names
    ]
    num_rows = before.get("num_rows") or after.get("num_rows")
    return {
        "rows": rows,
        "on": f"on {number(num_rows)} held-out rows" if num_rows else "",
        "lift": _lift(run),
    }


def _measured(run: RunRecord, name: str) -> dict[str, Any] | None:
    """Return the first evaluation of a run that has no result yet, or what stands for the last: one after it."""
    events = [event for event in run.events_of("evaluated") if event.get("num_rows")]
    if not events or (name == "eval_after" and len(events) < 2):
        return None
    return events[0 if name == "eval_before" else -1]


def _change(before: Any, after: Any) -> str:
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return "–"
    return f"{after - before:+.4g}"


def _lift(run: RunRecord) -> dict[str, Any] | None:
    lift = run.result.get("lift") or {}
    if not isinstance(lift.get("mean"), int | float):
        return None
    low, high = lift.get("low"), lift.get("high")
    known, judged = False, "no interval"
    if isinstance(low, int | float) and isinstance(high, int | float):
        nothing = "no difference shown: 0 lies in the interval"
        known, judged = True, "better" if low > 0 else "worse" if high < 0 else nothing
    return {
        "of": lift.get("of", "score"),
        "mean": f"{lift['mean']:+.4g}",
        "interval": f"95 % interval {low:+.4g} to {high:+.4g}" if known else "no interval",
        "judged": judged,
        "numbers": {"mean": lift["mean"], "low": low, "high": high} if known else None,
        "pairs": {name: lift.get(name) for name in ("wins", "ties", "losses", "num_pairs", "num_excluded")},
    }
