"""The whole command with agents, on a CPU with the real parts: taught a little, `loop` works on a task in real boxes for two
steps, and what was trained is audited and shown.
"""

import json
import shutil
from typing import Any

import pytest

from finetune.data.chat import ChatFormat
from finetune.domains.tasks import load_tasks
from finetune.model.builtin import load_tokenizer
from finetune.model.source import resolve_source
from proof.agents import asked
from proof.oracle import conversation
from proof.product import Run, run_method, run_sft

MODEL, TASK = "builtin:tiny?context=2048", "builtin:desk/append-line"
COMMON: dict[str, Any] = {
    "max_length": 2048,
    "eval_fraction": 0,
    "device": "cpu",
    "dtype": "fp32",
    "threads": 1,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A model of a million weights that has learned its task almost by heart, and then two steps of grpo on it."""
    folder = tmp_path_factory.mktemp("agents")
    chat = ChatFormat(load_tokenizer(resolve_source(MODEL)), tools=True)
    row = conversation(load_tasks(TASK)[0], chat, "loop", None)
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    taught = run_sft(
        folder / "sft",
        model=MODEL,
        data=folder / "rows.jsonl",
        tuning="full",
        max_steps=64,
        global_batch_size=1,
        learning_rate=3e-3,
        schedule="constant",
        **COMMON,
    )
    return run_method(
        "grpo",
        folder / "grpo",
        model=taught.folder / "merged",
        tasks=TASK,
        engine="local",
        group_size=8,
        global_batch_size=8,
        max_steps=2,
        max_completion_tokens=120,
        max_agent_steps=2,
        learning_rate=1e-4,
        **COMMON,
    )


STEPS = 32


def test_two_steps_of_agents_at_work_learn_from_their_differences(run: Run) -> None:
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert sum(line["groups_total"] - line["groups_zero_variance"] for line in run.metrics) >= 1
    for line in run.metrics:
        assert line["rollouts_failed"] == {}
        assert line["ledger"]["calls"]["trained"] == line["ledger"]["calls"]["sampled"] > 8
        assert line["logp_gap_mean"] is None or line["logp_gap_mean"] < 1e-4
    assert run.adapter_path.exists()


def test_the_audit_matches_every_call(run: Run) -> None:
    found = asked("rollouts", "audit", str(run.folder))
    assert found["sampled"] == found["matched"] == found["trained"] > 16
    assert found["num_faults"] == 0


def test_the_report_shows_conversations_as_segments(run: Run) -> None:
    asked("report", str(run.folder))
    page = (run.folder / "report.html").read_text()
    for told in ("what the verifier said", "list.txt", '"history":"first"'):
        assert told in page, told
