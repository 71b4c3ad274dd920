"""What no implementation can beat here: the measured rate of matrix products, and the bytes that must be held.

    python -m bench.ceiling MODEL_FOLDER

Prints {"matrix_rate": operations per second, "body": parameters, "head": parameters}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open

from bench.measure import ROOT


def ceiling_of(folder: Path) -> dict[str, float]:
    """Return what `python -m bench.ceiling` prints, measured in a process of its own."""
    command = [sys.executable, "-m", "bench.ceiling", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return dict(json.loads(done.stdout))


def matrix_rate(size: int = 2048, tries: int = 12) -> float:
    """Return the best rate of square bf16 products, in multiplications and additions per second, on all cores."""
    left, right = torch.randn(2, size, size).bfloat16()
    best = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def parameter_counts(folder: Path) -> dict[str, int]:
    """Return the parameters of the head (tied to the embedding here) and of all the rest."""
    head = total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                count = torch.Size(file.get_slice(name).get_shape()).numel()
                total += count
                head += count if "embed_tokens" in name else 0
    return {"body": total - head, "head": head}


if __name__ == "__main__":
    print(json.dumps({"matrix_rate": matrix_rate(), **parameter_counts(Path(sys.argv[1]))}))
