"""Rows on speed and memory: `make test`, the check of the device, and what `make bench` measures next to trl here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from proof.claims import ROOT, Claim, Fact, Figure
from proof.product import environment_of_a_shell

TEST_S, GPU_CHECK_S = 900, 360


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


def make_test(folder: Path) -> list[Claim]:
    """`make test` in this checkout, as it is run everywhere."""
    started = time.perf_counter()
    done = subprocess.run(["make", "test"], cwd=ROOT, env=environment_of_a_shell(), check=False)
    seconds = time.perf_counter() - started
    return [Claim("exit_code", done.returncode, "==", 0), Claim("seconds", seconds, "<", TEST_S)]


def gpu_check(folder: Path) -> list[Figure]:
    """`scripts/gpu_check.py` on the device of this machine: its GPU, or the part that a CPU can run."""
    started = time.perf_counter()
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - started
    if not done.stdout.strip():
        raise RuntimeError(f"scripts/gpu_check.py left with {done.returncode} and said nothing")
    answer = json.loads(done.stdout.splitlines()[-1])
    for failure in answer["failed"]:
        print(failure)
    return [
        Fact("device", answer["device"]),
        Claim("exit_code", done.returncode, "==", 0),
        Claim("failed", len(answer["failed"]), "==", 0),
        Claim("seconds", seconds, "<=", GPU_CHECK_S),
        *(Fact(name, figure) for name, figure in answer["figures"].items()),
    ]


def measured_rows(part: str) -> dict[str, dict[str, Any]]:
    """Measure one part and return the rows of bench.json by their names."""
    subprocess.run(["make", "bench", f"PART={part}"], cwd=ROOT, check=True)
    return {row["row"]: row for row in json.loads((ROOT / "bench.json").read_text())}
