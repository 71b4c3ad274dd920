"""The row on forecasts: what a plan said of memory and time, next to what the run then took."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.claims import ROOT, Claim
from proof.product import Run, run_command

SMOLLM2 = "builtin:smollm2-135m"
MEMORY_LIMIT = 0.15
TIME_LIMIT = {"by_earlier_run": 2.0, "by_operations": 3.0}  # factors, as the plan itself says
ARITHMETIC = {"data": "builtin:arithmetic", "learning_rate": 5e-4}
# Three sizes, and one where answering held-out rows takes more than training does.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"model": "builtin:tiny", **ARITHMETIC, "max_steps": 20, "eval_rows": 100},
    "small_bf16": {"model": SMOLLM2, **ARITHMETIC, "dtype": "bf16", "max_steps": 8, "eval_rows": 20},
    "long_fp32": {
        "model": SMOLLM2,
        "dtype": "fp32",
        "max_steps": 3,
        "eval_fraction": 0,
        "global_batch_size": 8,
        "micro_batch_tokens": 2048,
    },
    "answering": {
        "model": SMOLLM2,
        **ARITHMETIC,
        "dtype": "bf16",
        "max_steps": 2,
        "eval_rows": 150,
        "micro_batch_tokens": 128,
        "global_batch_size": 4,
    },
}


@dataclass(frozen=True)
class Bench:
    """Where the runs of the row lie, and the index from which later plans take their speed."""

    folder: Path

    def run(self, name: str, **settings: Any) -> tuple[Run, dict[str, Any]]:
        """Train to the end; return the run and the estimates of its plan."""
        out = self.folder / name
        command = run_command("sft", out, **settings)
        environment = os.environ | {"FINETUNE_HOME": str(self.folder / "home")}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name}: exit code {done.returncode}: {done.stdout[-3000:]}")
        return Run(out), json.loads((out / "plan.json").read_text())["estimates"]


def write_long_rows(path: Path, count: int = 32, words: int = 330) -> None:
    """Write rows of a few hundred tokens each."""
    draw = random.Random(0)
    with open(path, "w") as file:
        for _ in range(count):
            answer = " ".join(draw.choice(("red", "green", "blue", "one", "two")) for _ in range(words))
            file.write(json.dumps({"prompt": "Say many words.", "completion": answer}) + "\n")


def memory_forecast(folder: Path) -> list[Claim]:
    """Peaks of main memory against the full checks' forecast; the seconds of two runs against what was said of them."""
    bench, claims = Bench(folder), []
    write_long_rows(folder / "long.jsonl")
    for name, settings in SIZES.items():
        own = settings if "data" in settings else {**settings, "data": folder / "long.jsonl"}
        run, said = bench.run(name, **own)
        ratio = said["memory_bytes_per_rank"] / max(run.manifest["peak_memory_bytes_per_rank"])
        claims += [
            Claim(f"{name}_ratio", ratio, ">", 0),
            Claim(f"{name}_error", abs(ratio - 1), "<=", MEMORY_LIMIT),
        ]
    return claims + times(Bench(folder / "times"))


def times(bench: Bench) -> list[Claim]:
    """The first run of its kind is foreseen by operations, the next one, four times as long, by the first."""
    settings = {"model": SMOLLM2, **ARITHMETIC, "dtype": "bf16", "eval_rows": 20}
    claims = []
    for name, steps in (("by_operations", 10), ("by_earlier_run", 40)):
        run, said = bench.run(name, **settings, max_steps=steps)
        ratio = said["seconds"] / run.manifest["duration_s"]
        claims += [
            Claim(f"time_{name}_ratio", ratio, ">", 0),
            Claim(f"time_{name}_factor", max(ratio, 1 / ratio), "<=", TIME_LIMIT[name]),
        ]
    return claims
