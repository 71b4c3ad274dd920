"""The product as its users meet it: a command, its exit code, its JSON, and the run folder that it leaves."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from proof.claims import ROOT

SCRIPT = ROOT / "scripts" / "run_finetune_local.py"


@dataclass(frozen=True)
class Run:
    """A run folder after the command has left it."""

    folder: Path

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run.json").read_text()))

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.manifest["result"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._lines("events.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_bytes().splitlines()]

    @property
    def adapter_path(self) -> Path:
        return self.folder / "adapter" / "adapter_model.safetensors"

    @property
    def adapter_digest(self) -> str:
        return hashlib.sha256(self.adapter_path.read_bytes()).hexdigest()


def sft_command(out: Path, **settings: object) -> list[str]:
    return run_command("sft", out, **settings)


def run_command(method: str, out: Path, **settings: object) -> list[str]:
    """Return the command of a run; learning_rate=5e-4 becomes --learning-rate 5e-4, a list several values of one flag."""
    flags: list[str] = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return [sys.executable, str(SCRIPT), "--json", "--method", method, "--out", str(out), *flags]


def run_sft(out: Path, **settings: object) -> Run:
    return run_method("sft", out, **settings)


def run_method(method: str, out: Path, **settings: object) -> Run:
    """Train to the end; raises RuntimeError with what the command said where it does not exit with 0."""
    done = subprocess.run(
        run_command(method, out, **settings), stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-3000:]}")
    return Run(out)


def environment_of_a_shell() -> dict[str, str]:
    """Return the environment without what the `make` adds in which a row runs: another `make` would take it for its own."""
    own = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in own}


def relative_difference(left: Path, right: Path, beginning: str = "") -> float:
    """Return |left - right| / |left| over all tensors of two safetensors files whose name begins so."""
    one, other = (
        {name: value for name, value in load_file(path).items() if name.startswith(beginning)}
        for path in (left, right)
    )
    if one.keys() != other.keys() or not one:
        raise RuntimeError(f"{left} and {right} do not hold the same tensors")
    square = sum(float(np.sum(np.square(one[name].astype(np.float64)))) for name in one)
    apart = sum(float(np.sum(np.square(one[name].astype(np.float64) - other[name]))) for name in one)
    return float(np.sqrt(apart / square))
