"""A plan: every value with its source, what it costs, and exactly what will be started.

plan_id says what the run computes: method, settings that change the mathematics, and content digests; no paths, no
ranks, no devices. Equal plan_ids may share a run folder, others may not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent import preflight
from agent.checks import checks_of
from agent.decisions import Place, decided, differences_from_default
from agent.engines import (
    EnginePlace,
    check_grpo,
    engine_places,
    replay_digest,
    waiting_threads,
)
from agent.environment import child_environment, replayed_environment
from agent.estimates import Scene, engine_memory, estimated, memory_estimate, quick_memory
from agent.folder import SCHEMA_VERSION, RunFolder, read_document, write_document
from agent.preflight import Findings, ModelFound
from agent.request import Request
from agent.system import DEVICE_LISTS, Device, Machine, import_path
from agent.verifying import verifier_content
from finetune.config import GrpoConfig, RunConfig
from finetune.errors import FinetuneError, Problems
from finetune.knobs import knobs
from finetune.model.footprint import num_trainable
from finetune.rules import (
    contradictions,
    global_batch,
    idle_at_size_one,
    prompts_per_batch,
    rows_per_forward,
    steps_of,
)

_PATHS = (
    "model",
    "data",
    "eval_data",
    "domain",
    "chat_template",
    "init_adapter",
    "revision",
    "verifier",
    "replay",
    "tasks",
    "eval_tasks",
    "harness_config",
)  # their content counts, not their names
_FEW_STEPS = 10


def make_plan(
    request: Request, machine: Machine, cwd: Path, verify_model: bool = False
) -> tuple[dict[str, Any], Findings]:
    """Return the quick plan and what its checks found; raise Problems where the settings allow no plan at all."""
    found = Findings(list(request.problems))
    if request.config is None:
        raise Problems(found.problems)
    config, sources = request.config, dict(request.sources)
    device = _check_settings(config, request, machine, found)
    devices = preflight.devices_of_ranks(device, config.num_gpus, machine, found)
    engines = engine_places(config, device, machine, found)
    model = preflight.find_model(config, verify_model, found)
    place = Place(device, devices, engines, model, machine, cwd)
    config = decided(config, sources, place)
    _check_decided(config, request, machine, found)
    preflight.check_dtype(config, devices, machine, found)
    data = {
        "files": preflight.find_data(config.data, found),
        "eval_files": preflight.find_data(preflight.held_out_sources(config), found),
    }
    preflight.check_writable(Path(config.out), found)
    identity = _identity(request, config, data, model)
    plan = {
        "schema_version": SCHEMA_VERSION,
        "plan_id": plan_id(identity),
        "method": request.method.name,
        "created": time.time(),
        "level": "quick",
        "settings": _with_sources(config, sources),
        "differs_from_default": differences_from_default(config, request.set_by_user, place),
        "model": _model_section(model, config),
        "data": data,
        "parallel": _parallel_section(config, request, devices, engines),
        "arithmetic": _arithmetic(config, data, found),
        "estimates": {},
        "checks": [],
        "identity": identity,
        "launch": _launch_section(config, devices, machine.environ),
        "prepared": None,
        "report": None,
        "warnings": [],
    }
    scene = Scene(config, machine, devices, home(machine.environ))
    plan["estimates"] = _estimates(plan, scene, model, found)
    plan["checks"] = checks_of(plan, scene, model.source if model else None, found)
    return finished(plan, found), found


def _check_settings(config: RunConfig, request: Request, machine: Machine, found: Findings) -> str:
    """Check what the settings say by themselves; return the device."""
    found.problems += contradictions(config, request.set_by_user)
    for name in idle_at_size_one(config, request.set_by_user):
        found.warn("idle_setting", f"{name} has no effect with one rank")
    found.problems += preflight.missing_files(config)
    preflight.check_written(config, found)
    found.problems += preflight.stored_secrets(dataclasses.asdict(config), machine.environ)
    device = preflight.choose_device(config.device, machine, found)
    if device == "cpu" and "deterministic" in request.set_by_user:
        found.warn(
            "idle_setting", "deterministic has no effect on the cpu, which is so at a fixed number of threads"
        )
    return device


def _check_decided(config: RunConfig, request: Request, machine: Machine, found: Findings) -> None:
    """Check what shows only when nothing is left open: a decided value may contradict one that was asked for."""
    known = {error.message for error in found.problems}
    found.problems += [
        error
        for error in contradictions(config, request.set_by_user)
        if error.code == "settings_conflict" and error.message not in known
    ]
    check_grpo(config, config.device, machine, found)


def finished(plan: dict[str, Any], found: Findings) -> dict[str, Any]:
    """Return the plan with the warnings so far."""
    return plan | {"warnings": [{"hint_id": code, "text": text} for code, text in found.warnings]}


def _with_sources(config: RunConfig, sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {
        item.name: {"value": getattr(config, item.name), "source": sources.get(item.name, "default")}
        for item in knobs(type(config))
    }


def _model_section(model: ModelFound | None, config: RunConfig) -> dict[str, Any]:
    if model is None:
        return {"id": config.model, "revision": config.revision, "sha256": None}
    facts = dataclasses.asdict(model.facts)
    trained = num_trainable(config, model.source)
    return {
        "id": model.source.id,
        "revision": model.source.revision,
        "sha256": model.digest,
        "all_bytes": model.all_bytes,
        "trained_parameters": trained,
    } | facts


def _parallel_section(
    config: RunConfig, request: Request, devices: list[Device], engines: list[EnginePlace]
) -> dict[str, Any]:
    """Return how ranks share the work. A plan without this section (of an older version) means: in this process."""
    kind = "single" if config.num_gpus == 1 else config.parallel
    profile = request.profile.fingerprint if request.profile else None
    names = [{"id": item.id, "name": item.name} for item in devices]
    return {
        "kind": kind,
        "num_gpus": config.num_gpus,
        "device": config.device,
        "devices": names,
        "profile": profile,
        "engines": [dataclasses.asdict(engine) for engine in engines],
    }


def _arithmetic(config: RunConfig, data: dict[str, Any], found: Findings) -> dict[str, Any]:
    """Return rows, batches and steps as far as counting rows tells; the full checks know dropped rows too."""
    counts = [
        None if file["rows"] is None else math.floor(file["rows"] * file["weight"]) for file in data["files"]
    ]
    num_rows = None if None in counts or not counts else sum(count or 0 for count in counts)
    held_out = sum(file["rows"] or 0 for file in data["eval_files"])
    if num_rows is not None and not data["eval_files"]:
        held_out = math.floor(num_rows * config.eval_fraction)
        num_rows -= held_out
    return batch_arithmetic(config, num_rows, held_out, found)


def batch_arithmetic(
    config: RunConfig, num_rows: int | None, held_out: int, found: Findings
) -> dict[str, Any]:
    """Return the steps of a run over so many trained rows, with a warning where they are few or nothing is held out."""
    batch: int | None = None
    steps = config.max_steps
    with contextlib.suppress(FinetuneError):  # reported with the contradictions
        batch = global_batch(config)
        steps = steps if num_rows is None else steps_of(config, num_rows)
    if steps is not None and steps < _FEW_STEPS:
        found.warn("few_steps", f"the run takes {steps} optimizer steps")
    if held_out == 0 and num_rows is not None:
        found.warn("no_eval_rows", "no row is held out: nothing will tell whether the run helped")
    return {
        "rows_trained": num_rows,
        "rows_held_out": min(held_out, config.eval_rows),
        "global_batch_size": batch,
        "rows_per_rank": None if batch is None else math.ceil(batch / config.num_gpus),
        "rows_per_forward": None if batch is None else rows_per_forward(config),
        "steps": steps,
    } | _groups(config, batch, steps)


def _groups(config: RunConfig, batch: int | None, steps: int | None) -> dict[str, Any]:
    """Return what a batch is made of where it holds rollouts: prompts, each answered group_size times."""
    if not isinstance(config, GrpoConfig):
        return {}
    prompts: int | None = None
    with contextlib.suppress(FinetuneError):
        prompts = prompts_per_batch(config)
    return {
        "rollouts_per_batch": batch,
        "prompts_per_batch": prompts,
        "group_size": config.group_size,
        "batches": None if steps is None else math.ceil(steps / config.passes),
    }


def _estimates(
    plan: Mapping[str, Any], scene: Scene, model: ModelFound | None, found: Findings
) -> dict[str, Any]:
    """Return time, disk, generated tokens and memory as far as rows that nobody has read yet tell them."""
    costs = estimated(plan, scene)
    if costs["disk_bytes"] is not None:
        costs["free_disk_bytes"] = preflight.check_disk(Path(scene.config.out), costs["disk_bytes"], found)
    if model is None or not model.facts.parameters:
        return costs | {"memory_bytes_per_rank": None}
    parts = quick_memory(model.source, scene.config, plan["model"]["trained_parameters"])
    memory = memory_estimate(plan, scene, parts, engine_memory(model.source, scene.config, scene.machine))
    preflight.check_memory(memory["verdicts"], False, found)
    preflight.check_shared_memory(plan["model"], scene.config, scene.machine, found)
    return costs | memory


def _identity(
    request: Request, config: RunConfig, data: dict[str, Any], model: ModelFound | None
) -> dict[str, Any]:
    """Return what the run computes, by name: its hash is the plan_id, and a conflict is shown field by field."""
    values = {
        item.name: getattr(config, item.name)
        for item in knobs(type(config))
        if item.identity and item.name not in _PATHS
    }
    if config.max_steps is not None:
        del values["epochs"]
    return {
        "method": request.method.name,
        **values,
        "model.sha256": model.digest if model else None,
        "data": _content(data["files"]),
        "eval_data": _content(data["eval_files"]),
        "domain": _content_of(config.domain),
        "chat_template": _content_of(config.chat_template),
        "init_adapter": _adapter_digest(config.init_adapter),
        "profile": request.profile.fingerprint if request.profile else None,
    } | _content_of_grpo(config)


def _content_of_grpo(config: RunConfig) -> dict[str, Any]:
    if not isinstance(config, GrpoConfig):
        return {}
    return {
        "verifier": verifier_content(config.verifier),
        "replay": replay_digest(config.replay),
        "has_agents": bool(config.tasks),
        "harness_config": _content_of(config.harness_config),
    }


def _content(files: list[dict[str, Any]]) -> list[str]:
    """Return digest and weight of each file; a Hub id, whose bytes are not here, stands for itself."""
    return [f"{file['sha256'] or file['path']}:{file['weight']:g}" for file in files]


def _content_of(text: str | None) -> str | None:
    if text is None or not os.path.isfile(text):
        return text
    return hashlib.sha256(Path(text).read_bytes()).hexdigest()


def _adapter_digest(folder: str | None) -> str | None:
    if folder is None:
        return None
    files = [Path(folder) / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    return hashlib.sha256("".join(_content_of(str(path)) or "" for path in files).encode()).hexdigest()


def plan_id(identity: dict[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _launch_section(config: RunConfig, devices: list[Device], environ: Mapping[str, str]) -> dict[str, Any]:
    environment = launch_environment(config, devices, environ)
    return {
        "argv": launch_argv(Path(config.out)),
        "environment_names": sorted(environment),
        "environment": replayed_environment(environment),
    }


def launch_argv(run_dir: Path) -> list[str]:
    """Return the command that trains."""
    return [sys.executable, "-m", "finetune.launch", str(run_dir)]


def launch_environment(
    config: RunConfig, devices: list[Device], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the command that trains: our devices, our source tree, nothing of another launcher."""
    extra = {"PYTHONPATH": import_path(environ)}
    if devices:
        chosen = next((name for name in DEVICE_LISTS if name in environ), DEVICE_LISTS[0])
        extra[chosen] = ",".join(device.id for device in devices)
        if chosen not in environ:  # our ids are the driver's; those of a user follow the user's own order
            extra["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if (
        config.device == "cpu"
    ):  # its matrix library keeps a kernel for each shape: rows of many lengths cost 0.4 GB
        extra["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if config.deterministic and config.device == "cuda":
        extra["CUBLAS_WORKSPACE_CONFIG"] = environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return child_environment(environ, waiting_threads(config, environ) | extra)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields in which two identities differ, each with both values."""
    names = sorted(old.keys() | new.keys())
    return [
        {"field": name, "old": old.get(name), "new": new.get(name)}
        for name in names
        if old.get(name) != new.get(name)
    ]


def home(environ: Mapping[str, str]) -> Path:
    """Return the folder of plans and of the index of runs."""
    return Path(
        os.path.abspath(os.path.expanduser(environ.get("FINETUNE_HOME") or "~/.local/state/finetune"))
    )


def store_plan(plan: dict[str, Any], environ: Mapping[str, str]) -> Path:
    """Write the plan of a dry run, the one file that it leaves."""
    path = home(environ) / "plans" / f"{plan['plan_id']}.json"
    write_document(path, "plan", plan)
    return path


def read_plan(path: Path) -> dict[str, Any] | None:
    """Return a plan file, None where there is none; one of an older version without a parallel section means one process."""
    plan = read_document(path, "plan")
    if plan is not None:
        plan.setdefault(
            "parallel", {"kind": "single", "num_gpus": 1, "device": "cpu", "devices": [], "profile": None}
        )
    return plan


def plan_of(run: RunFolder) -> dict[str, Any]:
    """Return the plan of a run; raise FinetuneError(run_missing)."""
    plan = read_plan(run.plan)
    if plan is None:
        text = f"{run.path} has no plan.json: no run was started there"
        raise FinetuneError("run_missing", text, run=str(run.path))
    return plan


def config_of(plan: dict[str, Any], config_class: type[RunConfig]) -> RunConfig:
    """Return the settings of a plan as the engine will see them."""
    return config_class(**{name: setting["value"] for name, setting in plan["settings"].items()})
