"""Rows on agents: a real model, real vLLM, real boxes and the real agent programs, from a short SFT to an audited run.

FINETUNE_OPENCODE names OpenCode's executable (bin/opencode of the npm package of the platform), FINETUNE_MINI the folder
of a virtual environment with mini-swe-agent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from proof.claims import ROOT, Claim, Fact, Figure, NotHere
from proof.learning import MODEL
from proof.oracle import CONTEXT, EASY, NEW_TOKENS, write_rows
from proof.product import Run, run_method, run_sft

TASKS = [f"builtin:desk/{name}" for name in EASY]
PROGRAMS = {"opencode": "FINETUNE_OPENCODE", "mini": "FINETUNE_MINI"}
COMMON: dict[str, object] = {
    "model": MODEL,
    "tasks": TASKS,
    "max_length": CONTEXT,
    "max_completion_tokens": NEW_TOKENS,
    "max_agent_steps": 4,
    "eval_fraction": 0,
    "device": "cpu",
}
SFT_STEPS = {"opencode": 10, "mini": 10, "loop": 8}  # few: what is solved always teaches nothing
LIFT, SEEDS = 0.15, (0, 1, 2)


def taught(folder: Path, harness: str) -> tuple[Path, Path | None]:
    """Return an adapter that was shown an oracle's conversations for some steps, and the agent program."""
    program = None
    if harness in PROGRAMS:
        name = PROGRAMS[harness]
        program = Path(os.environ.get(name, "/nowhere"))
        if not program.exists():
            raise NotHere(f"{name} names nothing that is there")
    rows = folder / "rows.jsonl"
    write_rows(rows, MODEL, harness, program, 40)
    run = run_sft(
        folder / "sft",
        model=MODEL,
        data=rows,
        max_length=CONTEXT,
        max_steps=SFT_STEPS[harness],
        global_batch_size=4,
        learning_rate=5e-4,
        schedule="constant",
        eval_fraction=0,
    )
    return run.folder / "adapter", program


def agent_opencode(folder: Path) -> list[Claim]:
    """OpenCode's tiny agent, two ranks: DDP for 4 steps, FSDP2 for 2."""
    adapter, program = taught(folder, "opencode")
    claims = online(folder / "ddp", "opencode", adapter, program, 4, "ddp")
    return claims + online(folder / "fsdp2", "opencode", adapter, program, 2, "fsdp2")


def agent_mini(folder: Path) -> list[Claim]:
    """mini-swe-agent, two ranks, DDP for 4 steps."""
    adapter, program = taught(folder, "mini")
    return online(folder / "ddp", "mini", adapter, program, 4, "ddp")


def online(
    folder: Path, harness: str, adapter: Path, program: Path | None, steps: int, parallel: str
) -> list[Claim]:
    """An online run of agents, 8 rollouts a step, 3 agents at once; audited and exported."""
    run = run_method(
        "grpo",
        folder,
        **COMMON,
        harness=harness,
        harness_program=program or "",
        init_adapter=adapter,
        num_gpus=2,
        parallel=parallel,
        agents=3,
        group_size=4,
        global_batch_size=8,
        max_steps=steps,
        learning_rate=1e-4,
    )
    metrics = run.metrics
    audited = asked("rollouts", "audit", str(folder))
    named = f"{parallel}_"
    varied = sum(
        line["groups_total"] - line["groups_zero_variance"] - line["groups_lone"] for line in metrics
    )
    failed = sum(sum(line["rollouts_failed"].values()) for line in metrics)
    exported = [export(folder, kind) for kind in ("adapter", "merged")]
    return [
        Claim(f"{named}steps", len(metrics), "==", steps),
        Claim(f"{named}groups_with_variance", varied, ">=", 1),
        Claim(f"{named}lora_b_norm", metrics[-1]["lora_b_norm"], ">", 0),
        Claim(f"{named}failures", failed, "==", 0),
        Claim(f"{named}retries", retries(run), "==", 0),
        Claim(f"{named}calls", audited["sampled"], ">", 0),
        Claim(f"{named}calls_unmatched", audited["sampled"] - audited["matched"], "==", 0),
        Claim(f"{named}audit_faults", audited["num_faults"], "==", 0),
        Claim(f"{named}exports_checked", sum(exported), "==", 2),
    ]


def retries(run: Run) -> int:
    """Return how often an agent was sent again because engine, box, program or verifier had failed: also where it went well then.

    Raises KeyError where a rollout does not say how many tries it took.
    """
    lines = [
        json.loads(line)
        for path in sorted((run.folder / "rollouts").glob("step-*.jsonl"))
        for line in path.read_text().splitlines()[1:]
    ]
    if not lines:
        raise RuntimeError(f"{run.folder} has no rollouts")
    return sum(line["agent"]["tries"] - 1 for line in lines)


def loop_lift(folder: Path) -> list[Figure]:
    """`loop` on the three easy tasks, 20 steps: two of three seeds must gain.

    33 rollouts a step stand for 32: a step is one group of each task, all of one size, and 32 is no multiple of 3. 11 of
    each is the nearest that is, so that each step shows every task equally often and a step's mean reward compares.
    """
    adapter, _ = taught(folder, "loop")
    gains: list[float] = []
    for seed in SEEDS:
        if sum(gain >= LIFT for gain in gains) == 2:
            break
        run = run_method(
            "grpo",
            folder / f"seed-{seed}",
            **COMMON | {"max_length": 1024},
            harness="loop",
            init_adapter=adapter,
            group_size=11,
            global_batch_size=33,
            max_steps=20,
            learning_rate=1e-4,
            seed=seed,
            agents=8,
        )
        gains.append(gain_of(run))
    return [
        *(Fact(f"gain_of_seed_{seed}", gain) for seed, gain in zip(SEEDS, gains, strict=False)),
        Claim("seeds_that_gain", sum(gain >= LIFT for gain in gains), ">=", 2),
    ]


def gain_of(run: Run) -> float:
    """Return the mean reward of the last five steps less that of the first five."""
    rewards = [line["reward_mean"] for line in run.metrics]
    return float(sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5)


def asked(*arguments: str) -> dict[str, Any]:
    """Return what a verb answers as its data; a verb that fails is an answer as well."""
    command = [sys.executable, str(ROOT / "scripts" / "finetune_cli.py"), *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    return dict(json.loads(done.stdout)["data"])


def export(run: Path, kind: str) -> bool:
    """Whether the export says that it read back what it wrote."""
    target = run.parent / f"{run.name}-{kind}"
    found = asked("export", str(run), "--to", str(target), "--kind", kind)
    return bool(found.get("folder"))
