"""Rows on equality: in fp32 the real model learns the same on two ranks as in one process."""

from __future__ import annotations

import json
import random
from pathlib import Path

from proof.claims import Claim
from proof.product import Run, relative_difference, run_sft

STEPS = 10
# 7 rows that a global batch of 5 does not divide, and that two ranks do not share evenly.
LENGTHS = (5, 12, 20, 27, 33, 41, 52)


def write_rows(path: Path) -> Path:
    draw = random.Random(0)
    words = "stone river window letter garden copper winter bridge number yellow paper silver".split()
    rows = [
        {"prompt": " ".join(draw.choices(words, k=4)), "completion": " " + " ".join(draw.choices(words, k=n))}
        for n in LENGTHS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def equality_smollm2(folder: Path) -> list[Claim]:
    """One process against DDP and FSDP2 on two ranks, starting from an adapter whose LoRA-B is not zero."""
    common: dict[str, object] = {
        "model": "builtin:smollm2-135m",
        "data": write_rows(folder / "rows.jsonl"),
        "data_format": "prompt-completion",
        "eval_fraction": 0,
        "dtype": "fp32",
        "global_batch_size": 5,
        "device": "cpu",
        "threads": 1,
    }
    start = run_sft(folder / "start", **common, max_steps=3, learning_rate=1e-3)
    common |= {
        "init_adapter": start.adapter_path.parent,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "checkpoint_every": 1,
        "checkpoints_kept": STEPS,
    }
    single = run_sft(folder / "single", **common)
    claims = []
    for kind in ("ddp", "fsdp2"):
        run = run_sft(folder / kind, **common, num_gpus=2, parallel=kind)
        claims += [
            Claim(f"{kind}_{claim.name}", claim.figure, claim.relation, claim.limit)
            for claim in same_training(single, run)
        ]
    return claims


def same_training(one: Run, other: Run) -> list[Claim]:
    """Compare every step's loss and gradient norm, the first gradient itself and the final adapter.

    AdamW's first moment after one step is the first gradient times a constant.
    """
    pairs = list(zip(one.metrics, other.metrics, strict=True))
    norms = [abs(mine["grad_norm"] - theirs["grad_norm"]) / mine["grad_norm"] for mine, theirs in pairs]
    moments = [run.folder / "checkpoints" / "step-1" / "optimizer.safetensors" for run in (one, other)]
    return [
        Claim("steps", len(pairs), "==", STEPS),
        Claim("loss", max(abs(mine["loss"] - theirs["loss"]) for mine, theirs in pairs), "<=", 5e-6),
        Claim("first_gradient", relative_difference(*moments, beginning="exp_avg/"), "<=", 2e-6),
        Claim("grad_norm", max(norms), "<=", 5e-6),
        Claim("adapter", relative_difference(one.adapter_path, other.adapter_path), "<=", 1e-5),
    ]
