"""All weights of a fully tuned model as an ordinary model folder, checked after it is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.model.builtin import load_tokenizer
from finetune.model.export import stop_ids
from finetune.model.source import WEIGHTS_FILE, Source
from finetune.records import folder_written_whole, to_json


def write_whole_model(
    folder: Path, weights: dict[str, Tensor], source: Source, template: str | None, learned_stops: list[int]
) -> None:
    """Write weights in the type of the base model (rounded once), config, tokenizer, template and stop tokens.

    template: the chat template of the training. Raises FinetuneError(non_finite).
    """
    name = str(source.config.get("dtype") or source.config.get("torch_dtype") or "float32")
    dtype = getattr(torch, name.removeprefix("torch."))
    rounded = {key: tensor.to(dtype).contiguous() for key, tensor in weights.items()}
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = template or tokenizer.chat_template
    shutil.rmtree(folder, ignore_errors=True)  # an older one of the same run
    with folder_written_whole(folder) as temporary:
        save_file(rounded, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / "config.json").write_text(
            to_json(source.config | {"dtype": name.removeprefix("torch.")}, indent=2)
        )
        tokenizer.save_pretrained(temporary)
        (temporary / "generation_config.json").write_text(
            json.dumps(_generation_settings(source, learned_stops), indent=2)
        )
        for key, tensor in load_file(temporary / WEIGHTS_FILE).items():
            if not torch.isfinite(tensor).all():
                raise FinetuneError(
                    "non_finite", f"{folder}: {key} has values that are not finite", tensor=key
                )


def _generation_settings(source: Source, learned_stops: list[int]) -> dict[str, object]:
    stored = source.folder / "generation_config.json" if source.folder else None
    settings = json.loads(stored.read_text(encoding="utf-8")) if stored and stored.is_file() else {}
    return {**settings, "eos_token_id": stop_ids(settings.get("eos_token_id"), learned_stops)}
