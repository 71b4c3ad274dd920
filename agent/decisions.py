"""What a plan decides where a setting was left to it: every auto and none becomes a value.

Rule: what was asked for is never changed here, only what was left open.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.engines import EnginePlace, num_engine_devices
from agent.preflight import ModelFound
from agent.system import Device, Machine
from finetune.config import GrpoConfig, RunConfig
from finetune.errors import FinetuneError
from finetune.knobs import knobs
from finetune.rules import (
    DEFAULT_BUILTIN_COMPLETION_TOKENS,
    DEFAULT_COMPLETION_TOKENS,
    DEFAULT_FORWARD_TOKENS,
    DEFAULT_MAX_LENGTH,
    global_batch,
)

RUN_ID = "{run_id}"  # stands for the id of a run that has none yet
BYTES_PER_TRAINED = 12  # fp32 weight and the two moments of AdamW
_FSDP_SHARE = 0.6  # of a rank's memory that its own copy of all weights may take
_LEAST_PROMPT = 1024  # tokens left for the prompt beside a long completion


@dataclass(frozen=True)
class Place:
    """What a decision depends on besides the settings."""

    device: str
    devices: list[Device]  # of the ranks
    engines: list[EnginePlace]
    model: ModelFound | None
    machine: Machine
    cwd: Path


def decided(config: RunConfig, sources: dict[str, str], place: Place) -> RunConfig:
    """Return the config with every auto and none decided; `sources` learns which values are the plan's."""
    choices = _choices(config, place)
    undecided = {name: value for name, value in choices.items() if getattr(config, name) in ("auto", None)}
    sources.update(dict.fromkeys(undecided, "plan"))
    return dataclasses.replace(config, **undecided)


def differences_from_default(config: RunConfig, set_by_user: set[str], place: Place) -> list[dict[str, Any]]:
    """Return the settings whose user chose another value than they would have had: name, value and default.

    What has no default (model, data) or names a place (out) is left out; an auto or none counts as what the plan decides.
    """
    found = []
    for item in knobs(type(config)):
        if item.name not in set_by_user or item.required or item.name == "out":
            continue
        default = item.default
        if default in ("auto", None):
            untouched = dataclasses.replace(config, **{item.name: default})
            default = _choices(untouched, place).get(item.name, default)
        if (value := getattr(config, item.name)) != default:
            found.append({"name": item.name, "value": value, "default": default})
    return found


def _choices(config: RunConfig, place: Place) -> dict[str, Any]:
    """Return what each setting becomes that is left open."""
    device, machine = place.device, place.machine
    bf16 = machine.cpu_bf16 if device == "cpu" else all(item.has_bf16 for item in place.devices)
    choices: dict[str, Any] = {
        "device": device,
        "out": str(place.cwd / "runs" / RUN_ID),
        "dtype": "bf16" if bf16 else "fp32",
        "attention": "sdpa" if device == "cuda" else "short_rows",
        "gradient_checkpointing": device == "cuda",
        "parallel": _parallel(config, place),
        "max_length": min(_context(place), DEFAULT_MAX_LENGTH),
        "threads": _threads(config.num_gpus, machine),
        "micro_batch_tokens": DEFAULT_FORWARD_TOKENS[device],
    }
    with contextlib.suppress(FinetuneError):  # reported with the contradictions
        choices["global_batch_size"] = global_batch(config)
    if isinstance(config, GrpoConfig):
        choices |= _of_grpo(config, place)
    return choices


def _of_grpo(config: GrpoConfig, place: Place) -> dict[str, Any]:
    """Return what grpo decides besides; the completion takes at most half of max_length where neither was given."""
    is_builtin = all(source.startswith("builtin:") for source in config.data)
    usual = DEFAULT_BUILTIN_COMPLETION_TOKENS if is_builtin else DEFAULT_COMPLETION_TOKENS
    asked = config.max_completion_tokens
    wanted = max(DEFAULT_MAX_LENGTH, (asked or 0) + _LEAST_PROMPT)
    max_length = config.max_length or min(_context(place), wanted)
    is_merged = config.tuning == "full" or (place.device == "cpu" and config.rollout_tp == 1)
    return {
        "max_length": max_length,
        "max_completion_tokens": min(usual, max_length // 2),
        "correction": "sequence_truncate" if config.loss == "gspo" else "token_truncate",
        "sync": "merged" if is_merged else "adapter",
        "rollout_gpus": num_engine_devices(place.engines, place.device, place.devices),
    }


def _context(place: Place) -> int:
    return place.model.facts.context if place.model else DEFAULT_MAX_LENGTH


def _parallel(config: RunConfig, place: Place) -> str:
    """Return ddp, or fsdp2 where whole copies of the weights (in full tuning of the optimizer too) would crowd the memory."""
    if config.num_gpus == 1 or place.model is None:
        return "ddp"
    per_parameter = 4 + BYTES_PER_TRAINED if config.tuning == "full" else 2
    needed = place.model.facts.parameters * per_parameter
    sizes = [item.memory_bytes for item in place.devices if item.memory_bytes]
    machine = place.machine
    available = min(sizes, default=0) if place.device == "cuda" else machine.memory_bytes // config.num_gpus
    return "fsdp2" if available and needed > _FSDP_SHARE * available else "ddp"


def _threads(num_ranks: int, machine: Machine) -> int:
    asked = machine.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else max(1, machine.cores // num_ranks)
