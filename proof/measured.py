"""Rows on speed and memory: what `make bench` measures next to trl on this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from proof.claims import ROOT, Claim


def bench(folder: Path) -> list[Claim]:
    """`make bench PART=sft`: throughput and peak memory against trl's SFTTrainer."""
    rows = measured_rows("sft")
    return [
        Claim("sft-tokens-per-s", rows["sft-tokens-per-s"]["ratio"], ">=", 2.0),
        Claim("sft-peak-memory", rows["sft-peak-memory"]["ratio"], "<=", 0.7),
    ]


def grpo_step(folder: Path) -> list[Claim]:
    """`make bench PART=grpo-step`: a step against trl's GRPOTrainer. Half the tokens would be half the work: claimed too."""
    rows = measured_rows("grpo-step")
    return [
        Claim("step_s", rows["grpo-step-s"]["ours"], ">", 0),
        Claim("step_s_of_trl", rows["grpo-step-s"]["peer"], ">", 0),
        Claim("step_ratio", rows["grpo-step-s"]["ratio"], "<=", 0.35),
        Claim("tokens_ratio", rows["grpo-tokens"]["ratio"], ">=", 0.8),
    ]


def grpo_sync(folder: Path) -> list[Claim]:
    """`make bench PART=grpo-sync`: an adapter at the engine, and proved there."""
    rows = measured_rows("grpo-sync")
    return [
        Claim("adapter_sync_s", rows["grpo-adapter-sync-s"]["ours"], "<", 0.3),
        Claim("adapter_proved_s", rows["grpo-adapter-proved-s"]["ours"], "<", 1.3),
    ]


def grpo_memory(folder: Path) -> list[Claim]:
    """`make bench PART=grpo-memory`: the peak of the training process over the number of rollouts."""
    rows = measured_rows("grpo-memory")
    return [Claim("memory_of_512_rollouts_over_8", rows["grpo-peak-memory"]["ratio"], "<=", 1.15)]


def measured_rows(part: str) -> dict[str, dict[str, Any]]:
    """Measure one part and return the rows of bench.json by their names."""
    subprocess.run(["make", "bench", f"PART={part}"], cwd=ROOT, check=True)
    return {row["row"]: row for row in json.loads((ROOT / "bench.json").read_text())}
