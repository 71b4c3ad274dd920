"""Being told to stop while nothing is trained: at once, where all that there is to keep is kept already."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import FinetuneError
from finetune.rank import run_rank
from finetune.records import StopFlag, read_lines
from finetune.rollout import local
from tests.train.rewards import __file__ as REWARDS
from tests.train.runs import beats, make_prompts_run, make_run, metrics, ragged_examples


class After(StopFlag):
    """Set as soon as a file holds something that a training writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def is_set(self) -> bool:  # type: ignore[override]
        return self.path.exists() and self.path.stat().st_size > 0


def make(method: str, folder: Path) -> Path:
    if method == "sft":
        return make_run(folder, ragged_examples(8), ragged_examples(6, seed=1), max_steps=2)
    verifier = [f"{REWARDS}:even"]
    return make_prompts_run(folder, num_eval=4, max_steps=2, verifier=verifier, eval_rows=4)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_stop_during_the_measurement_before_the_first_step_ends_it(method: str, tmp_path: Path) -> None:
    run = make(method, tmp_path / "run")
    with pytest.raises(FinetuneError) as caught:
        run_rank(run, 0, 1, None, After(run / "heartbeat" / "rank0"))  # from its beginning
    assert caught.value.code == "stopped"
    assert read_lines(run / "metrics.jsonl") == []
    assert not (run / "checkpoints").exists()
    assert "evaluated" not in [event["kind"] for event in read_lines(run / "events.jsonl")]


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_stop_during_the_measurement_after_the_last_step_ends_it_and_can_be_resumed(
    method: str, tmp_path: Path
) -> None:
    run = make(method, tmp_path / "run")
    with pytest.raises(FinetuneError) as caught:
        run_rank(run, 0, 1, None, After(run / "checkpoints" / "step-2" / "manifest.json"))
    assert caught.value.code == "stopped"
    assert [line["step"] for line in metrics(run)] == [1, 2]
    assert not (run / "adapter").exists()
    result = run_rank(run, 0, 1, None, StopFlag())
    assert (result.status, result.steps, result.facts["resumed_from"]) == ("succeeded", 2, 2)
    assert (run / "adapter" / "adapter_model.safetensors").exists()


def test_a_stop_between_steps_is_left_to_the_loop_which_saves(tmp_path: Path) -> None:
    held_out = ragged_examples(6, seed=1)
    run = make_run(tmp_path / "run", ragged_examples(8), held_out, max_steps=4, eval_every=1)
    result = run_rank(run, 0, 1, None, After(run / "metrics.jsonl"))
    assert (result.status, result.steps) == ("stopped", 2)
    assert (run / "checkpoints" / "step-2" / "manifest.json").exists()


def test_a_batch_that_is_sampled_ahead_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold up the end of the process, and its heartbeats would hide that the rank is done."""
    at_once = local._next_logits

    def slowly(*given: Any) -> Any:
        time.sleep(0.05)
        return at_once(*given)

    monkeypatch.setattr(local, "_next_logits", slowly)
    settings = {"max_staleness": 1, "max_completion_tokens": 40, "max_steps": 4}
    run = make_prompts_run(tmp_path / "run", verifier=[f"{REWARDS}:even"], **settings)
    result = run_rank(run, 0, 1, None, After(run / "metrics.jsonl"))
    assert (result.status, result.steps) == ("stopped", 2)
    ends = time.monotonic() + 1.0
    while any(thread.name.startswith("sampling_") for thread in threading.enumerate()):
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert beats(run, 0)["done"]
    assert not (run / "rollouts" / "step-000003.jsonl").exists()
