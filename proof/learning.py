"""Rows on learning: a real model gets better at what it is trained on, on rows that it has not seen."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from proof.claims import ROOT, Claim, NotHere
from proof.product import Run, environment_of_a_shell, run_sft

MODEL = "builtin:smollm2-135m"
DATA = Path(os.environ.get("FINETUNE_PROOF_DATA", ROOT.parent / "shared" / "data"))


def quickstart(folder: Path) -> list[Claim]:
    """`make quickstart` in a fresh clone with empty caches, setup included."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = environment_of_a_shell() | {
        "FINETUNE_HOME": str(folder / "home"),
        "FINETUNE_CACHE": str(folder / "cache"),
    }
    started = time.perf_counter()
    done = subprocess.run(["make", "quickstart"], cwd=clone, env=environment, check=False)
    seconds = time.perf_counter() - started
    gain = Run(clone / "runs" / "quickstart").result["lift"]["mean"] if done.returncode == 0 else None
    return [
        Claim("exit_code", done.returncode, "==", 0),
        Claim("seconds", seconds, "<", 480),
        Claim("accuracy_gain", gain, ">", 0),
    ]


def arithmetic_lift(folder: Path) -> list[Claim]:
    """100 steps on builtin:arithmetic; 500 held-out questions answered before and after. Either bound is enough."""
    run = run_sft(
        folder / "run",
        model=MODEL,
        data="builtin:arithmetic",
        eval_rows=500,
        max_steps=100,
        global_batch_size=16,
        learning_rate=5e-4,
    )
    lift = run.result["lift"]
    lines = [
        Claim("held_out_rows", lift["num_pairs"], "==", 500),
        Claim("accuracy_before", run.result["eval_before"]["accuracy"], "<=", 0.25),
        Claim("accuracy_of_the_base", run.result["eval_before"]["accuracy"], ">=", 0.10),
    ]
    by_interval = Claim("lift_low", lift["low"], ">=", 0.12)
    return [*lines, by_interval if by_interval.holds else Claim("lift_mean", lift["mean"], ">=", 0.25)]


def gsm8k_loss(folder: Path) -> list[Claim]:
    """100 steps on grade-school problems lower the loss on the answers of other problems."""
    train, test = DATA / "gsm8k" / "train-2000.jsonl", DATA / "gsm8k" / "test.jsonl"
    if not train.exists():
        raise NotHere(f"{train} is not there; FINETUNE_PROOF_DATA names the folder that holds gsm8k/")
    run = run_sft(
        folder / "run",
        model=MODEL,
        data=train,
        eval_data=test,
        data_format="prompt-completion",
        map=["prompt=question", "completion=answer"],
        eval_rows=100,
        max_steps=100,
        global_batch_size=4,
    )
    before, after = run.result["eval_before"]["loss"], run.result["eval_after"]["loss"]
    return [Claim("held_out_loss_gain", before - after, ">", 0)]
