"""The audit agrees with what was sampled, and finds one call deleted, one id altered, one sum that lies."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.auditing import audit
from finetune.errors import FinetuneError
from finetune.rollout.engine import Call, Completion, Fault, Sampling
from finetune.rollout.ledger import Rollout, RolloutBatch, RolloutFiles, account
from finetune.rollout.served import ServedEngine
from finetune.train.rollouts import with_advantages
from tests.train.agent_batches import agent_rollout, conversation


class Echo:
    """Answers each call with the completion that is known for its seed."""

    def __init__(self, known: dict[int, Completion]) -> None:
        self.known = known

    def sample(self, calls: list[Call], sampling: Sampling) -> list[list[Completion | Fault]]:
        return [[self.known[one.seed]] for one in calls]

    def close(self) -> None:
        """Nothing to leave behind."""


def write(run: Path, rollouts: list[Rollout]) -> Path:
    """Write a batch as a run does, with what an engine said of each of its calls, and the metrics of the step."""
    calls = [call for one in rollouts for call in one.calls]
    for number, call in enumerate(calls):
        call.sampling = {"seed": number}
    known = {
        call.sampling["seed"]: Completion(call.completion_ids, call.logprobs, True, str(call.version))
        for call in calls
    }
    with_advantages(rollouts, "group")
    engine = ServedEngine(Echo(known))  # type: ignore[arg-type]
    engine.sample([Call(call.prompt_ids, call.sampling["seed"]) for call in calls], Sampling(8, []))
    RolloutFiles(run / "rollouts").write(RolloutBatch(1, 0, "d", rollouts, served=engine.records))
    trained = {
        one.id: [-1.0 for call in one.used_calls for _ in call.completion_ids]
        for one in rollouts
        if one.is_trained
    }
    RolloutFiles(run / "rollouts").write_trained(1, trained)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "ledger": account(rollouts)}) + "\n")
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    draw = random.Random(2)
    rollouts = [
        agent_rollout(f"1-0-{sample}", 0, sample, reward, conversation(f"1-0-{sample}", draw, 3))
        for sample, reward in enumerate([1.0, 0.0, None])
    ]
    rollouts[0].calls[2].purpose = "helper"
    return write(tmp_path, rollouts)


def change(run: Path, name: str, edit: Callable[[list[dict[str, Any]]], None]) -> None:
    """Edit the lines of a file of the rollouts."""
    path = run / "rollouts" / name
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_was_sampled_is_all_accounted_for(run: Path) -> None:
    answer = audit(run)
    assert (answer.errors, answer.status) == ([], "done")
    data = answer.data
    assert (data["sampled"], data["matched"], data["trained"]) == (9, 9, 5)
    assert data["excluded"] == {"helper": 1, "rollout_agent": 3}


EDITS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Any], str]] = {
    "a call deleted": (
        "step-000001.jsonl",
        lambda lines: lines[1]["calls"].pop(),
        "that no record holds",
    ),
    "a token altered": (
        "step-000001.jsonl",
        lambda lines: lines[2]["calls"][1]["completion_ids"].__setitem__(0, 4),
        "the engine served no such tokens",
    ),
    "a token of a prompt altered": (
        "step-000001.jsonl",
        lambda lines: lines[2]["calls"][0]["prompt_ids"].__setitem__(0, 4),
        "the engine served no such tokens",
    ),
    "a log-prob lost": (
        "step-000001.jsonl",
        lambda lines: lines[1]["calls"][0]["logprobs"].pop(),
        "log-probs",
    ),
    "a rollout deleted": ("step-000001.jsonl", lambda lines: lines.pop(), "its head says 3"),
    "a call said to be unused": (
        "step-000001.jsonl",
        lambda lines: lines[1]["calls"][1].update(status="unused"),
        "its ledger says",
    ),
    "an engine's record deleted": (
        "served-step-000001.jsonl",
        lambda lines: lines.pop(),
        "the engine served no such tokens",
    ),
    "fewer tokens trained": (
        "trained-000001.jsonl",
        lambda lines: lines[1]["logprobs"].pop(),
        "trained",
    ),
    "a log-prob altered": (
        "step-000001.jsonl",
        lambda lines: lines[1]["calls"][0]["logprobs"].__setitem__(0, -50.0),
        "the engine gave other log-probs",
    ),
    "an advantage altered": (
        "step-000001.jsonl",
        lambda lines: lines[1].update(advantage=99.0),
        "its group's rewards give 0.70",
    ),
    "a reward altered": (
        "step-000001.jsonl",
        lambda lines: lines[1].update(reward=-1.0),
        "its group's rewards give -0.70",
    ),
    "an advantage of what is not trained": (
        "step-000001.jsonl",
        lambda lines: lines[3].update(advantage=0.5),
        "its group's rewards give 0.0",
    ),
    "a rollout not trained": (
        "trained-000001.jsonl",
        lambda lines: lines.pop(1),
        "1-0-0: said to be trained, and not there",
    ),
    "another ledger in the head": (
        "step-000001.jsonl",
        lambda lines: lines[0]["ledger"].update(trained=3),
        "its ledger says",
    ),
}


@pytest.mark.parametrize(("name", "edit", "told"), EDITS.values(), ids=EDITS)
def test_what_was_changed_is_found(
    name: str, edit: Callable[[list[dict[str, Any]]], None], told: str, run: Path
) -> None:
    change(run, name, edit)
    answer = audit(run)
    assert answer.errors[0].code == "audit_failed"
    assert any(told in error.message for error in answer.errors), [str(error) for error in answer.errors]


def test_metrics_with_another_ledger_are_found(run: Path) -> None:
    told = json.loads((run / "metrics.jsonl").read_text())
    told["ledger"]["trained"] = 1
    (run / "metrics.jsonl").write_text(json.dumps(told) + "\n")
    assert "metrics.jsonl has another ledger" in audit(run).errors[0].message


def test_without_the_engines_account_nothing_is_proved(run: Path) -> None:
    (run / "rollouts" / "served-step-000001.jsonl").unlink()
    assert "what the engine served is not known" in audit(run).errors[0].message


@pytest.mark.parametrize("kept", ["served-step", "trained", "metrics"])
def test_the_records_of_a_step_that_are_not_there_are_missed(kept: str, run: Path) -> None:
    """Each of engine, trainer and metrics tells of the step by itself."""
    folder = run / "rollouts"
    text = (folder / "step-000001.jsonl").read_text()
    text = text.replace('"step": 1', '"step": 2').replace('"step":1', '"step":2')
    (folder / "step-000002.jsonl").write_text(text)
    for kind in ("served-step", "trained"):
        (folder / f"{kind}-000002.jsonl").write_text((folder / f"{kind}-000001.jsonl").read_text())
        if kind != kept:
            (folder / f"{kind}-000001.jsonl").unlink()
    if kept != "metrics":
        (run / "metrics.jsonl").unlink()
    (folder / "step-000001.jsonl").unlink()
    (error,) = audit(run).errors
    assert "is not there" in error.message
    assert "step-000001.jsonl" in error.message


def test_steps_that_train_on_one_batch_have_one_file(run: Path) -> None:
    settings = {"passes": {"value": 2}, "scale_rewards": {"value": "group"}}
    (run / "plan.json").write_text(json.dumps({"settings": settings}))
    told = json.loads((run / "metrics.jsonl").read_text())
    (run / "metrics.jsonl").write_text("".join(json.dumps(told | {"step": step}) + "\n" for step in (1, 2)))
    assert audit(run).errors == []
    settings["scale_rewards"]["value"] = "none"
    (run / "plan.json").write_text(json.dumps({"settings": settings}))
    assert "its group's rewards give 0.5" in audit(run).errors[0].message


def test_a_run_without_rollouts_says_so(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="holds no rollouts"):
        audit(tmp_path)
