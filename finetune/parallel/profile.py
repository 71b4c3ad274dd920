"""Accelerate profiles: the YAML that `accelerate config` writes, read without accelerate and without torch.

A key is accepted because the engine does what it says, or because it stands at the value that asks for nothing; any
other key or value is an error, so that a profile never promises what does not happen.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from finetune.errors import FinetuneError, Problems

Kind = Literal["none", "ddp", "fsdp2"]
_KINDS: dict[str, Kind] = {"NO": "none", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp2"}
_FREE = {
    "compute_environment",
    "main_process_ip",
    "main_process_port",
    "machine_rank",
    "rdzv_backend",
    "gpu_ids",
}  # where, not what
_ANY = ["any"]
_IDLE: dict[str, list[Any]] = {
    "debug": [False],
    "downcast_bf16": ["no", False],
    "enable_cpu_affinity": [False],
    "num_machines": [1],
    "same_network": [True, False],
    "tpu_env": [],
    "tpu_use_cluster": [False],
    "tpu_use_sudo": [False],
    "ipex_config": [],
    "mpirun_config": [],
    "dynamo_config": [],
    "main_training_function": ["main"],
    "parallelism_config": [],
}
_FSDP_IDLE: dict[str, list[Any]] = {
    "fsdp_version": [2],
    "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP"],
    "fsdp_state_dict_type": ["FULL_STATE_DICT"],
    "fsdp_cpu_ram_efficient_loading": [True, False],
    "fsdp_activation_checkpointing": [False],
    "fsdp_transformer_layer_cls_to_wrap": _ANY,  # whatever it names: the decoder layers of the model are wrapped
    "fsdp_backward_prefetch": ["NO_PREFETCH", "BACKWARD_PRE"],
    "fsdp_forward_prefetch": [False],
    "fsdp_sync_module_states": [True],
    "fsdp_use_orig_params": [True],
}


@dataclass(frozen=True)
class Profile:
    """What a profile means for the engine."""

    kind: Kind
    num_processes: int
    mixed_precision: str | None  # bf16 | no | None where the profile does not say
    reshard: bool = True
    cpu_offload: bool = False

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the meaning, without what only says where the run is deployed."""
        meaning = {
            "kind": self.kind,
            "mixed_precision": self.mixed_precision,
            "reshard": self.reshard,
            "cpu_offload": self.cpu_offload,
        }
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


def read_profile(path: str | Path) -> Profile:
    """Return the meaning of an Accelerate YAML file; raise Problems(bad_profile) naming every key that cannot be kept."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FinetuneError("file_missing", f"profile: {error}", setting="profile") from error
    except yaml.YAMLError as error:
        raise FinetuneError("bad_profile", f"profile {path}: no YAML: {error}", setting="profile") from error
    if not isinstance(values, dict):
        raise FinetuneError("bad_profile", f"profile {path}: expected keys and values", setting="profile")
    if problems := list(_problems(values)):
        raise Problems(
            [
                FinetuneError("bad_profile", f"profile {path}: {problem}", setting="profile")
                for problem in problems
            ]
        )
    fsdp = values.get("fsdp_config") or {}
    precision = values.get("mixed_precision")
    return Profile(
        kind=_KINDS[values["distributed_type"]],
        num_processes=values.get("num_processes", 1),
        mixed_precision="no" if precision is False else precision,
        reshard=fsdp.get("fsdp_reshard_after_forward", True),
        cpu_offload=fsdp.get("fsdp_offload_params", False),
    )


def _problems(values: dict[str, Any]) -> list[str]:
    kind = values.get("distributed_type")
    if kind is False:  # YAML reads NO without quotes as false
        values["distributed_type"] = kind = "NO"
    problems = []
    if kind == "DEEPSPEED":
        problems.append(
            "distributed_type DEEPSPEED is not supported; FSDP with fsdp_version 2 and fsdp_offload_params replaces ZeRO-3"
        )
    elif kind not in _KINDS:
        problems.append(f"distributed_type {kind!r} is none of {', '.join(_KINDS)}")
    if kind == "MULTI_CPU" and values.get("use_cpu") is False:
        problems.append("distributed_type MULTI_CPU contradicts use_cpu false")
    if values.get("mixed_precision", "no") not in ("no", "bf16", False):
        problems.append(f"mixed_precision {values['mixed_precision']!r} is not supported; use bf16 or no")
    processes = values.get("num_processes", 1)
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        problems.append(f"num_processes {processes!r} is no positive number")
    read_here = {"distributed_type", "mixed_precision", "num_processes", "use_cpu", "fsdp_config"}
    problems += _not_idle(
        {key: value for key, value in values.items() if key not in read_here | _FREE}, _IDLE, ""
    )
    fsdp = values.get("fsdp_config") or {}
    if fsdp and kind != "FSDP":
        problems.append(f"fsdp_config beside distributed_type {kind}")
    if kind == "FSDP":
        problems += _fsdp_problems(fsdp)
    return problems


def _fsdp_problems(fsdp: dict[str, Any]) -> list[str]:
    problems = []
    if fsdp.get("fsdp_version") != 2:
        problems.append(f"fsdp_config.fsdp_version must be 2, not {fsdp.get('fsdp_version')!r}")
    if fsdp.get("fsdp_state_dict_type", "FULL_STATE_DICT") != "FULL_STATE_DICT":
        problems.append(
            f"fsdp_config.fsdp_state_dict_type must be FULL_STATE_DICT, not {fsdp['fsdp_state_dict_type']!r}"
        )
    for name in ("fsdp_reshard_after_forward", "fsdp_offload_params"):
        if not isinstance(fsdp.get(name, True), bool):
            problems.append(f"fsdp_config.{name} must be true or false, not {fsdp[name]!r}")
    seen = {"fsdp_version", "fsdp_state_dict_type", "fsdp_reshard_after_forward", "fsdp_offload_params"}
    return problems + _not_idle(
        {key: value for key, value in fsdp.items() if key not in seen}, _FSDP_IDLE, "fsdp_config."
    )


def _not_idle(values: dict[str, Any], idle: dict[str, list[Any]], prefix: str) -> list[str]:
    problems = []
    for key, value in values.items():
        if key not in idle:
            problems.append(f"{prefix}{key}: not a key that is supported")
        elif value not in (None, [], {}) and idle[key] != _ANY and value not in idle[key]:
            problems.append(f"{prefix}{key}: {value!r} is not supported; leave the key out")
    return problems
