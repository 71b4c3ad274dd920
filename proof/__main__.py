"""Run the long rows, all or one, and append what they measured to proof.jsonl.

    python -m proof [ROW ...]

Exits with 1 where a row did not pass. A row that lacks what it needs on this machine is passed over and named at the end:
it has no line in proof.jsonl, and is a failure where the row was asked for by its name.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from proof.agent_program import opencode_story
from proof.agents import agent_mini, agent_opencode, loop_lift
from proof.answers import quick_answers
from proof.claims import Claim, Figure, NotHere, append
from proof.equality import equality_smollm2
from proof.forecasts import memory_forecast
from proof.grpo import grpo_after_sft, grpo_engine_kill, grpo_lift
from proof.grpo_peer import grpo_peer
from proof.kills import kills_parent, kills_rank0, kills_rank1
from proof.learning import arithmetic_lift, gsm8k_loss, quickstart
from proof.long_tests import long_tests
from proof.measured import bench, gpu_check, grpo_memory, grpo_step, grpo_sync, make_test

ROWS: dict[str, Callable[[Path], Sequence[Figure]]] = {
    "make-test": make_test,
    "quickstart": quickstart,
    "arithmetic-lift": arithmetic_lift,
    "gsm8k-loss": gsm8k_loss,
    "equality-smollm2": equality_smollm2,
    "grpo-peer": grpo_peer,
    "memory-forecast": memory_forecast,
    "long-tests": long_tests,
    "grpo-lift": grpo_lift,
    "grpo-after-sft": grpo_after_sft,
    "grpo-engine-kill": grpo_engine_kill,
    "kills-parent": kills_parent,
    "kills-rank0": kills_rank0,
    "kills-rank1": kills_rank1,
    "agent-opencode": agent_opencode,
    "agent-mini": agent_mini,
    "loop-lift": loop_lift,
    "quick-answers": quick_answers,
    "opencode-story": opencode_story,
    "bench": bench,
    "grpo-step": grpo_step,
    "grpo-sync": grpo_sync,
    "grpo-memory": grpo_memory,
    "gpu-check": gpu_check,
}


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in ROWS]:
        print(f"no such row: {', '.join(unknown)}; there are: {', '.join(ROWS)}", file=sys.stderr)
        return 2
    failed: list[str] = []
    passed_over: dict[str, str] = {}
    for name in names or ROWS:  # every row runs, also after one that failed
        try:
            if not prove(name):
                failed.append(name)
        except NotHere as reason:
            passed_over[name] = str(reason)
    for name, why in passed_over.items():
        print(f"{name}: NOT MEASURED, passed over: {why}", file=sys.stderr)
    if failed:
        print(f"rows that did not pass: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed or (names and passed_over)))


def prove(name: str) -> bool:
    """Run one row and append it; return False where it did not pass. Raises NotHere, and then appends nothing."""
    started = time.perf_counter()
    figures: Sequence[Figure]
    with tempfile.TemporaryDirectory(prefix=f"finetune-proof-{name}-") as folder:
        try:
            figures = ROWS[name](Path(folder))
        except (RuntimeError, OSError, LookupError, ValueError, subprocess.SubprocessError) as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            figures = [Claim("ran_to_its_end", 0, "==", 1)]
    passed = append(name, figures, time.perf_counter() - started)
    for figure in figures:
        print(f"{name}: {_said(figure)}")
    return passed


def _said(figure: Figure) -> str:
    if not isinstance(figure, Claim):
        return f"{figure.name} {figure.figure}"
    return f"{figure.name} {figure.figure} {figure.relation} {figure.limit:g}: {'holds' if figure.holds else 'FAILS'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
