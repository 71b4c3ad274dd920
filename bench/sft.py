"""SFT throughput and peak memory of this repository against trl's SFTTrainer, interleaved: ours, peer, ours, peer, ...

The limits of the rows:
    tokens/s     matrix rate / (4 x body parameters + 4 x head parameters x supervised share)
    peak memory  the bf16 model and, for each adapter weight in fp32, its value, gradient and two moments
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.ceiling import ceiling_of
from bench.measure import ROOT, Measured, measure, model_folder
from bench.report import row_of
from bench.rows import BATCH, NUM_ROWS, write_rows


def sft(folder: Path, pairs: int, steps: int) -> list[dict[str, Any]]:
    """Return the rows of bench.json after `pairs` interleaved pairs of runs of `steps` steps each."""
    data = write_rows(folder / "rows.jsonl")
    run_ours(
        folder / "warm", data, 1
    )  # converts the embedded model into the cache, which the peer then reads
    ours, peers = [], []
    for pair in range(pairs):
        ours.append(run_ours(folder / f"ours{pair}", data, steps))
        peers.append(run_peer(folder / f"peer{pair}", data, steps))
    tokens = json.loads((folder / "peer0" / "tokens.json").read_text())
    assert all(90 <= length <= 200 for length in tokens["lengths"]), tokens["lengths"]
    # Whole epochs but the first step, which pays for first allocations and is not timed: mean tokens of a step.
    timed = sum(tokens["lengths"]) / NUM_ROWS * BATCH * (steps - 1)
    ceiling = ceiling_of(model_folder())
    share = tokens["learned"] / sum(tokens["lengths"])
    adapter_bytes = (folder / "ours0" / "adapter" / "adapter_model.safetensors").stat().st_size
    operations = 4 * ceiling["body"] + 4 * ceiling["head"] * share
    rates = [[timed / run.seconds for run in side] for side in (ours, peers)]
    peaks = [[run.peak_bytes / 1e9 for run in side] for side in (ours, peers)]
    held = (2 * (ceiling["body"] + ceiling["head"]) + 4 * adapter_bytes) / 1e9
    return [
        row_of("sft-tokens-per-s", "tokens/s", *rates, limit=ceiling["matrix_rate"] / operations),
        row_of("sft-peak-memory", "GB", *peaks, limit=held),
    ]


def run_ours(out: Path, data: Path, steps: int) -> Measured:
    command = [
        *(sys.executable, str(ROOT / "scripts" / "run_finetune_local.py"), "--json", "--method", "sft"),
        *("--model", "builtin:smollm2-135m", "--data", str(data), "--eval-fraction", "0", "--dtype", "bf16"),
        *("--global-batch-size", str(BATCH), "--max-steps", str(steps), "--device", "cpu", "--out", str(out)),
    ]
    return measure(command, out / "metrics.jsonl", out.with_suffix(".log"))


def run_peer(out: Path, data: Path, steps: int) -> Measured:
    command = [sys.executable, "-m", "bench.peer", str(data), str(model_folder()), str(out), str(steps)]
    return measure(command, out / "metrics.jsonl", out.with_suffix(".log"))
