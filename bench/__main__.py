"""SFT throughput and peak memory of this repository against trl's SFTTrainer, interleaved: ours, peer, ours, peer, ...

    python -m bench [--pairs 3] [--steps 9]

Writes bench.json: a list of {row, unit, ours, peer, ratio, spread, limit}. ours, peer and ratio are medians over the
pairs, spread is (largest - smallest ratio) / median ratio, limit is what no implementation can beat on this machine:
    tokens/s     matrix rate / (4 x body parameters + 4 x head parameters x supervised share)
    peak memory  the bf16 model and, for each adapter weight in fp32, its value, gradient and two moments
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.measure import Measured, measure
from bench.rows import BATCH, NUM_ROWS, write_rows

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("FINETUNE_CACHE", Path.home() / ".cache" / "finetune"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=3, help="interleaved pairs of runs (default: 3)")
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps of a run (default: 9)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as folder:
        rows = bench(Path(folder), asked.pairs, asked.steps)
    (ROOT / "bench.json").write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        sides = f"ours {row['ours']:.4g}, peer {row['peer']:.4g} {row['unit']}"
        print(f"{row['row']}: {sides}, ratio {row['ratio']:.2f} (spread {row['spread']:.2f})")
    return 0


def bench(folder: Path, pairs: int, steps: int) -> list[dict[str, Any]]:
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
    ceiling = json.loads(output([sys.executable, "-m", "bench.ceiling", str(model_folder())]))
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


def model_folder() -> Path:
    """Return the folder into which the embedded model was converted."""
    return next((CACHE / "models").glob("smollm2-135m*/config.json")).parent


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


def output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def row_of(row: str, unit: str, ours: list[float], peer: list[float], limit: float) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(ours, peer, strict=True)]
    ratio = statistics.median(ratios)
    numbers = {
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "ratio": ratio,
        "spread": (max(ratios) - min(ratios)) / ratio,
        "limit": limit,
    }
    return {"row": row, "unit": unit, **{name: round(value, 4) for name, value in numbers.items()}}


if __name__ == "__main__":
    sys.exit(main())
