"""Checkpoints: whole folders that appear at once, carry the digest of every file, and load on any number of ranks.

A checkpoint is written under a temporary name and renamed when all of it is on disk; what has no manifest, or a file
that differs from its digest, was never complete and is passed over.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.records import folder_written_whole, to_json

MANIFEST = "manifest.json"
WEIGHTS = {True: "adapter_model.safetensors", False: "model.safetensors"}  # adapted or whole


@dataclass
class Progress:
    """What training must remember besides tensors: how far it is, and what it has seen on held-out rows."""

    step: int
    world_size: int
    best_step: int | None = None
    best_loss: float | None = None
    evals_without_gain: int = 0
    eval_before: dict[str, Any] | None = None
    recent_losses: list[float] | None = None
    has_moved: bool = False
    version: int = 0  # of the policy: how often its weights were changed
    digests: dict[str, str] | None = None  # grpo: of the newest versions' weights, by version

    def take_eval(self, loss: float) -> bool:
        """Count a held-out loss of this step and return whether it is the best so far."""
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step, self.evals_without_gain = loss, self.step, 0
            return True
        self.evals_without_gain += 1
        return False


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, read back."""

    folder: Path
    progress: Progress
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: list[dict[str, Any]]  # one a rank


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}"


def write_checkpoint(
    run_dir: Path, checkpoint: Checkpoint, is_adapted: bool, extra_files: dict[str, str]
) -> Path:
    """Write a checkpoint (rank 0 alone calls this) and return its folder.

    Raises FinetuneError(bad_checkpoint) where what lies on disk is not what was to be written: an empty or non-finite
    tensor, another key, another shape.
    """
    final = checkpoint_folder(run_dir, checkpoint.progress.step)
    shutil.rmtree(final, ignore_errors=True)  # one that was found damaged, or that a resumed run makes anew
    with folder_written_whole(final) as folder:
        _write_weights(folder, checkpoint.weights, is_adapted, extra_files)
        save_file(checkpoint.optimizer, folder / "optimizer.safetensors")
        (folder / "rng.json").write_text(json.dumps(checkpoint.rng))
        (folder / "progress.json").write_text(to_json(asdict(checkpoint.progress)))
        digests = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
        (folder / MANIFEST).write_text(to_json({"step": checkpoint.progress.step, "sha256": digests}))
    return final


def write_adapter(folder: Path, weights: dict[str, Tensor], extra_files: dict[str, str]) -> None:
    """Write a final adapter as a folder that appears at once; an older one of the same run is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    with folder_written_whole(folder) as temporary:
        _write_weights(temporary, weights, True, extra_files)


def _write_weights(
    folder: Path, weights: dict[str, Tensor], is_adapted: bool, extra_files: dict[str, str]
) -> None:
    save_file(weights, folder / WEIGHTS[is_adapted], metadata={"format": "pt"})
    for name, text in extra_files.items():
        (folder / name).write_text(text)
    _check_weights(folder / WEIGHTS[is_adapted], weights)


def _check_weights(path: Path, expected: dict[str, Tensor]) -> None:
    stored = load_file(path)
    if set(stored) != set(expected):
        odd = sorted(set(stored) ^ set(expected))[:3]
        raise FinetuneError(
            "bad_checkpoint", f"{path}: keys differ from those in training, for example {odd}"
        )
    for name, tensor in stored.items():
        if tensor.shape != expected[name].shape or 0 in tensor.shape:
            raise FinetuneError("bad_checkpoint", f"{path}: {name} has shape {tuple(tensor.shape)}")
        if not torch.isfinite(tensor).all():
            raise FinetuneError("non_finite", f"{path}: {name} has values that are not finite", tensor=name)


def complete_steps(run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints that have a manifest, oldest first; their digests are not looked at."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(
        int(folder.name.removeprefix("step-")) for folder in folders if (folder / MANIFEST).exists()
    )


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None where every file is as its manifest says."""
    try:
        digests = json.loads((folder / MANIFEST).read_text())["sha256"]
    except (OSError, ValueError, KeyError):
        return "no readable manifest"
    for name, digest in digests.items():
        if not (folder / name).exists():
            return f"{name} is missing"
        if _sha256(folder / name) != digest:
            return f"{name} differs from its digest"
    return None


def newest_checkpoint(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest sound checkpoint's folder, and a sentence for each newer one that was passed over."""
    passed_over: list[str] = []
    for step in reversed(complete_steps(run_dir)):
        folder = checkpoint_folder(run_dir, step)
        if (reason := damage(folder)) is None:
            return folder, passed_over
        passed_over.append(f"checkpoint step-{step} is passed over: {reason}")
    return None, passed_over


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return a checkpoint whose digests were found right."""
    weights = next(folder / name for name in WEIGHTS.values() if (folder / name).exists())
    return Checkpoint(
        folder,
        Progress(**json.loads((folder / "progress.json").read_text())),
        load_file(weights),
        load_file(folder / "optimizer.safetensors"),
        json.loads((folder / "rng.json").read_text()),
    )


def rotate_checkpoints(run_dir: Path, kept: int, best_step: int | None) -> None:
    """Remove all but the `kept` newest checkpoints and the best one, and what a killed save left behind."""
    steps = complete_steps(run_dir)
    for step in steps[:-kept]:
        if step != best_step:
            shutil.rmtree(checkpoint_folder(run_dir, step))
    for leftover in (run_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the random state of this rank as JSON values."""
    state = {"cpu": torch.get_rng_state().numpy().tobytes().hex()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(_bytes_tensor(state["cpu"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]), device)


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
