"""What a run will cost: time, disk, generated tokens, and memory on each device with a verdict; each with its method.

A quick plan has counted rows and read no text, so it estimates from file sizes and full forwards; the full checks know
the tokens and replace those numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.decisions import BYTES_PER_TRAINED
from agent.engines import has_own_servers
from agent.speed import Duration, EarlierRun, Work, by_earlier_run, by_operations, earlier_run
from agent.system import Device, Machine
from finetune.config import GrpoConfig, RunConfig
from finetune.model.footprint import OWN_DEVICE_SHARE, Workload, engine_forecast, forecast
from finetune.model.source import Source
from finetune.rules import forward_tokens, most_sampled

_BYTES_PER_TOKEN = 4  # of text
_TEMPLATE_TOKENS = 20  # of a row besides its text
_SUPERVISED_SHARE = 0.5  # of a row's tokens, where nobody counted
_BYTES_PER_ROLLOUT_TOKEN = 60  # of a rollout's file: an id, log-probs and a share of the text
_LOG_BYTES = 5_000_000
_ANSWER_TOKENS = 16  # of a held-out row that is answered, on average


@dataclass(frozen=True)
class Counted:
    """The mean tokens of a training row (of a prompt in grpo), and how many of them are learned."""

    tokens: float
    supervised: float
    is_exact: bool


@dataclass(frozen=True)
class Scene:
    """What estimates depend on besides the plan."""

    config: RunConfig
    machine: Machine
    devices: list[Device]  # of the ranks
    home: Path


def estimated(
    plan: Mapping[str, Any], scene: Scene, report: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what time and disk a plan takes, and what it generates at most. report: of the rows, once they were read."""
    config, model, numbers = scene.config, plan["model"], plan["arithmetic"]
    if not model.get("parameters") or numbers["steps"] is None or numbers["global_batch_size"] is None:
        return _unknown("the weights of the model, or the number of rows, are not known here")
    earlier = earlier_run(scene.home, _wanted(plan, scene))
    counted = _counted(plan["data"], config, earlier, report)
    batches = numbers.get("batches", numbers["steps"])
    generated = _generated(config, numbers, batches)
    disk = _disk(config, model, numbers, batches)
    known = {"disk_bytes": sum(disk.values()), "disk_parts": disk, "generated_tokens": generated}
    if counted is None or not numbers["rows_trained"]:
        return _unknown("the tokens of the rows are not known; --checks full counts them") | known
    work = _work(config, numbers, counted, generated or 0, earlier)
    duration = _duration(work, model, scene, earlier)
    tokens = {"tokens": round(work.tokens), "tokens_method": _tokens_method(config, counted, earlier)}
    return (
        known
        | tokens
        | {
            "seconds": round(duration.seconds, 1),
            "hours": round(duration.seconds / 3600, 4),
            "seconds_method": duration.method,
        }
    )


def _unknown(reason: str) -> dict[str, Any]:
    return {
        "disk_bytes": None,
        "generated_tokens": None,
        "tokens": None,
        "seconds": None,
        "hours": None,
        "seconds_method": reason,
    }


def _wanted(plan: Mapping[str, Any], scene: Scene) -> dict[str, Any]:
    """Return what an earlier run must have in common with the plan for its speed to say something."""
    config = scene.config
    names = ["dtype", "tuning", "gradient_checkpointing"]
    if isinstance(config, GrpoConfig):
        names += ["engine", "max_completion_tokens", "passes"]
    return {
        "host": scene.machine.host,
        "method": plan["method"],
        "model": plan["model"]["id"],
        "device": config.device,
        "num_gpus": config.num_gpus,
    } | {name: getattr(config, name) for name in names}


def _counted(
    data: Mapping[str, Any], config: RunConfig, earlier: EarlierRun | None, report: Mapping[str, Any] | None
) -> Counted | None:
    """Return the mean lengths as the full checks counted them, else as the files' sizes or an earlier run tell."""
    if report and report.get("num_tokens"):
        rows = max(1, report["num_examples"])
        return Counted(report["num_tokens"] / rows, report["num_supervised"] / rows, is_exact=True)
    files = data["files"]
    if not files or any(file["rows"] is None or file["bytes"] is None for file in files):
        return None
    is_prompt = isinstance(config, GrpoConfig)
    share = 0.0 if is_prompt else _SUPERVISED_SHARE
    if earlier and not is_prompt and earlier.data == tuple(file["sha256"] for file in files):
        return Counted(earlier.tokens_per_row, earlier.tokens_per_row * share, is_exact=False)
    longest, rows = config.max_length or math.inf, 0.0
    total = 0.0
    for file in files:
        of_row = file["bytes"] / max(1, file["rows"]) / _BYTES_PER_TOKEN + _TEMPLATE_TOKENS
        total += min(of_row, longest) * file["rows"] * file["weight"]
        rows += file["rows"] * file["weight"]
    return Counted(total / rows, total / rows * share, is_exact=False) if rows else None


def _tokens_method(config: RunConfig, counted: Counted, earlier: EarlierRun | None) -> str:
    if isinstance(config, GrpoConfig):
        limit = "answers of an agent at their limits" if config.tasks else "completion at its limit"
        return f"rollouts as in {earlier.run_id}" if earlier else f"prompts, and each {limit}"
    if counted.is_exact:
        return "tokens of the rows as encoded"
    if earlier and counted.tokens == earlier.tokens_per_row:
        return f"rows as in {earlier.run_id}"
    return f"from the size of the files, {_BYTES_PER_TOKEN} bytes a token; --checks full counts them"


def _work(
    config: RunConfig,
    numbers: Mapping[str, Any],
    counted: Counted,
    generated: int,
    earlier: EarlierRun | None,
) -> Work:
    """Return what all steps do together: rows of a batch times steps, at the mean length of a row or a rollout."""
    taken = numbers["steps"] * numbers["global_batch_size"]
    if isinstance(config, GrpoConfig):
        limit = most_sampled(config)
        sampled = 0.0 if config.replay else taken / config.passes * limit
        of_rollout = earlier.tokens_per_row if earlier else counted.tokens + limit
        return Work(
            taken * of_rollout,
            taken * float(limit),
            sampled=sampled,
            answered=max(0.0, generated - sampled),
        )
    if config.max_steps is None:
        taken = min(taken, config.epochs * numbers["rows_trained"])
    # Held-out rows are measured before and after, and in between where that is asked for.
    times = 2 + (numbers["steps"] // config.eval_every if config.eval_every else 0)
    held_out = numbers["rows_held_out"]
    return Work(
        counted.tokens * taken,
        counted.supervised * taken,
        answered=2.0 * held_out * _ANSWER_TOKENS * _answers(config),
        evaluated=times * held_out * counted.tokens,
    )


def _answers(config: RunConfig) -> bool:
    """Whether held-out rows are answered by generation, as far as settings tell."""
    return config.domain not in ("auto", "text") or any(name.startswith("builtin:") for name in config.data)


def _duration(work: Work, model: Mapping[str, Any], scene: Scene, earlier: EarlierRun | None) -> Duration:
    if earlier is None:
        names = [device.name for device in scene.devices]
        return by_operations(work, model, scene.config, names, scene.machine.cores)
    return by_earlier_run(earlier, work)


def _generated(config: RunConfig, numbers: Mapping[str, Any], batches: int) -> int | None:
    """Return the tokens that grpo samples at most, those of evaluations included; None for other methods."""
    if not isinstance(config, GrpoConfig):
        return None
    if config.replay:
        return 0
    limit = most_sampled(config)
    rounds = 1 + config.resample_zero_variance
    times = 2 + (numbers["steps"] // config.eval_every if config.eval_every else 0)
    answers = times * numbers["rows_held_out"] * (1 + config.eval_samples)
    return (batches * rounds * numbers["global_batch_size"] + answers) * limit


def _disk(
    config: RunConfig, model: Mapping[str, Any], numbers: Mapping[str, Any], batches: int
) -> dict[str, int]:
    """Return the bytes that a run leaves: checkpoints (the best one, and one on its way, besides), final weights, rollouts."""
    trained = model["trained_parameters"]
    checkpoints = trained * BYTES_PER_TRAINED * (config.checkpoints_kept + 2)
    final = trained * 4 if config.tuning == "lora" else model["weight_bytes"]
    parts = {"checkpoints": checkpoints, "final_weights": final, "logs": _LOG_BYTES}
    if isinstance(config, GrpoConfig) and not config.replay:
        tokens = batches * numbers["global_batch_size"] * most_sampled(config)
        parts["rollouts"] = tokens * _BYTES_PER_ROLLOUT_TOKEN
    return parts


def quick_memory(source: Source, config: RunConfig, trainable: int) -> dict[str, int]:
    """Return the parts of a rank's memory where its forwards are full and its rows as long as they may be."""
    tokens = forward_tokens(config)
    longest = min(tokens, config.max_length or tokens)
    sharded = config.num_gpus > 1 and config.parallel == "fsdp2"
    return forecast(source, config, Workload(tokens, longest, config.num_gpus, sharded, trainable))


def engine_memory(source: Source, config: RunConfig, machine: Machine) -> dict[str, int]:
    """Return the parts of one engine's memory; nothing where the run starts none."""
    if not isinstance(config, GrpoConfig) or not has_own_servers(config):
        return {}
    return engine_forecast(source, config, machine.memory_bytes)


def memory_estimate(
    plan: Mapping[str, Any],
    scene: Scene,
    parts: Mapping[str, int],
    engine_parts: Mapping[str, int],
    rank_bytes: int | None = None,
) -> dict[str, Any]:
    """Return memory by parts and a verdict for each device. rank_bytes: as the full checks found it, else of full forwards."""
    is_exact = rank_bytes is not None
    needed = sum(parts.values()) if rank_bytes is None else rank_bytes
    largest = (
        "the largest forward of the first steps" if is_exact else "forwards filled to --micro-batch-tokens"
    )
    return {
        "memory_bytes_per_rank": needed,
        "memory_parts": dict(parts),
        "memory_method": f"sum of the parts, for {largest}; within 15 % of measured peaks on CPUs",
        "engine_memory_bytes": sum(engine_parts.values()) or None,
        "engine_memory_parts": dict(engine_parts),
        "verdicts": verdicts(plan, scene, needed, engine_parts),
    }


def verdicts(
    plan: Mapping[str, Any], scene: Scene, rank_bytes: int, engine_parts: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return for each device what it must hold and whether it fits; on the cpu all ranks and engines share one memory."""
    config = scene.config
    engines = [engine for engine in plan["parallel"]["engines"] if engine["url"] is None]
    of_engine = sum(engine_parts.values())
    if config.device == "cpu":
        needed = rank_bytes * config.num_gpus + of_engine * len(engines)
        return [_verdict("cpu", needed, scene.machine.free_memory_bytes)]
    found = []
    by_id = {device.id: device for device in scene.machine.devices}
    ranks = [device.id for device in scene.devices]
    served = [name for engine in engines for name in engine["devices"]]
    for name in dict.fromkeys([*ranks, *served]):
        device = by_id[name]
        needed = rank_bytes if name in ranks else 0
        if name in served:
            needed += max(of_engine, _reserved(config, device, shares=name in ranks))
        found.append(_verdict(f"cuda:{name}", needed, device.free_bytes))
    return found


def _reserved(config: RunConfig, device: Device, shares: bool) -> int:
    """Return what an engine takes of a device in any case: its share, however little it needs."""
    share = config.vllm_memory_fraction if shares and isinstance(config, GrpoConfig) else OWN_DEVICE_SHARE
    return int(share * (device.memory_bytes or 0))


def _verdict(device: str, needed: int, free: int | None) -> dict[str, Any]:
    fits = None if free is None else needed <= free
    return {"device": device, "needed_bytes": needed, "free_bytes": free, "fits": fits is not False}
