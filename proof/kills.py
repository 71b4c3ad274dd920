"""Rows on kill -9: at any moment, of the parent or of either rank, and the same command finishes the same training."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

from proof.claims import ROOT, Claim
from proof.product import Run, run_sft, sft_command

KILLS = 20
STEPS = 60
SETTINGS: dict[str, object] = {
    "model": "builtin:tiny",
    "data": "builtin:arithmetic",
    "eval_rows": 4,
    "lora_dropout": 0.05,  # without dropout a resume that lost its random state would go unnoticed
    "max_steps": STEPS,
    "checkpoint_every": 2,  # so often that many a kill falls into a save
    "num_gpus": 2,
    "parallel": "ddp",
    "device": "cpu",
    "threads": 1,
}
TIMEOUT_S = 300


def kills_parent(folder: Path) -> list[Claim]:
    return kills(folder, "parent")


def kills_rank0(folder: Path) -> list[Claim]:
    return kills(folder, "rank0")


def kills_rank1(folder: Path) -> list[Claim]:
    return kills(folder, "rank1")


def kills(folder: Path, victim: str) -> list[Claim]:
    """Kill a run at KILLS random moments after its first checkpoint, run the same command again, compare with a straight run."""
    straight = run_sft(folder / "straight", **SETTINGS, seed=0)
    other = run_sft(folder / "other", **SETTINGS, seed=1)
    span = training_seconds(straight)
    draw = random.Random(victim)
    counts = dict.fromkeys(("resumed", "steps_once", "same_adapter", "whole_json"), 0)
    done = 0
    while done < KILLS:
        run = Run(folder / f"{victim}-{done}-{draw.random():.6f}")
        if not interrupted(run, victim, draw.uniform(0, span)):
            continue  # the run was over before its moment came
        done += 1
        counts["whole_json"] += has_whole_json(run.folder)
        finish(run)
        counts["resumed"] += (run.manifest["resumed_from"] or 0) > 0
        counts["steps_once"] += [line["step"] for line in run.metrics] == list(range(1, STEPS + 1))
        counts["same_adapter"] += run.adapter_digest == straight.adapter_digest
    claims = [Claim(name, count, "==", KILLS) for name, count in counts.items()]
    return [
        *claims,
        Claim("other_seed_differs", int(other.adapter_digest != straight.adapter_digest), "==", 1),
    ]


def training_seconds(run: Run) -> float:
    """Return how long the run took from its first checkpoint to its last one."""
    times = [event["time"] for event in run.events if event["kind"] == "checkpoint"]
    return float(times[-1] - times[0])


def interrupted(run: Run, victim: str, delay: float) -> bool:
    """Start the run, kill -9 the victim `delay` seconds after the first checkpoint; False where the run had ended before."""
    with open(f"{run.folder}.log", "w") as log:
        process = subprocess.Popen(
            sft_command(run.folder, **SETTINGS, seed=0), stdout=log, stderr=log, cwd=ROOT
        )
    deadline = time.monotonic() + TIMEOUT_S
    while not any((run.folder / "checkpoints").glob("step-*/manifest.json")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no checkpoint came: {Path(f'{run.folder}.log').read_text()[-2000:]}")
        time.sleep(0.01)
    time.sleep(delay)
    if victim == "parent":
        process.kill()
    else:
        beat = json.loads((run.folder / "heartbeat" / victim).read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(beat["pid"], signal.SIGKILL)
    return process.wait(TIMEOUT_S) != 0


def finish(run: Run) -> None:
    """Run the same command again. Where the parent was killed, its ranks may take a moment to leave the folder."""
    deadline = time.monotonic() + 30
    while True:
        try:
            run_sft(run.folder, **SETTINGS, seed=0)
            return
        except RuntimeError as error:
            if "run_in_use" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def has_whole_json(folder: Path) -> bool:
    """Whether every JSON file that stands under its final name can be read."""
    for path in folder.rglob("*.json"):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            json.loads(path.read_text())
        except ValueError:
            return False
    return True
