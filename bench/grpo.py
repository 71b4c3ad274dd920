"""GRPO: seconds of a step against trl's GRPOTrainer, interleaved; seconds of an adapter sync; memory over rollouts.

A step is everything between the ends of two: delivery of the weights and its proof, sampling, scoring, training. Both
sides make 64 completions of 16 tokens at most, of 8 prompts of builtin:arithmetic, from SmolLM2-135M in bf16. The reward
differs within groups: groups of equal rewards, of which arithmetic makes many, cost ours no training and trl the full one.

The rows, of the parts grpo-step, grpo-sync and grpo-memory:
    grpo-step-s           limit: the operations of sampling (each prompt read once) and of training / matrix rate
    grpo-tokens           mean tokens of a completion on both sides: that they did the same work
    grpo-adapter-sync-s   an adapter to the real engine, without its proof; grpo-adapter-proved-s: with it
    grpo-peak-memory      GB of the training process at 512 rollouts a step, beside its engine; peer: ours at 8
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.ceiling import ceiling_of
from bench.measure import ROOT, Measured, measure, model_folder
from bench.report import lone_row, row_of

PROMPTS, GROUP, TOKENS = 8, 8, 16
LEARNING_RATE = 1e-4
FEW, MANY = 8, 512
# Forwards of the same rows on both sides, so that only the number of rollouts differs.
MEMORY_SETTINGS = {
    "batch_size_per_gpu": FEW,
    "group_size": 4,
    "max_steps": 2,
}


def grpo_step(folder: Path, pairs: int, steps: int) -> list[dict[str, Any]]:
    """Return the rows of a step after `pairs` pairs of runs of `steps` steps."""
    ours, peers = [], []
    for pair in range(pairs):
        ours.append(run_ours(folder / f"ours{pair}", max_steps=steps, sync="merged"))
        peers.append(run_peer(folder / f"peer{pair}", steps))
    seconds = [[run.steady_step_s for run in side] for side in (ours, peers)]
    lengths = [
        [mean_length(folder / f"ours{pair}") for pair in range(pairs)],
        [statistics.mean(_json(folder / f"peer{pair}" / "lengths.json")) for pair in range(pairs)],
    ]
    limit = least_seconds(folder / "ours0", ceiling_of(model_folder()))
    return [
        row_of("grpo-step-s", "s", *seconds, limit=limit),
        row_of("grpo-tokens", "tokens", *lengths, limit=TOKENS),
    ]


def grpo_sync(folder: Path, pairs: int, steps: int) -> list[dict[str, Any]]:
    """Return the rows of a delivery, over all but the first of `pairs` runs of `steps` steps."""
    syncs = []
    for run in (folder / f"run{number}" for number in range(pairs)):
        run_ours(run, max_steps=steps, sync="adapter")
        syncs += later_syncs(run)
    return [
        lone_row("grpo-adapter-sync-s", "s", [line["sync_s"] for line in syncs]),
        lone_row("grpo-adapter-proved-s", "s", [line["sync_s"] + line["sync_proof_s"] for line in syncs]),
    ]


def grpo_memory(folder: Path, pairs: int, steps: int) -> list[dict[str, Any]]:
    """Return the row of the peak of memory; it needs no repetition."""
    few, many = (peak_gb(folder / f"memory{count}", count) for count in (FEW, MANY))
    return [row_of("grpo-peak-memory", "GB", [many], [few])]


def ours_command(out: Path, **settings: object) -> list[str]:
    """Return the command of a GRPO run of ours; `settings` replace those of the comparison."""
    fixed: dict[str, object] = {
        "model": "builtin:smollm2-135m",
        "data": "builtin:arithmetic",
        "verifier": f"{ROOT / 'bench' / 'reward.py'}:odd_share",
        "dtype": "bf16",
        "device": "cpu",
        "global_batch_size": PROMPTS * GROUP,
        "group_size": GROUP,
        "max_completion_tokens": TOKENS,
        "learning_rate": LEARNING_RATE,
        "eval_rows": 1,  # measured before the first step and after the last one, where nothing is timed
        "eval_samples": 0,
    }
    flags = [
        word
        for name, value in {**fixed, **settings}.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    script = str(ROOT / "scripts" / "run_finetune_local.py")
    return [sys.executable, script, "--json", "--method", "grpo", "--out", str(out), *flags]


def run_ours(out: Path, **settings: object) -> Measured:
    return measure(ours_command(out, **settings), out / "metrics.jsonl", out.with_suffix(".log"))


def run_peer(out: Path, steps: int) -> Measured:
    command = [sys.executable, "-m", "bench.grpo_peer", str(model_folder()), str(out), str(steps)]
    return measure(command, out / "metrics.jsonl", out.with_suffix(".log"))


def peak_gb(out: Path, rollouts: int) -> float:
    """Return the peak of the training process of a run with so many rollouts a step, all of which it trains on."""
    run_ours(out, **MEMORY_SETTINGS, global_batch_size=rollouts)
    if untrained := [line["step"] for line in _lines(out / "metrics.jsonl") if not line["num_supervised"]]:
        raise RuntimeError(f"{out}: nothing was trained in steps {untrained}, so their memory says nothing")
    return float(max(_json(out / "run.json")["peak_memory_bytes_per_rank"])) / 1e9


def later_syncs(run: Path) -> list[dict[str, Any]]:
    """Return the deliveries of the versions after the first trained one; the base needs none."""
    events = [line for line in _lines(run / "events.jsonl") if line["kind"] == "sync"]
    adapters = [line for line in events if line["sync_method"] not in ("base", "unchanged")]
    if len(adapters) < 2:
        raise RuntimeError(f"{run}: {len(adapters)} adapters were delivered, 2 are needed")
    return adapters[1:]


def mean_length(run: Path) -> float:
    """Return the mean number of tokens of a completion over the whole run."""
    return statistics.mean(line["completion_length_mean"] for line in _lines(run / "metrics.jsonl"))


def least_seconds(run: Path, ceiling: dict[str, float]) -> float:
    """Return how long the matrix products of a step of this run take at the measured rate, averaged over its steps.

    Sampling reads each prompt once and each sampled token; training goes forward and, adapters alone having gradients
    of weights, backward once through body and activations. The head is needed for sampled tokens alone.
    """
    operations = []
    for path in sorted((run / "rollouts").glob("step-*.jsonl")):
        rollouts = _lines(path)[1:]
        prompts = {rollout["group"]: len(rollout["prompt_ids"]) for rollout in rollouts}
        sampled = sum(len(rollout["completion_ids"]) for rollout in rollouts)
        read = sum(prompts.values()) + sampled
        trained = sampled + sum(len(rollout["prompt_ids"]) for rollout in rollouts)
        body = 2 * ceiling["body"] * read + 4 * ceiling["body"] * trained
        operations.append(body + (2 + 4) * ceiling["head"] * sampled)
    return statistics.mean(operations) / ceiling["matrix_rate"]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _json(path: Path) -> Any:
    return json.loads(path.read_text())
