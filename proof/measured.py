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


def grpo_bench(folder: Path) -> list[Claim]:
    """`make bench PART=grpo`: a step against trl's GRPOTrainer, an adapter sync, memory over the number of rollouts."""
    return grpo_claims(measured_rows("grpo"))


def grpo_claims(rows: dict[str, dict[str, Any]]) -> list[Claim]:
    """rows: of bench.json, by their names. Half the tokens would be half the work, so those are claimed too."""
    return [
        Claim("step_s", rows["grpo-step-s"]["ours"], ">", 0),
        Claim("step_s_of_trl", rows["grpo-step-s"]["peer"], ">", 0),
        Claim("step_ratio", rows["grpo-step-s"]["ratio"], "<=", 0.35),
        Claim("tokens_ratio", rows["grpo-tokens"]["ratio"], ">=", 0.8),
        Claim("adapter_sync_s", rows["grpo-adapter-sync-s"]["ours"], "<", 0.3),
        Claim("adapter_proved_s", rows["grpo-adapter-proved-s"]["ours"], "<", 1.3),
        Claim("memory_of_512_rollouts_over_8", rows["grpo-peak-memory"]["ratio"], "<=", 1.15),
    ]


def measured_rows(part: str) -> dict[str, dict[str, Any]]:
    """Measure one part and return the rows of bench.json by their names."""
    subprocess.run(["make", "bench", f"PART={part}"], cwd=ROOT, check=True)
    return {row["row"]: row for row in json.loads((ROOT / "bench.json").read_text())}
