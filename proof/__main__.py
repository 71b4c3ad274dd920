"""Run the long rows, all or one, and append what they measured to proof.jsonl.

    python -m proof [ROW ...]

Exits with 1 where a row did not pass; a row whose data is not on this machine is passed over and said so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from proof.agent_program import opencode_story
from proof.agents import agent_mini, agent_opencode, loop_lift
from proof.answers import quick_answers
from proof.claims import Claim, NotHere, append
from proof.equality import equality_smollm2
from proof.forecasts import memory_forecast
from proof.grpo import grpo_after_sft, grpo_engine_kill, grpo_lift
from proof.grpo_peer import grpo_peer
from proof.kills import kills_parent, kills_rank0, kills_rank1
from proof.learning import arithmetic_lift, gsm8k_loss, quickstart
from proof.long_tests import long_tests
from proof.measured import bench, grpo_memory, grpo_step, grpo_sync

ROWS: dict[str, Callable[[Path], list[Claim]]] = {
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
}


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in ROWS]:
        print(f"no such row: {', '.join(unknown)}; there are: {', '.join(ROWS)}", file=sys.stderr)
        return 2
    outcomes = [prove(name) for name in names or ROWS]  # every row runs, also after one that failed
    return int(not all(outcomes))


def prove(name: str) -> bool:
    """Run one row and append it; return False where it did not pass."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"finetune-proof-{name}-") as folder:
        try:
            claims = ROWS[name](Path(folder))
        except NotHere as reason:
            print(f"{name}: passed over: {reason}")
            return True
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            claims = [Claim("ran_to_its_end", 0, "==", 1)]
    passed = append(name, claims, time.perf_counter() - started)
    for claim in claims:
        print(
            f"{name}: {claim.name} {claim.figure} {claim.relation} {claim.limit:g}: {'holds' if claim.holds else 'FAILS'}"
        )
    return passed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
