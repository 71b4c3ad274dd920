"""Checkpoints appear whole, are found again newest first, and pass over what is damaged."""

import json
from pathlib import Path

import pytest
import torch

from finetune.errors import FinetuneError
from finetune.model.checkpoint import (
    Checkpoint,
    Progress,
    complete_steps,
    newest_checkpoint,
    read_checkpoint,
    rng_state,
    rotate_checkpoints,
    set_rng_state,
    write_checkpoint,
)

WEIGHTS = {"layer.lora_A.weight": torch.ones(2, 3), "layer.lora_B.weight": torch.full((3, 2), 0.5)}


def write(run: Path, step: int, weights: dict[str, torch.Tensor] = WEIGHTS) -> Path:
    progress = Progress(step, world_size=1, recent_losses=[float(step)])
    checkpoint = Checkpoint(
        run, progress, weights, {"exp_avg/a": torch.zeros(2)}, [rng_state(torch.device("cpu"))]
    )
    return write_checkpoint(run, checkpoint, is_adapted=True, extra_files={"adapter_config.json": "{}"})


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    found = read_checkpoint(folder)
    assert found.progress == Progress(3, 1, recent_losses=[3.0])
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in WEIGHTS.items())
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.safetensors", "rng.json", "progress.json"]
)
def test_cut_file_makes_the_older_checkpoint_the_newest(name: str, tmp_path: Path) -> None:
    """CE-01."""
    older, newer = write(tmp_path, 3), write(tmp_path, 4)
    with open(newer / name, "r+b") as file:
        file.truncate(10)
    folder, passed_over = newest_checkpoint(tmp_path)
    assert folder == older
    assert len(passed_over) == 1
    assert "step-4" in passed_over[0]
    assert name in passed_over[0]


def test_missing_file_and_missing_manifest_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (write(tmp_path, 3) / "rng.json").unlink()
    (write(tmp_path, 4) / "manifest.json").unlink()
    folder, passed_over = newest_checkpoint(tmp_path)
    assert folder is not None
    assert folder.name == "step-2"
    assert len(passed_over) == 1  # without a manifest it was never complete


@pytest.mark.parametrize(
    ("kept", "best", "left"), [(1, None, [4]), (2, 1, [1, 3, 4]), (9, None, [1, 2, 3, 4])]
)
def test_rotation_keeps_the_newest_and_the_best(
    kept: int, best: int | None, left: list[int], tmp_path: Path
) -> None:
    """CE-03."""
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    (tmp_path / "checkpoints" / ".step-9.123").mkdir()
    rotate_checkpoints(tmp_path, kept, best)
    assert complete_steps(tmp_path) == left
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(left)


def test_tensor_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    broken = {**WEIGHTS, "layer.lora_B.weight": torch.tensor([[float("nan")]])}
    with pytest.raises(FinetuneError) as caught:
        write(tmp_path, 1, broken)
    assert caught.value.code == "non_finite"
    assert complete_steps(tmp_path) == []


def test_empty_tensor_is_never_saved(tmp_path: Path) -> None:
    """CE-08."""
    with pytest.raises(FinetuneError) as caught:
        write(tmp_path, 1, {**WEIGHTS, "layer.lora_A.weight": torch.zeros(0, 3)})
    assert caught.value.code == "bad_checkpoint"


def test_random_state_goes_on_where_it_was() -> None:
    torch.manual_seed(5)
    torch.rand(3)
    saved = json.loads(json.dumps(rng_state(torch.device("cpu"))))
    expected = torch.rand(4)
    torch.manual_seed(6)
    set_rng_state(saved, torch.device("cpu"))
    assert torch.equal(torch.rand(4), expected)


def test_best_evaluation_is_remembered() -> None:
    progress = Progress(step=1, world_size=1)
    assert progress.take_eval(2.0)
    progress.step = 2
    assert not progress.take_eval(2.5)
    assert (progress.best_step, progress.best_loss, progress.evals_without_gain) == (1, 2.0, 1)
    progress.step = 3
    assert progress.take_eval(1.0)
    assert (progress.best_step, progress.evals_without_gain) == (3, 0)
