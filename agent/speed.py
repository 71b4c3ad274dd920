"""How fast a run will be: as earlier runs of this user on this machine were, else by operations and a table of devices.

A speed says in words where it comes from and how far it may be off.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import GrpoConfig, RunConfig

_MOST_RUNS = 50  # of the index that are looked at, newest first
_FEWEST_STEPS = 3  # of a run whose speed says something
_FIRST = 1  # steps that are slower than all others: kernels are chosen in them
_METRICS_BYTES = 1_000_000  # read of an earlier run's metrics
# Operations a second that training reaches on one core, measured on SmolLM2-135M: with and without bf16 instructions.
_CORE = {"bf16": 8.5e10, "fp32": 3.5e10}
# Operations a second in bf16 by data sheet, of devices whose name holds the word; the first that fits.
_DEVICES = {
    "B200": 2.2e15,
    "H200": 9.9e14,
    "H100": 9.9e14,
    "H800": 9.9e14,
    "MI300": 1.3e15,
    "MI250": 3.6e14,
    "A100": 3.1e14,
    "A800": 3.1e14,
    "L40S": 3.6e14,
    "4090": 1.6e14,
    "A10": 1.2e14,
    "L4": 1.2e14,
    "3090": 7e13,
}
_UNKNOWN_DEVICE = 5e13
_REACHED = 0.3  # of the data sheet by training
_FP32_SHARE = 0.15  # of the speed in bf16 that a device has in fp32
_DECODING = {"cpu": 0.7, "cuda": 0.2}  # of the training speed, where completions are sampled side by side
_IN_PROCESS = 0.3  # of a server's sampling speed that transformers reaches
_START_S = {"cpu": 15.0, "cuda": 25.0}
_ENGINE_START_S = {"cpu": 30.0, "cuda": 90.0}


@dataclass(frozen=True)
class Work:
    """What a run has to do. tokens: trained, without padding; sampled: generated for training; answered: for evaluation."""

    tokens: float
    supervised: float
    sampled: float = 0.0
    answered: float = 0.0
    evaluated: float = 0.0  # tokens of held-out rows whose loss is measured


@dataclass(frozen=True)
class Duration:
    """Seconds, and in words where they come from and how far they may be off."""

    seconds: float
    method: str


@dataclass(frozen=True)
class EarlierRun:
    """What a finished run tells: seconds of its steps by trained token, and what it took besides."""

    run_id: str
    steps: int
    seconds_per_token: float
    tokens_per_row: float
    besides_s: float
    data: tuple[str, ...] = ()  # digests of its files


def by_earlier_run(run: EarlierRun, work: Work) -> Duration:
    seconds = work.tokens * run.seconds_per_token + run.besides_s
    text = (
        f"as {run.run_id} went here ({run.steps} steps, {1 / run.seconds_per_token:.4g} trained tokens/s, and"
        f" {run.besides_s:.0f} s to load, evaluate and save); within about 1.5 times where rows and load are alike"
    )
    return Duration(seconds, text)


def by_operations(
    work: Work, model: Mapping[str, Any], config: RunConfig, devices: list[str], cores: int
) -> Duration:
    """Return operations over the speed of the devices: 6 for each parameter and token, 4 where the weights are frozen."""
    per_token = 6 if config.tuning == "full" else 4
    recomputed = 2 if config.gradient_checkpointing else 0
    body, head = model["body"], model["head"]
    trained = (per_token + recomputed) * body * work.tokens + per_token * head * work.supervised
    read = 2 * body * work.evaluated
    written = 2 * (body + head) * (work.sampled + work.answered)
    speed, source = device_speed(config, devices, cores)
    decoding = speed * _DECODING[config.device]
    starting = _START_S[config.device]
    if isinstance(config, GrpoConfig) and not config.replay:
        decoding *= _IN_PROCESS if config.engine == "local" else 1
        starting += 0 if config.engine == "local" else _ENGINE_START_S[config.device]
    elif work.answered:
        decoding *= _IN_PROCESS
    seconds = starting + (trained + read) / speed + written / decoding
    text = (
        f"{per_token + recomputed} x parameters x tokens = {trained:.2g} operations at {speed:.2g} a second ({source}),"
        f" and {starting:.0f} s to start; within about 3 times"
    )
    return Duration(seconds, text)


def device_speed(config: RunConfig, devices: list[str], cores: int) -> tuple[float, str]:
    """Return operations a second of all ranks together, and where the number comes from. devices: names, of the ranks."""
    if config.device == "cpu":
        used = min(cores, (config.threads or cores) * config.num_gpus)
        return used * _CORE[str(config.dtype)], f"{used} cores as measured on a small model"
    # A plan for devices that are not there is refused; its numbers are those of one that is in no table.
    known = [_peak(name) for name in devices] or [None]
    share = _REACHED * (1.0 if config.dtype == "bf16" else _FP32_SHARE)
    of = "data sheet" if all(peak for peak in known) else "a guess, the device is in no table"
    return sum(peak or _UNKNOWN_DEVICE for peak in known) * share, f"{share:.0%} of {of}"


def _peak(name: str) -> float | None:
    return next((speed for word, speed in _DEVICES.items() if word in name), None)


def earlier_run(home: Path, wanted: Mapping[str, Any]) -> EarlierRun | None:
    """Return the newest finished run that is like the wanted one, or None.

    wanted: host, method, model (its id), device, num_gpus, and settings by name: what decides the speed.
    """
    for manifest, folder in _finished(home):
        with contextlib.suppress(
            KeyError, TypeError, ValueError, AttributeError
        ):  # of an older version, or damaged
            if alike(manifest, wanted) and (run := _measured(manifest, folder)):
                return run
    return None


def alike(manifest: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    parallel, settings = manifest["parallel"], manifest["settings"]
    facts = {
        "host": manifest["host"],
        "method": manifest["method"],
        "model": manifest["model"]["id"],
        "device": parallel["device"],
        "num_gpus": parallel["num_gpus"],
    }
    own = {name: (settings.get(name) or {}).get("value") for name in wanted if name not in facts}
    return {**facts, **own} == dict(wanted)


def _finished(home: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield the manifests of runs that succeeded in one go, newest first; a damaged one is passed over."""
    index = sorted((home / "runs").glob("*.json"), key=_changed, reverse=True)
    for entry in index[:_MOST_RUNS]:
        try:
            folder = Path(json.loads(entry.read_text(encoding="utf-8"))["run_dir"])
            manifest = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            if manifest["status"] == "succeeded" and len(manifest["attempts"]) == 1:
                yield manifest, folder
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _measured(manifest: Mapping[str, Any], folder: Path) -> EarlierRun | None:
    """Return the speed of a run by its metrics; None where it made too few steps to tell."""
    read = _steps(folder / "metrics.jsonl")
    lines = [line for line in read if line.get("num_tokens") is not None]
    seconds = [float(line["step_s"]) + float(line.get("wait_s") or 0.0) for line in lines]
    tokens = math.fsum(line["num_tokens"] for line in lines[_FIRST:])
    batch = (manifest["settings"].get("global_batch_size") or {}).get("value")
    if len(lines) < _FEWEST_STEPS or not tokens or not batch:
        return None
    taken = math.fsum(seconds[_FIRST:])
    # Of a long run the first steps were read; the others took as long as these.
    steps = max(len(read), (manifest.get("result") or {}).get("steps") or 0)
    unread_s = (steps - len(read)) * taken / (len(lines) - _FIRST)
    besides = max(0.0, float(manifest["duration_s"] or 0.0) - math.fsum(seconds) - unread_s)
    rows = batch * (len(lines) - _FIRST)
    data = tuple(str(file["sha256"]) for file in manifest["data"].get("files", []))
    return EarlierRun(manifest["run_id"], len(lines), taken / tokens, tokens / rows, besides, data)


def _steps(path: Path) -> list[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            lines = file.read(_METRICS_BYTES).split(b"\n")[:-1]
        return [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []
