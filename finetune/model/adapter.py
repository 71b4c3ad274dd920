"""Adapters on disk: read them, and prove that what is read is a whole, finite LoRA adapter of the model at hand.

Rule: an adapter that fits only in part is refused. Libraries load one whose keys carry a wrapper's name with a warning,
and then nothing of it is applied.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from finetune.errors import FinetuneError, boundary
from finetune.records import to_json

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
# Which model the adapter was trained on. Not in the metadata of the tensor file: with a second key there, safetensors
# writes them in an order that changes from one time to the next, and equal adapters get unequal bytes.
BASE_FILE = "base_model.json"
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Kinds of LoRA that are not W + scale * B A on the model's own weights.
_REFUSED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layer_replication",
)
_KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")  # other starts move part of W into the adapter
_OUTER = ("lm_head", "embed_tokens")
_SUMMED_AT_ONCE = 1 << 21  # numbers: 8 MB in fp32

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. pairs: module name -> (A of shape (rank, in), B of shape (out, rank))."""

    config: LoraConfig
    pairs: dict[str, tuple[Tensor, Tensor]]

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) for a rank-stabilised adapter (arXiv:2312.03732)."""
        return self.config.lora_alpha / (
            math.sqrt(self.config.r) if self.config.use_rslora else self.config.r
        )

    def summed(self, weight: Tensor, module: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return weight + scale * B A for one module, summed in fp32 and rounded once to `dtype`."""
        a, b = (side.to(weight.device, torch.float32) for side in self.pairs[module])
        left, right = (a.T, b.T) if self.config.fan_in_fan_out else (b, a)
        total = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        rows = max(1, _SUMMED_AT_ONCE // max(1, weight.shape[1]))
        for place in range(0, weight.shape[0], rows):
            part = slice(place, place + rows)
            summed = weight[part].to(torch.float32, copy=True)
            total[part] = summed.addmm_(left[part], right, alpha=self.scale)
        return total


def read_adapter_config(folder: str | Path) -> LoraConfig:
    """Return the LoRA settings of an adapter folder; raises FinetuneError(bad_adapter) for what is no plain LoRA."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise FinetuneError(
            "bad_adapter", f"{folder}: no adapter, it has no {CONFIG_FILE}", folder=str(folder)
        )
    with boundary("bad_adapter", str(path)):
        config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise FinetuneError("bad_adapter", f"{path}: only LoRA adapters are read, this is {config.peft_type}")
    used = [name for name in _REFUSED if getattr(config, name, None)]
    used += ["bias"] * (config.bias != "none") + ["init_lora_weights"] * (
        config.init_lora_weights not in _KEEPS_BASE
    )
    if used:
        raise FinetuneError(
            "bad_adapter", f"{path}: only plain LoRA is read, this uses {', '.join(used)}", settings=used
        )
    return config


def load_adapter_tensors(folder: str | Path, expected: Shapes) -> dict[str, Tensor]:
    """Return the tensors of an adapter folder by key, fp32 on the CPU.

    expected: key -> shape, as the model at hand has them. Raises FinetuneError: bad_adapter for other keys or shapes,
    non_finite for a tensor that is not finite.
    """
    path = Path(folder) / TENSOR_FILE
    tensors = _stored(path)
    if set(tensors) != set(expected):
        raise FinetuneError("bad_adapter", f"{path}: {_key_difference(set(tensors), set(expected))}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(expected[name]):
            text = f"{path}: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(expected[name])}"
            raise FinetuneError("bad_adapter", text, tensor=name)
        if not torch.isfinite(tensor).all():
            raise FinetuneError("non_finite", f"{path}: {name} has values that are not finite", tensor=name)
    return {name: tensor.float() for name, tensor in tensors.items()}


def check_adapter(folder: str | Path, base_shapes: Shapes) -> Adapter:
    """Return an adapter that was found whole, finite, fitting to the model and trained.

    base_shapes: the model's stored tensors. Raises what load_adapter_tensors does, bad_value for adapters on the
    embedding or the head, no_learning_signal where no B moved from zero.
    """
    config = read_adapter_config(folder)
    tensors = load_adapter_tensors(folder, adapter_shapes(config, base_shapes))
    if not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name):
        raise FinetuneError(
            "no_learning_signal", f"{folder}: every lora_B is zero, so the adapter changes nothing"
        )
    modules = sorted({_module(name) for name in tensors})
    pairs = {module: (tensors[_key(module, "A")], tensors[_key(module, "B")]) for module in modules}
    return Adapter(config, pairs)


def adapter_shapes(config: LoraConfig, base_shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return key -> shape of the adapter that these settings give on a model with these stored tensors."""
    modules = {name.removesuffix(".weight"): shape for name, shape in base_shapes.items() if len(shape) == 2}
    chosen = [module for module in (*modules, "lm_head") if check_target_module_exists(config, module)]
    if outer := sorted({module for module in chosen if module.rpartition(".")[2] in _OUTER}):
        text = f"lora_targets: {', '.join(outer)} is the embedding or the head, which cannot be adapted"
        raise FinetuneError("bad_value", text, setting="lora_targets")
    shapes: dict[str, tuple[int, ...]] = {}
    for module in chosen:
        rows, width = reversed(modules[module]) if config.fan_in_fan_out else modules[module]
        shapes |= {_key(module, "A"): (config.r, width), _key(module, "B"): (rows, config.r)}
    return shapes


def _key(module: str, side: str) -> str:
    return f"base_model.model.{module}.lora_{side}.weight"


def _module(key: str) -> str:
    match = KEY.fullmatch(key)
    assert match, "expected keys are of this form"
    return match["module"]


def _stored(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        text = f"{path}: no readable adapter: {str(error)[:200]}"
        raise FinetuneError("bad_adapter", text, file=str(path)) from error


def base_file(base_id: str, digest: str) -> str:
    """Return the text of the file that names the model an adapter was trained on."""
    return to_json({"id": base_id, "sha256": digest}, indent=2)


def refuse_other_base(folder: str | Path, base_id: str, digest: str) -> None:
    """Raise FinetuneError(bad_adapter) where an adapter of ours names another model than this one."""
    if _base_digest(Path(folder)) not in (None, digest):
        raise FinetuneError("bad_adapter", f"{folder}: it was trained on another model than {base_id}")


def _base_digest(folder: Path) -> str | None:
    """Return the digest of the model that an adapter of ours names; None for an adapter from elsewhere."""
    path = folder / BASE_FILE
    if not path.is_file():
        return None
    with boundary("bad_adapter", str(path)):
        return str(json.loads(path.read_text(encoding="utf-8"))["sha256"])


def _key_difference(found: set[str], expected: set[str]) -> str:
    parts = [
        f"{len(names)} {what}, as {', '.join(sorted(names)[:3])}"
        for what, names in (("unexpected keys", found - expected), ("missing keys", expected - found))
        if names
    ]
    return "; ".join(parts) + ": it belongs to another model, or a wrapper's name stands in its keys"


def rebased_config(folder: Path, base_id: str) -> dict[str, Any]:
    """Return an adapter's settings as JSON values that name their base, in an order that does not change."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    targets = config["target_modules"]
    ordered = sorted(targets) if isinstance(targets, list) else targets
    return config | {"base_model_name_or_path": base_id, "target_modules": ordered, "inference_mode": True}
