"""Measure this repository against trl on this machine, all parts or those that are named, and write bench.json.

    python -m bench [PART ...] [--pairs 3] [--sft-steps 9] [--grpo-steps 6]

See bench/sft.py and bench/grpo.py for what is measured, bench/report.py for the form of bench.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.grpo import grpo_memory, grpo_step, grpo_sync
from bench.measure import ROOT
from bench.report import replace_rows, written
from bench.sft import sft

PARTS = {"sft": sft, "grpo-step": grpo_step, "grpo-sync": grpo_sync, "grpo-memory": grpo_memory}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", allow_abbrev=False)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--pairs", type=int, default=3, help="interleaved pairs of runs (default: 3)")
    parser.add_argument("--sft-steps", type=int, default=9, help="optimizer steps of an sft run (default: 9)")
    parser.add_argument("--grpo-steps", type=int, default=6, help="of a grpo run, 3 or more (default: 6)")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.parts if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    if asked.grpo_steps < 3:
        parser.error(
            "--grpo-steps: a steady step comes after the first, a steady sync after the second: 3 at least"
        )
    for name in asked.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix=f"finetune-bench-{name}-") as folder:
            steps = asked.sft_steps if name == "sft" else asked.grpo_steps
            rows = PARTS[name](Path(folder), asked.pairs, steps)
        replace_rows(ROOT / "bench.json", rows)
        for row in rows:
            print(written(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
