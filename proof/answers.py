"""How soon the verbs answer that an agent waits for: wall seconds of the console command, medians of several calls."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from proof.claims import ROOT, Claim

CALLS = 5
LOOKS_S, START_S = 0.5, 2.0
_MODEL = "--method sft --model builtin:tiny --device cpu --max-steps 2 --data".split()


def quick_answers(folder: Path) -> list[Claim]:
    """Return the seconds of start (each of another run), and of the verbs that only look at a finished one."""
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"prompt": "Say {number}.", "completion": "{number}"}}\n' for number in range(64))
    )
    runs = [folder / f"run{number}" for number in range(CALLS)]
    starts = []
    for run in runs:
        starts.append(seconds(folder, "start", *_MODEL, str(rows), "--out", str(run)))
        called(folder, "status", str(run), "--wait", "300")
    looks = {
        "help": ["--help"],
        "plan": ["plan", *_MODEL, str(rows), "--out", str(folder / "planned")],
        "status": ["status", str(runs[0])],
        "logs": ["logs", str(runs[0])],
        "list": ["list"],
    }
    claims = [Claim("start_s", statistics.median(starts), "<=", START_S)]
    for name, argv in looks.items():
        median = statistics.median(seconds(folder, *argv) for _ in range(CALLS))
        claims.append(Claim(f"{name}_s", median, "<", LOOKS_S))
    return claims


def seconds(folder: Path, *argv: str) -> float:
    began = time.perf_counter()
    called(folder, *argv)
    return time.perf_counter() - began


def called(folder: Path, *argv: str) -> None:
    """Carry out a command; raises subprocess.CalledProcessError where it does not exit with 0."""
    environment = os.environ | {"FINETUNE_HOME": str(folder / "home")}
    command = [str(Path(sys.executable).with_name("finetune")), *argv]
    subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
