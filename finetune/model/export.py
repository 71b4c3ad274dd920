"""Give a trained adapter away: as a PEFT adapter, or merged into its base as an ordinary model folder.

Rule: nothing appears under its final name before it was read back and checked. A merge is computed in fp32 on the CPU,
tensor by tensor from file to file, and rounded once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from finetune.data.chat import ChatFormat
from finetune.errors import FinetuneError, boundary
from finetune.model.adapter import (
    BASE_FILE,
    CONFIG_FILE,
    TENSOR_FILE,
    Adapter,
    base_file,
    check_adapter,
    rebased_config,
    refuse_other_base,
)
from finetune.model.builtin import DTYPES, load_model, load_tokenizer, model_folder, write_model
from finetune.model.card import CardFacts, model_card
from finetune.model.source import INDEX_FILE, Source, model_digest, weight_files, weight_shapes
from finetune.records import folder_written_whole, to_json

GOLDEN_FILE = "golden.json"
GOLDEN_MESSAGES = [{"role": "user", "content": "Name three colours, then say 2+2."}]
LARGEST_LOGIT_ERROR = 1e-3  # of the fp32 merge against the adapter beside its base
LARGEST_KL = 2e-2  # of a bf16 file against fp32: rounding alone gives 2e-3


@dataclass(frozen=True)
class ExportRequest:
    """What to export. facts: sections of the model card, heading -> name -> value."""

    source: Source
    adapter_dir: Path
    out: Path
    chat: ChatFormat
    facts: dict[str, dict[str, Any]]
    dtype: Literal["auto", "bf16", "fp32"] = "auto"  # of a merged model; auto: as the base stores it


@dataclass(frozen=True)
class Exported:
    """A finished export. reused: the same files were there already, and nothing was touched."""

    folder: Path
    files: dict[str, str]  # name -> sha256
    checks: dict[str, float]
    reused: bool


def export_adapter(request: ExportRequest) -> Exported:
    """Write a PEFT adapter folder that PeftModel.from_pretrained and vLLM load.

    Raises FinetuneError: bad_adapter, non_finite, no_learning_signal for what must not leave; target_exists;
    bad_export where a check of the written files fails.
    """
    adapter = _checked_adapter(request)

    def write(folder: Path) -> dict[str, float]:
        tensors = {
            f"base_model.model.{module}.lora_{side}.weight": tensor.contiguous()
            for module, pair in adapter.pairs.items()
            for side, tensor in zip("AB", pair, strict=True)
        }
        save_file(tensors, folder / TENSOR_FILE, metadata={"format": "pt"})
        (folder / BASE_FILE).write_text(
            base_file(request.source.id, model_digest(request.source)), encoding="utf-8"
        )
        (folder / CONFIG_FILE).write_text(
            to_json(rebased_config(request.adapter_dir, request.source.id), indent=2), encoding="utf-8"
        )
        _write_companions(request, folder, "adapter", "fp32")
        check_adapter(folder, weight_shapes(request.source))
        checks = _check_numbers(request, adapter, folder)
        _check_golden(request, folder)
        return checks

    return _published(request.out, write)


def merge_adapter(request: ExportRequest) -> Exported:
    """Write base + adapter as a model folder: safetensors, tokenizer, template, generation config, card.

    Raises what export_adapter does.
    """
    adapter = _checked_adapter(request)

    def write(folder: Path) -> dict[str, float]:
        with _files_of(request.source) as base:
            _write_merged(base, adapter, folder, request.dtype)
            _write_config(base, folder, request)
            _write_companions(request, folder, "merged", request.dtype)
            _check_stored(base, adapter, folder, request.dtype)
        checks = _check_numbers(request, adapter, request.adapter_dir, folder)
        _check_golden(request, folder)
        return checks

    return _published(request.out, write)


def _checked_adapter(request: ExportRequest) -> Adapter:
    refuse_other_base(request.adapter_dir, request.source.id, model_digest(request.source))
    return check_adapter(request.adapter_dir, weight_shapes(request.source))


def _published(out: Path, write: Callable[[Path], dict[str, float]]) -> Exported:
    """Give `write` a temporary folder and rename it; equal files that are there already stay, others are a conflict."""
    if out.exists() and not out.is_dir():
        raise FinetuneError("target_exists", f"{out} is a file; give another folder", path=str(out))
    present = _digests(out) if out.is_dir() else {}
    with contextlib.suppress(_Unchanged), folder_written_whole(out) as temporary:
        checks = write(temporary)
        files = _digests(temporary)
        if present and present != files:
            differing = sorted(name for name in present | files if present.get(name) != files.get(name))
            text = f"{out} holds other files ({', '.join(differing[:3])}); give another folder or remove it"
            raise FinetuneError("target_exists", text, path=str(out))
        if present:
            raise _Unchanged
    return Exported(out, files, checks, reused=bool(present))


class _Unchanged(BaseException):
    """Leaves the writing of a folder whose content is there already."""


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextlib.contextmanager
def _files_of(source: Source) -> Iterator[Path]:
    """Give a folder with the files of a model; those of builtin:tiny are made for the time being."""
    if source.kind != "tiny":
        yield model_folder(source)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(source, Path(folder))
        yield Path(folder)


def _write_merged(base: Path, adapter: Adapter, folder: Path, dtype: str) -> None:
    """Write every weight file of the base anew, one in memory at a time."""
    left = set(adapter.pairs)
    for path in weight_files(base):
        tensors = dict(_merged_tensors(path, adapter, dtype))
        left -= {name.removesuffix(".weight") for name in tensors}
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    assert not left, "check_adapter compared the modules with these very files"
    if (base / INDEX_FILE).is_file():
        index = json.loads((base / INDEX_FILE).read_text(encoding="utf-8"))
        sizes = [_tensor_bytes(folder / path.name) for path in weight_files(base)]
        index["metadata"] = {**index.get("metadata", {}), "total_size": sum(sizes)}
        (folder / INDEX_FILE).write_text(to_json(index, indent=2), encoding="utf-8")


def _merged_tensors(path: Path, adapter: Adapter, dtype: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            weight = file.get_tensor(name)
            module = name.removesuffix(".weight")
            target = DTYPES[dtype] if dtype != "auto" and weight.is_floating_point() else weight.dtype
            merged = adapter.summed(weight, module) if module in adapter.pairs else weight
            yield name, merged.to(target).contiguous()


def _tensor_bytes(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return sum(tensor.nbytes for tensor in (file.get_tensor(name) for name in file.keys()))  # noqa: SIM118


def _write_config(base: Path, folder: Path, request: ExportRequest) -> None:
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if request.dtype != "auto":
        config.pop("torch_dtype", None)
        config["dtype"] = str(DTYPES[request.dtype]).removeprefix("torch.")
    (folder / "config.json").write_text(to_json(config, indent=2), encoding="utf-8")
    generation = base / "generation_config.json"
    settings = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    settings.pop(
        "_from_model_config", None
    )  # it would let the model's config win over the stop tokens written here
    settings["eos_token_id"] = stop_ids(settings.get("eos_token_id"), request.chat.stop_token_ids)
    (folder / generation.name).write_text(to_json(settings, indent=2), encoding="utf-8")
    if request.source.trust_remote_code:
        for code in base.glob("*.py"):
            shutil.copy(code, folder)


def stop_ids(stored: int | list[int] | None, learned: list[int]) -> list[int]:
    """Return the tokens at which generation must stop: those the base stopped at, and those that training taught."""
    known = [stored] if isinstance(stored, int) else stored or []
    return list(dict.fromkeys([*known, *learned]))


def _write_companions(
    request: ExportRequest, folder: Path, kind: Literal["adapter", "merged"], dtype: str
) -> None:
    """Write the tokenizer with the template of the training, a golden prompt to compare a server with, and the card."""
    tokenizer = load_tokenizer(request.source)
    tokenizer.chat_template = request.chat.template_text
    tokenizer.save_pretrained(folder)
    arguments = request.chat.template.arguments if request.chat.template else {}
    golden = {
        "messages": GOLDEN_MESSAGES,
        "template_arguments": arguments,
        "prompt_ids": _golden_ids(request),
    }
    (folder / GOLDEN_FILE).write_text(to_json(golden, indent=2), encoding="utf-8")
    stored = request.source.config.get("dtype", "as the base") if dtype == "auto" else dtype
    tokens = tokenizer.convert_ids_to_tokens(request.chat.stop_token_ids)
    card = CardFacts(request.source, model_digest(request.source), kind, stored, tokens, request.facts)
    (folder / "README.md").write_text(model_card(card), encoding="utf-8")


def _golden_ids(request: ExportRequest) -> list[int]:
    if request.chat.template is None:
        return list(request.chat.tokenizer(GOLDEN_MESSAGES[0]["content"])["input_ids"])
    return request.chat.prompt(GOLDEN_MESSAGES)


def _check_stored(base: Path, adapter: Adapter, folder: Path, dtype: str) -> None:
    """Compare every tensor on the disk with the rounding of its fp32 sum."""
    for path in weight_files(base):
        with safe_open(folder / path.name, framework="pt") as file:
            for name, expected in _merged_tensors(path, adapter, dtype):
                stored = file.get_tensor(name)
                if stored.dtype != expected.dtype or not torch.equal(stored, expected):
                    raise FinetuneError(
                        "bad_export",
                        f"{path.name}: {name} is not the rounded sum of base and adapter",
                        tensor=name,
                    )


def _check_numbers(
    request: ExportRequest, adapter: Adapter, adapter_dir: Path, merged_dir: Path | None = None
) -> dict[str, float]:
    """Compare what base, base beside adapter (as PEFT computes it), fp32 merge and merged files say to the golden prompt.

    Returns adapter_effect and merge_error (largest difference of a logit), and with merged files stored_kl (nats).
    """
    ids = _golden_ids(request)
    model = load_model(request.source, torch.float32)
    base_TV = _logits(model, ids)
    with boundary("bad_export", f"adapter {adapter_dir}"):
        adapted = PeftModel.from_pretrained(model, str(adapter_dir))
        tuned_TV = _logits(adapted, ids)
        model = adapted.unload()
        _merge_in_place(model, adapter)
    merged_TV = _logits(model, ids)
    del model, adapted
    checks = {
        "adapter_effect": _largest_difference(base_TV, tuned_TV),
        "merge_error": _largest_difference(merged_TV, tuned_TV),
    }
    if merged_dir:
        stored = replace(request.source, kind="folder", folder=merged_dir)
        checks["stored_kl"] = _largest_kl(tuned_TV, _logits(load_model(stored, torch.float32), ids))
    judge_numbers(checks)
    return checks


def judge_numbers(checks: dict[str, float]) -> None:
    """Raise FinetuneError(bad_export) where nothing was applied, or a difference is more than rounding (NaN is more)."""
    if not checks["adapter_effect"] > 0:
        raise FinetuneError(
            "bad_export",
            "the tuned model answers like its base: nothing of the adapter was applied",
            **checks,
        )
    for name, limit in (("merge_error", LARGEST_LOGIT_ERROR), ("stored_kl", LARGEST_KL)):
        if not checks.get(name, 0.0) <= limit:
            raise FinetuneError(
                "bad_export", f"{name} is {checks[name]:.3g}; rounding alone stays below {limit}", **checks
            )


def _logits(model: torch.nn.Module, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].float()


def _merge_in_place(model: PreTrainedModel, adapter: Adapter) -> None:
    for module in adapter.pairs:
        parameter = model.get_submodule(module).weight
        parameter.data = adapter.summed(parameter.data, module)


def _largest_difference(one_TV: Tensor, other_TV: Tensor) -> float:
    return float((one_TV - other_TV).abs().max())


def _largest_kl(exact_TV: Tensor, stored_TV: Tensor) -> float:
    """Return the largest KL(exact || stored) of a position, in nats."""
    exact_logps_TV, stored_logps_TV = (
        exact_TV.double().log_softmax(dim=-1),
        stored_TV.double().log_softmax(dim=-1),
    )
    return float((exact_logps_TV.exp() * (exact_logps_TV - stored_logps_TV)).sum(dim=-1).max())


def _check_golden(request: ExportRequest, folder: Path) -> None:
    """Render the golden prompt with the written files, as a server would, and compare it with the one of the training."""
    tokenizer = load_tokenizer(replace(request.source, kind="folder", folder=folder))
    if request.chat.template is None:
        ids = tokenizer(GOLDEN_MESSAGES[0]["content"])["input_ids"]
    else:
        arguments = request.chat.template.arguments
        encoded = tokenizer.apply_chat_template(
            GOLDEN_MESSAGES, add_generation_prompt=True, return_dict=True, **arguments
        )
        ids = encoded["input_ids"]
    if list(ids) != _golden_ids(request):
        raise FinetuneError(
            "bad_export",
            f"{folder}: the written tokenizer and template give other ids than in training for the golden prompt",
        )
