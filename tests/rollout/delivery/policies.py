"""The trainer's side for tests of delivery: adapters made at random, their log-probs as PEFT computes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from finetune.model.builtin import load_model
from finetune.model.source import resolve_source
from finetune.rollout.canary import Canary
from finetune.rollout.versions import Version, adapter_version

RANK, ALPHA = 8, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SEQUENCES = [[5, 6, 7, 8, 100, 101, 102, 9, 30, 31], [12, 200, 201, 13, 14, 15, 300], list(range(40, 64))]
FILES = {
    "adapter_config.json": json.dumps(
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": ALPHA,
            "bias": "none",
            "target_modules": TARGETS,
        }
    )
}


class Trainer:
    """A model beside an adapter; None stands for the base."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
        base = load_model(resolve_source(model), dtype)
        self.model = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
        self._weights = {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if "lora_" in name
        }

    def adapter(self, seed: int, size: float = 0.05) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(parameter.shape, generator=generator) * size
            for name, parameter in self._weights.items()
        }

    def scores(self, adapter: dict[str, Tensor] | None, factor: float = 1.0) -> list[list[float]]:
        for name, parameter in self._weights.items():
            parameter.data.copy_(adapter[name] if adapter else torch.zeros_like(parameter))
        with self._scaled(factor):
            return [self._score(ids) for ids in SEQUENCES]

    def canary(self, adapter: dict[str, Tensor] | None, before: dict[str, Tensor] | None = None) -> Canary:
        return Canary(SEQUENCES, lambda f: self.scores(adapter, f), lambda f: self.scores(before, f))

    def _score(self, ids: list[int]) -> list[float]:
        with torch.inference_mode():
            logps_TV = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        return logps_TV.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    @contextmanager
    def _scaled(self, factor: float) -> Iterator[None]:
        layers = [
            layer for layer in self.model.modules() if isinstance(getattr(layer, "scaling", None), dict)
        ]
        for layer in layers:
            layer.scaling["default"] *= factor
        yield
        for layer in layers:
            layer.scaling["default"] /= factor


def version(number: int, adapter: dict[str, Tensor]) -> Version:
    return adapter_version(number, adapter, FILES)


def moved(adapter: dict[str, Tensor], by: float, seed: int = 9) -> dict[str, Tensor]:
    """Return an adapter whose values each differ by about `by` times their own size."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + by * torch.randn(tensor.shape, generator=generator))
        for name, tensor in adapter.items()
    }
