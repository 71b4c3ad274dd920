"""Rows on grpo with real vLLM engines: it learns from its own samples, and an engine that dies costs nothing but time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from proof.claims import ROOT, Claim
from proof.product import Run, run_command, run_method, run_sft

MODEL = "builtin:smollm2-135m"
SETTINGS: dict[str, object] = {
    "model": MODEL,
    "data": "builtin:arithmetic",
    "eval_rows": 500,
    "eval_samples": 0,
    "max_steps": 40,
    "max_completion_tokens": 16,
    "learning_rate": 1e-4,
    "checkpoint_every": 20,
}
TIMEOUT_S = 600
SFT_STEPS = 25  # few, so that there is more to learn: after 60 the second gain was too small for its interval
TRAINED = {"direct", "probe", "digest"}  # how a trained version is proved; base: the untouched model
NEARER = 3.0  # times nearer to the version than to the one before: what log-probs alone must show


def grpo_lift(folder: Path) -> list[Claim]:
    """40 steps from the base weights; 500 held-out questions answered greedily before and after. Either bound is enough."""
    run = run_method("grpo", folder / "run", **SETTINGS)
    lift = run.result["lift"]
    by_interval = Claim("lift_low", lift["low"], ">=", 0.12)
    return [
        Claim("held_out_rows", lift["num_pairs"], "==", 500),
        Claim("steps", len(run.metrics), "==", 40),
        Claim("seconds", run.manifest["duration_s"], "<=", 600),
        *sync_claims(run.events),
        by_interval if by_interval.holds else Claim("lift_mean", lift["mean"], ">=", 0.20),
    ]


def grpo_after_sft(folder: Path) -> list[Claim]:
    """A short SFT, then 40 steps of grpo from its adapter: the interval of the second gain lies above zero."""
    first = run_sft(
        folder / "sft",
        model=MODEL,
        data="builtin:arithmetic",
        eval_rows=100,
        max_steps=SFT_STEPS,
        global_batch_size=16,
        learning_rate=5e-4,
    )
    run = run_method("grpo", folder / "grpo", **SETTINGS, init_adapter=first.folder / "adapter")
    lift = run.result["lift"]
    return [
        Claim("held_out_rows", lift["num_pairs"], "==", 500),
        Claim("accuracy_after_sft", run.result["eval_before"]["accuracy"], ">=", 0.2),
        Claim("second_lift_low", lift["low"], ">", 0),
    ]


def grpo_engine_kill(folder: Path) -> list[Claim]:
    """kill -9 of the engine while it samples: it is started again, given the weights, proved, and the step completes."""
    settings = SETTINGS | {"eval_rows": 20, "max_steps": 4, "checkpoint_every": 4}
    run = Run(folder / "run")
    with open(f"{run.folder}.log", "w") as log:
        process = subprocess.Popen(
            run_command("grpo", run.folder, **settings), stdout=log, stderr=log, cwd=ROOT
        )
    kill_while_sampling(run)
    code = process.wait(TIMEOUT_S)
    return [
        Claim("exit_code", code, "==", 0),
        Claim("steps_once", int([line["step"] for line in run.metrics] == [1, 2, 3, 4]), "==", 1),
        *sync_claims(run.events),
        *restart_claims(run.events),
        Claim("rollouts_lost", sum(line["rollouts_lost"] for line in run.metrics), "==", 0),
        Claim("largest_mismatch", max(line.get("logp_gap_mean", 0.0) for line in run.metrics), "<", 0.1),
    ]


def sync_claims(events: list[dict[str, Any]]) -> list[Claim]:
    """Every delivery was proved by a method that proves, and trained versions were among them."""
    syncs = [event for event in events if event["kind"] == "sync"]
    proved = [event for event in syncs if event.get("sync_method") in {"base", *TRAINED}]
    versions = {event["sync_version"] for event in proved if event["sync_method"] in TRAINED}
    return [
        Claim("unproved_syncs", len(syncs) - len(proved), "==", 0),
        Claim("trained_versions", len(versions), ">=", 2),
    ]


def restart_claims(events: list[dict[str, Any]]) -> list[Claim]:
    """Each engine that was started again holds the version that was delivered last, and was proved to.

    Digests prove by themselves; log-probs do by a margin.
    """
    resynced = reproved = 0
    delivered = None
    for event in events:
        if event["kind"] == "sync":
            delivered = event.get("sync_version")
        if event["kind"] == "engine_restarted":
            margin = event.get("sync_margin")
            resynced += delivered is not None and event.get("sync_version") == delivered
            reproved += event.get("sync_method") == "digest" or (
                event.get("sync_method") in TRAINED and margin is not None and margin["ratio"] > NEARER
            )
    restarts = sum(event["kind"] == "engine_restarted" for event in events)
    return [
        Claim("restarts", restarts, "==", 1),
        Claim("resynced", resynced, "==", 1),
        Claim("reproved", reproved, "==", 1),
    ]


def kill_while_sampling(run: Run) -> None:
    """Kill the engine's processes once the second step samples."""
    deadline = time.monotonic() + TIMEOUT_S
    first = run.folder / "rollouts" / "step-000001.jsonl"
    while not (first.exists() and heard(run).get("operation", "").startswith("sampl")):
        if time.monotonic() > deadline:
            raise RuntimeError("the second step never began to sample")
        time.sleep(0.01)
    time.sleep(0.3)
    for pid in engine_processes(heard(run)["pid"]):
        os.kill(pid, signal.SIGKILL)


def heard(run: Run) -> dict[str, Any]:
    path = run.folder / "heartbeat" / "rank0"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def engine_processes(rank: int) -> list[int]:
    """Return the processes that the rank's children started: the server's own, not the guards that watch over them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    guards = {pid for pid, parent in parents.items() if parent == rank}
    return [pid for pid, parent in parents.items() if parent in guards and is_server(pid)]


def is_server(pid: int) -> bool:
    return b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
