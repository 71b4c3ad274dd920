"""GRPO on recorded rollouts: a run on the CPU samples and trains in fp32, others train on its files elsewhere.

Replayed where and as they were recorded they teach exactly the same. The limits elsewhere are of single steps, all of
which begin with LoRA-B near zero: fp32 sums in another order, and bf16 has 8 bits.
"""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

from proof.claims import ROOT, Claim
from proof.product import Run, run_command

STEPS = 4
REWARD = ROOT / "bench" / "reward.py"
# Largest difference of a step's loss, absolute (advantages have deviation 1), and of its gradient norm, relative.
LIMITS = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 2e-2)}


def replayed(folder: Path, device: str) -> list[Claim]:
    """Record on the CPU, replay there and on `device`; raises RuntimeError where a run fails."""
    recorded = run_grpo(folder / "recorded", engine="local", device="cpu", dtype="fp32")
    again = run_grpo(folder / "again", replay=recorded.folder, device="cpu", dtype="fp32")
    claims = [
        Claim("replay_trains_all_steps", taught_steps(recorded), "==", STEPS),
        Claim("replay_same_adapter", int(again.adapter_digest == recorded.adapter_digest), "==", 1),
    ]
    for dtype, (loss_limit, norm_limit) in LIMITS.items():
        if device == "cpu" and dtype == "fp32":
            run = again
        else:
            run = run_grpo(folder / dtype, replay=recorded.folder, device=device, dtype=dtype)
        loss, norm = differences(recorded.metrics, run.metrics)
        claims += [
            Claim(f"replay_{dtype}_loss", loss, "<=", loss_limit),
            Claim(f"replay_{dtype}_grad_norm", norm, "<=", norm_limit),
        ]
    return claims


def run_grpo(out: Path, **settings: object) -> Run:
    """Run GRPO of builtin:tiny to its end; raises RuntimeError with what the command said where it fails."""
    fixed: dict[str, object] = {
        "model": "builtin:tiny",
        "data": "builtin:arithmetic",
        "verifier": f"{REWARD}:odd_share",
        "global_batch_size": 32,
        "group_size": 8,
        "max_completion_tokens": 16,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "eval_rows": 1,
        "eval_samples": 0,
    }
    command = run_command("grpo", out, **{**fixed, **settings})
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-3000:]}")
    return Run(out)


def taught_steps(run: Run) -> int:
    """Return how many steps had something to learn: a gradient, from rollouts that differ in their groups."""
    return sum(line["grad_norm"] > 0 and line["num_supervised"] > 0 for line in run.metrics)


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the largest difference of a loss and the largest relative one of a gradient norm, step by step.

    Steps that do not pair up, or figures that are no numbers, are infinitely far apart.
    """
    if [line["step"] for line in one] != [line["step"] for line in other] or not one:
        return math.inf, math.inf
    pairs = list(zip(one, other, strict=True))
    losses = [abs(mine["loss"] - theirs["loss"]) for mine, theirs in pairs]
    norms = [abs(mine["grad_norm"] - theirs["grad_norm"]) / mine["grad_norm"] for mine, theirs in pairs]
    return tuple(max(part) if all(map(math.isfinite, part)) else math.inf for part in (losses, norms))
