"""What a run may cost: limits that are watched while it trains, and the question that is asked before it starts.

At a limit the run is stopped as a person stops it: the step under way is finished and saved, so a higher limit goes on
from there. A disk that is nearly full stops it the same way, while there is still room for the save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.decisions import BYTES_PER_TRAINED
from agent.folder import RunFolder
from agent.system import free_disk, memory
from finetune.errors import FinetuneError
from finetune.records import read_lines

GB = 1_000_000_000
YES_UNDER = "FINETUNE_YES_UNDER"
_LOOK_EVERY_S = 5.0  # at the disk: a walk over the run folder
_RESERVE_BYTES = 64 << 20  # of a disk: logs and metrics go on while the last checkpoint is written
_LOW_DISK_BYTES = 1 << 30
_LOW_MEMORY_SHARE = 0.03
_UNITS = {
    "hours": "hours",
    "gpu_hours": "GPU hours",
    "disk_gb": "GB of disk",
    "generated_tokens": "generated tokens",
}


def limit(plan: dict[str, Any], name: str) -> float | None:
    """Return a limit of a plan: max_hours, max_disk_gb, max_generated_tokens; None where there is none."""
    setting = plan["settings"].get(name)
    return None if setting is None else setting["value"]


def left(plan: dict[str, Any], spent: dict[str, Any]) -> dict[str, float]:
    """Return what remains of each limit that is set, as hours_left, disk_gb_left, generated_tokens_left."""
    used = {
        "hours": spent["seconds"] / 3600,
        "disk_gb": spent["disk_bytes"] / GB,
        "generated_tokens": spent["generated_tokens"],
    }
    limits = {name: limit(plan, f"max_{name}") for name in used}
    return {
        f"{name}_left": round(max(0.0, most - used[name]), 3)
        for name, most in limits.items()
        if most is not None
    }


def checkpoint_bytes(folder: RunFolder, plan: dict[str, Any]) -> int:
    """Return the size of one more checkpoint: that of the newest, before there is one what the plan expects."""
    newest = folder.last_checkpoint()
    if newest is not None:
        return RunFolder(newest).num_bytes()
    return _expected_checkpoint_bytes(plan)


def _expected_checkpoint_bytes(plan: dict[str, Any]) -> int:
    return (plan["model"].get("trained_parameters") or 0) * BYTES_PER_TRAINED


def nothing_left(folder: RunFolder, plan: dict[str, Any], spent: dict[str, Any]) -> FinetuneError | None:
    """Return the limit that a run which ended earlier has already reached, so that going on would end at once."""
    return Watch(folder, plan, spent, read_lines(folder.metrics)).over()


def too_small(plan: dict[str, Any]) -> FinetuneError | None:
    """Return a limit that not even one checkpoint keeps."""
    disk, needed = limit(plan, "max_disk_gb"), _expected_checkpoint_bytes(plan)
    if disk is None or needed <= disk * GB:
        return None
    text = f"max_disk_gb: {disk:g} is less than one checkpoint takes, about {needed / GB:.3f} GB"
    return FinetuneError("settings_conflict", text, setting="max_disk_gb", needed_gb=needed / GB)


class Watch:
    """Follows what one attempt spends, beside what earlier ones have; old_lines: the metrics that they left."""

    def __init__(
        self,
        folder: RunFolder,
        plan: dict[str, Any],
        spent: dict[str, Any],
        old_lines: Sequence[dict[str, Any]],
    ) -> None:
        self._folder, self._plan = folder, plan
        self._seconds_before = spent["seconds"]
        self._tokens = spent["generated_tokens"]
        self._batch_tokens = int(old_lines[-1].get("sampled_tokens") or 0) if old_lines else 0
        self._has_stepped = False
        self._old = {line["step"]: line for line in old_lines}
        self._passes = int(limit(plan, "passes") or 1)
        self._began, self._looked = time.monotonic(), -math.inf
        self._disk_bytes, self._free_bytes, self._checkpoint_bytes = 0, 0, 0
        self.warnings: list[dict[str, str]] = []
        self._look()

    def step(self, line: dict[str, Any]) -> None:
        """Count a line of metrics; lines of earlier attempts, which a resumed run keeps, are counted already."""
        is_first_of_batch = (line["step"] - 1) % self._passes == 0
        if self._old.get(line["step"]) == line or line.get("replayed") or not is_first_of_batch:
            return
        self._has_stepped = True
        self._batch_tokens = int(line.get("sampled_tokens") or 0)
        self._tokens += self._batch_tokens

    def event(self, event: dict[str, Any]) -> None:
        """Count the answers to held-out rows, which are sampled too."""
        if event["kind"] == "evaluated":
            self._tokens += int(event.get("num_tokens") or 0)

    def _look(self) -> None:
        """Look at the disk and the memory, now and then."""
        if time.monotonic() - self._looked < _LOOK_EVERY_S:
            return
        self._disk_bytes = self._folder.num_bytes()
        self._free_bytes = free_disk(self._folder.path)
        self._checkpoint_bytes = checkpoint_bytes(self._folder, self._plan)
        self.warnings = [*self._low_disk(), *_low_memory()]
        self._looked = time.monotonic()

    def _low_disk(self) -> Iterable[dict[str, str]]:
        if self._free_bytes < 3 * self._checkpoint_bytes + _LOW_DISK_BYTES:
            sizes = f"{self._free_bytes / GB:.2f} GB are free, a checkpoint takes {self._checkpoint_bytes / GB:.2f} GB"
            yield {"code": "low_disk", "text": f"{self._folder.path}: {sizes}"}

    @property
    def spent(self) -> dict[str, Any]:
        return {
            "seconds": round(self._seconds_before + time.monotonic() - self._began, 1),
            "generated_tokens": self._tokens,
            "disk_bytes": self._disk_bytes,
        }

    def over(self) -> FinetuneError | None:
        """Return why the run must stop now, or None."""
        self._look()
        hours, tokens = limit(self._plan, "max_hours"), limit(self._plan, "max_generated_tokens")
        disk, spent = limit(self._plan, "max_disk_gb"), self.spent
        if hours is not None and spent["seconds"] >= hours * 3600:
            return _over("max_hours", hours, spent["seconds"] / 3600, f"after {spent['seconds']:.0f} s")
        # A batch is being sampled already when the metrics of the one before it are read, and it is trained on.
        coming = self._batch_tokens * (2 if self._has_stepped else 1)
        if tokens is not None and self._tokens + coming > tokens:
            return _over(
                "max_generated_tokens",
                tokens,
                self._tokens,
                f"{self._tokens} tokens are generated, a batch takes {self._batch_tokens}",
            )
        if disk is not None and self._disk_bytes + self._checkpoint_bytes > disk * GB:
            used = f"{self._disk_bytes / GB:.3f} GB are used, one more checkpoint takes {self._checkpoint_bytes / GB:.3f} GB"
            return _over("max_disk_gb", disk, self._disk_bytes / GB, used)
        needed = 2 * self._checkpoint_bytes + _RESERVE_BYTES  # the save before the stop, and nothing after it
        if self._free_bytes < needed:
            text = f"the disk is nearly full: {self._free_bytes / GB:.2f} GB are free, saving takes up to {needed / GB:.2f} GB"
            return FinetuneError(
                "disk_nearly_full",
                text,
                free_bytes=self._free_bytes,
                needed_bytes=needed,
                path=str(self._folder.path),
            )
        return None


def _over(name: str, most: float, used: float, how: str) -> FinetuneError:
    flag = f"--{name.replace('_', '-')}"
    return FinetuneError(
        "over_budget", f"{flag} {most:g} is reached: {how}", setting=name, limit=most, used=round(used, 6)
    )


def _low_memory() -> Iterable[dict[str, str]]:
    total, free = memory()
    if free < _LOW_MEMORY_SHARE * total:
        text = f"{free / GB:.2f} of {total / GB:.1f} GB of main memory are free: the kernel may kill the training"
        yield {"code": "low_memory", "text": text}


def to_confirm(
    plan: dict[str, Any], yes_under: str | None, environ: Mapping[str, str]
) -> FinetuneError | None:
    """Return needs_confirmation where a plan is expected to cost more than what was agreed to beforehand.

    yes_under: as "hours=1,disk_gb=50"; without it what FINETUNE_YES_UNDER says; without that nothing needs to be agreed
    to. What the plan cannot estimate counts as more. Raises FinetuneError(bad_value) for a text of another form.
    """
    text = yes_under if yes_under is not None else environ.get(YES_UNDER, "")
    agreed = _agreed(text)
    expected = expected_costs(plan)
    above = {
        name: expected[name]
        for name, most in agreed.items()
        if (cost := expected[name]) is None or cost > most
    }
    if not above:
        return None
    told = ", ".join(
        f"{'unknown' if cost is None else format(cost, '.4g')} {_UNITS[name]} (agreed to: {agreed[name]:g})"
        for name, cost in above.items()
    )
    return FinetuneError(
        "needs_confirmation",
        f"the plan is expected to take {told}; --confirm starts it",
        expected=expected,
        agreed=agreed,
        flag="--confirm",
    )


def expected_costs(plan: dict[str, Any]) -> dict[str, float | None]:
    """Return what the plan is expected to cost, None where it cannot tell."""
    estimates = plan["estimates"]
    hours, disk = estimates.get("hours"), estimates.get("disk_bytes")
    devices = {item["id"] for item in plan["parallel"]["devices"]}
    devices |= {name for engine in plan["parallel"].get("engines", []) for name in engine["devices"]}
    samples = "group_size" in plan["settings"]
    return {
        "hours": hours,
        "gpu_hours": 0.0 if not devices else None if hours is None else hours * len(devices),
        "disk_gb": None if disk is None else disk / GB,
        "generated_tokens": estimates.get("generated_tokens") if samples else 0,
    }


def _agreed(text: str) -> dict[str, float]:
    agreed: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in _UNITS or not sign or not (0 <= number < math.inf) or name in agreed:
            known = ", ".join(_UNITS)
            what = f"yes_under: {part!r} is not NAME=NUMBER, with each NAME once, of: {known}"
            raise FinetuneError("bad_value", what, setting="yes_under")
        agreed[name] = number
    return agreed
