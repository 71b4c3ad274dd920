"""Adapters for the tests of models: made by PEFT itself, with values that tell the modules apart.

Heavy libraries are imported in the functions: this file is read before the environment of the tests is set.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.model.source import Source, resolve_source


@pytest.fixture(scope="session")
def tiny() -> Source:
    return resolve_source("builtin:tiny")


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that trains nothing but writes an adapter whose B is not zero."""
    import torch
    from peft import LoraConfig, get_peft_model

    from finetune.model.builtin import load_model

    def make(source: Source, name: str = "adapter", **settings: object) -> Path:
        settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **settings}
        model = get_peft_model(
            load_model(source, torch.float32), LoraConfig(task_type="CAUSAL_LM", **settings)
        )
        generator = torch.Generator().manual_seed(1)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
        return tmp_path / name

    return make
