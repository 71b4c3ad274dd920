"""Finetune SmolLM2-135M-Instruct on sums and differences, and show how much better it answers questions it has not seen.

    make quickstart

The run folder is runs/quickstart; a second call finds it finished and shows it again.
"""

from __future__ import annotations

import glob
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# A CUDA build of torch on a machine without a GPU would ask which of the two is meant.
DEVICE = "auto" if glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd") else "cpu"
ARGUMENTS = f"""scripts/run_finetune_local.py --method sft --model builtin:smollm2-135m --data builtin:arithmetic
    --max-steps 80 --global-batch-size 16 --learning-rate 5e-4 --eval-rows 200 --device {DEVICE} --out runs/quickstart""".split()


def main() -> int:
    print(f"quickstart: python {shlex.join(ARGUMENTS)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, *ARGUMENTS, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        print(done.stdout)
        return done.returncode
    folder = Path(json.loads(done.stdout)["run_dir"])
    manifest = json.loads((folder / "run.json").read_text())
    print(summary(folder, manifest))
    return 0


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """Return what the run did, in a few lines for people."""
    result = manifest["result"]
    before, after, lift = result["eval_before"], result["eval_after"], result["lift"]
    pairs = f"{lift['wins']} better, {lift['losses']} worse, {lift['ties']} the same"
    return f"""
{result["steps"]} steps in {manifest["duration_s"]:.0f} s; {after["num_rows"]} held-out questions:
  right answers   {before["accuracy"]:.1%} before, {after["accuracy"]:.1%} after
  gain            {lift["mean"]:+.1%} (95 % interval {lift["low"]:+.1%} to {lift["high"]:+.1%}; {pairs})
  loss            {before["loss"]:.3f} before, {after["loss"]:.3f} after
  run folder      {folder} (run.json tells everything; adapter/ loads with PEFT)

Ask it:    .venv/bin/finetune generate {folder} --prompt "What is 17 + 25? Answer with just the number."
Own rows:  .venv/bin/finetune run --method sft --model builtin:smollm2-135m --data rows.jsonl --dry-run"""


if __name__ == "__main__":
    sys.exit(main())
