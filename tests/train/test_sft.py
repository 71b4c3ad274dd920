"""A whole training in this process: steps, schedules, evaluation, endings and the guards that must fire."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.errors import FinetuneError
from finetune.model.policy import Policy
from finetune.parallel.world import World
from finetune.rank import read_job
from finetune.records import Example, Journal, StopFlag, TrainResult, read_lines
from finetune.train import sft, step
from tests.train.runs import adapter, make_run, metrics, ragged_examples


def train(run: Path) -> TrainResult:
    job, _ = read_job(run)
    return sft.train(job, World.single(), Journal(run), StopFlag())


def equal_examples(num_rows: int) -> list[Example]:
    return [
        Example(list(range(10, 30)), [0.0] * 8 + [1.0] * 12, row, "f", row + 1) for row in range(num_rows)
    ]


def test_five_rows_at_four_a_step_are_two_steps(tmp_path: Path) -> None:
    """LM-03, LM-04: the short step has the gradient of its one row, not a quarter of it; accumulation changes nothing."""
    norms = {}
    for name, settings in {"whole": {}, "one by one": {"batch_size_per_gpu": 1}}.items():
        run = make_run(
            tmp_path / name,
            equal_examples(5),
            global_batch_size=4,
            learning_rate=0.01,
            schedule="constant",
            **settings,
        )
        assert train(run).steps == 2
        assert sorted(row for line in metrics(run) for row in line["rows"]) == [0, 1, 2, 3, 4]
        norms[name] = [line["grad_norm"] for line in metrics(run)]
    one_row = make_run(
        tmp_path / "one row", equal_examples(1), max_steps=2, learning_rate=0.01, schedule="constant"
    )
    train(one_row)
    alone = [line["grad_norm"] for line in metrics(one_row)]
    for found in norms.values():
        assert found == pytest.approx(alone, rel=1e-4)  # four equal rows have the mean gradient of one


def test_learning_rate_follows_the_schedule_over_all_steps(tmp_path: Path) -> None:
    """LM-07."""
    run = make_run(
        tmp_path / "run", ragged_examples(5), global_batch_size=2, learning_rate=1e-3, schedule="linear"
    )
    train(run)
    assert [line["learning_rate"] for line in metrics(run)] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_matrix_moves_in_one_step(checkpointing: bool, tmp_path: Path) -> None:
    """LM-09."""
    run = make_run(tmp_path / "run", ragged_examples(4), max_steps=1, gradient_checkpointing=checkpointing)
    train(run)
    moved = [bool(tensor.any()) for name, tensor in adapter(run).items() if ".lora_B." in name]
    assert len(moved) == 28
    assert all(moved)


def test_held_out_loss_is_one_number_however_rows_are_grouped(tmp_path: Path) -> None:
    """LM-05, LM-08: sum over tokens / number of tokens, 3, 3 and 40 tokens long."""
    draw = torch.Generator().manual_seed(9)
    held_out = []
    for row, length in enumerate((3, 3, 40)):
        ids = torch.randint(5, 300, (length,), generator=draw).tolist()
        held_out.append(Example(ids, [0.0] + [1.0] * (length - 1), row, "made.jsonl", row + 1))
    found = []
    for number, tokens in enumerate((8, 100, 4096)):
        run = make_run(
            tmp_path / str(number), ragged_examples(3), held_out, max_steps=1, micro_batch_tokens=tokens
        )
        result = train(run)
        assert result.eval_before is not None
        assert result.eval_before["num_tokens"] == 43
        found.append(result.eval_before["loss"])
    model = _tiny()
    with torch.no_grad():
        sums = [
            float(model(torch.tensor([e.input_ids]), labels=torch.tensor([e.input_ids])).loss)
            * (len(e.input_ids) - 1)
            for e in held_out
        ]
    assert found == pytest.approx([sum(sums) / 43] * 3, abs=1e-5)


def _tiny() -> Any:
    from finetune.model.builtin import load_model
    from finetune.model.source import resolve_source

    return load_model(resolve_source("builtin:tiny"), torch.float32, "sdpa")


def test_packing_changes_neither_loss_nor_count(tmp_path: Path) -> None:
    """ML-17, at learning rate 0: a run that learns nothing says so and leaves no adapter."""
    lines = []
    for packing in (False, True):
        run = make_run(
            tmp_path / str(packing), ragged_examples(3), max_steps=1, learning_rate=0.0, packing=packing
        )
        with pytest.raises(FinetuneError) as caught:
            train(run)
        assert caught.value.code == "no_learning_signal"
        assert not (run / "adapter").exists()
        lines.append(metrics(run)[0])
    assert lines[0]["num_supervised"] == lines[1]["num_supervised"]
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], abs=1e-5)


def test_loss_that_is_not_finite_stops_before_it_reaches_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", ragged_examples(4), max_steps=3, checkpoint_every=1, global_batch_size=2)
    real, calls = sft.weighted_nll, []

    def breaks_at_second(*inputs: Any) -> Any:
        calls.append(1)
        return real(*inputs) * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(sft, "weighted_nll", breaks_at_second)
    with pytest.raises(FinetuneError) as caught:
        train(run)
    assert caught.value.code == "non_finite"
    assert caught.value.evidence["step"] == 2
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-1"]
    assert not (run / "adapter").exists()


def test_trained_weight_without_a_gradient_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", ragged_examples(4), max_steps=1)
    real = step.build_policy

    def with_idle_weight(*inputs: Any) -> Policy:
        policy = real(*inputs)
        policy.model.register_parameter("idle", torch.nn.Parameter(torch.ones(2)))
        return policy

    monkeypatch.setattr(step, "build_policy", with_idle_weight)
    with pytest.raises(FinetuneError, match="idle") as caught:
        train(run)
    assert caught.value.code == "no_gradient"


def test_every_forward_of_the_policy_has_its_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(
        tmp_path / "run", ragged_examples(4), max_steps=2, batch_size_per_gpu=1, global_batch_size=4
    )
    counts = {"policy": 0, "backward": 0}
    real = Policy.forward

    def counted(self: Policy, *inputs: Any) -> torch.Tensor:
        logps = real(self, *inputs)
        if logps.requires_grad:
            counts["policy"] += 1
            logps.register_hook(lambda _: counts.__setitem__("backward", counts["backward"] + 1))
        return logps

    monkeypatch.setattr(Policy, "forward", counted)
    train(run)
    assert counts["policy"] == counts["backward"] == 8  # 2 steps of 4 rows, one a forward


def test_early_stopping_ends_with_the_best_weights(tmp_path: Path) -> None:
    """Random rows cannot be learned beyond their own: the held-out loss rises soon."""
    settings = {
        "learning_rate": 0.02,
        "schedule": "constant",
        "eval_every": 1,
        "early_stopping": 2,
        "checkpoints_kept": 1,
    }
    run = make_run(tmp_path / "run", ragged_examples(4), ragged_examples(4, seed=8), max_steps=60, **settings)
    result = train(run)
    losses = {line["step"]: line["eval_loss"] for line in metrics(run)}
    best = min(losses, key=lambda number: losses[number])
    assert result.steps == best + 2 < 60
    assert result.facts["best_step"] == best
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == sorted(
        {f"step-{best}", f"step-{best + 2}"}
    )
    assert result.eval_after is not None
    assert result.eval_after["loss"] == pytest.approx(losses[best], abs=1e-6)
    kept = load_file(run / "checkpoints" / f"step-{best}" / "adapter_model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in adapter(run).items())


def test_lift_of_the_loss_is_paired_over_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", equal_examples(4), equal_examples(3), max_steps=4, learning_rate=0.01)
    result = train(run)
    assert result.lift is not None
    assert result.lift["of"] == "loss saved"
    assert result.lift["num_pairs"] == result.lift["wins"] == 3
    assert result.lift["low"] > 0
    assert result.eval_before is not None
    assert result.eval_after is not None
    assert result.lift["mean"] == pytest.approx(
        result.eval_before["loss"] - result.eval_after["loss"], abs=1e-5
    )


def test_full_tuning_leaves_a_model_that_loads(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        ragged_examples(4),
        ragged_examples(2, seed=3),
        max_steps=3,
        tuning="full",
        learning_rate=1e-3,
    )
    result = train(run)
    assert not (run / "adapter").exists()
    model = AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32)
    base = _tiny()
    moved = [
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, base.state_dict()[name])
    ]
    assert len(moved) > 30
    assert result.facts["trainable_parameters"] == sum(parameter.numel() for parameter in base.parameters())
    assert json.loads((run / "merged" / "generation_config.json").read_text())


def test_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path) -> None:
    """CE-01: the run goes on from the one before, and the end is the same."""
    straight = make_run(
        tmp_path / "straight",
        ragged_examples(6),
        max_steps=6,
        checkpoint_every=2,
        checkpoints_kept=9,
        global_batch_size=2,
    )
    train(straight)
    run = make_run(
        tmp_path / "run",
        ragged_examples(6),
        max_steps=6,
        checkpoint_every=2,
        checkpoints_kept=9,
        global_batch_size=2,
    )
    train(run)
    with open(run / "checkpoints" / "step-6" / "optimizer.safetensors", "r+b") as file:
        file.truncate(100)
    result = train(run)
    assert result.facts["resumed_from"] == 4
    warnings = [line for line in read_lines(run / "events.jsonl") if line["kind"] == "warning"]
    assert [line["code"] for line in warnings] == ["checkpoint_skipped"]
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(tensor, adapter(straight)[name]) for name, tensor in adapter(run).items())


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ragged_examples(4), max_steps=1)
    train(run)
    make_run(run, ragged_examples(4), max_steps=2, lora_targets="q_proj")
    with pytest.raises(FinetuneError) as caught:
        train(run)
    assert caught.value.code == "bad_checkpoint"


def test_tracker_repeats_the_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ragged_examples(4), max_steps=2, report_to="tensorboard")
    train(run)
    assert list((run / "tensorboard").iterdir())
