"""What is given away is what was trained: merges against PEFT's own, files against fp32 sums, guards made to fire."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.data.chat import ChatFormat
from finetune.errors import FinetuneError
from finetune.model import export
from finetune.model.adapter import BASE_FILE, KEY, TENSOR_FILE
from finetune.model.builtin import load_model, load_tokenizer, write_model
from finetune.model.export import ExportRequest, export_adapter, judge_numbers, merge_adapter, stop_ids
from finetune.model.source import Source, model_digest, read_header, resolve_source

MakeAdapter = Callable[..., Path]
FACTS = {"Training": {"method": "sft", "steps": 10, "learning rate": 2e-4}}
IDS = torch.tensor([[3, 90, 100, 110, 120, 4, 60, 70]])


@pytest.fixture
def request_for(tmp_path: Path, make_adapter: MakeAdapter) -> Callable[..., ExportRequest]:
    """Return a function that makes an adapter for a model and asks for its export to tmp_path/out."""

    def make(model: str = "builtin:tiny", dtype: str = "auto", **settings: Any) -> ExportRequest:
        source = resolve_source(model)
        chat = ChatFormat(load_tokenizer(source))
        return ExportRequest(source, make_adapter(source, **settings), tmp_path / "out", chat, FACTS, dtype)

    return make


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def unmerged_logits(request: ExportRequest) -> torch.Tensor:
    return logits_of(
        PeftModel.from_pretrained(load_model(request.source, torch.float32), request.adapter_dir)
    )


def refusal(export_with: Callable[[ExportRequest], Any], request: ExportRequest) -> FinetuneError:
    with pytest.raises(FinetuneError) as caught:
        export_with(request)
    return caught.value


@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny?tied=1"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_fp32_merge_computes_what_the_adapter_does(
    request_for: Callable[..., ExportRequest], model: str, use_rslora: bool
) -> None:
    request = request_for(model, "fp32", target_modules="all-linear", use_rslora=use_rslora)
    exported = merge_adapter(request)
    merged = AutoModelForCausalLM.from_pretrained(request.out)
    assert merged.dtype == torch.float32
    assert (logits_of(merged) - unmerged_logits(request)).abs().max() < 1e-4
    assert exported.checks["merge_error"] < 1e-4
    assert exported.checks["adapter_effect"] > 1e-2


@pytest.mark.parametrize("use_rslora", [False, True])
def test_each_stored_tensor_is_the_rounded_fp32_sum(
    request_for: Callable[..., ExportRequest], use_rslora: bool
) -> None:
    request = request_for(use_rslora=use_rslora)
    merge_adapter(request)
    scale = 16 / 8**0.5 if use_rslora else 2.0
    base = load_model(request.source, torch.float32).state_dict()
    adapter = load_file(request.adapter_dir / TENSOR_FILE)
    stored = load_file(request.out / "model.safetensors")
    assert set(stored) == set(base)
    for name, weight in base.items():
        module = "base_model.model." + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in adapter:
            weight = weight + scale * (
                adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
            )
        assert torch.equal(stored[name], weight.bfloat16()), name


def test_a_merge_keeps_type_size_and_tie_of_its_base(
    request_for: Callable[..., ExportRequest], tmp_path: Path
) -> None:
    request = request_for("builtin:tiny?tied=1")
    write_model(request.source, tmp_path / "base")
    exported = merge_adapter(request)
    header, base = (read_header(folder / "model.safetensors") for folder in (request.out, tmp_path / "base"))
    assert {name: entry["dtype"] for name, entry in header.items()} == dict.fromkeys(base, "BF16")
    assert "lm_head.weight" not in header
    assert json.loads((request.out / "config.json").read_text())["tie_word_embeddings"]
    assert exported.checks["stored_kl"] < 2e-2
    merged = AutoModelForCausalLM.from_pretrained(request.out)
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight


def test_a_merge_of_sharded_files_keeps_their_index(
    request_for: Callable[..., ExportRequest], make_adapter: MakeAdapter, tiny: Source, tmp_path: Path
) -> None:
    load_model(tiny, torch.bfloat16).save_pretrained(tmp_path / "base", max_shard_size="500KB")
    load_tokenizer(tiny).save_pretrained(tmp_path / "base")
    request = replace(request_for(dtype="fp32"), source=resolve_source(str(tmp_path / "base")))
    merge_adapter(request)
    index = json.loads((request.out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 871_552
    assert len(set(index["weight_map"].values())) > 1
    assert (
        logits_of(AutoModelForCausalLM.from_pretrained(request.out)) - unmerged_logits(request)
    ).abs().max() < 1e-4


def test_generation_stops_where_training_taught_it_to(request_for: Callable[..., ExportRequest]) -> None:
    """The template ends turns with <|im_end|> (4), the tokenizer's EOS is </s> (2): both must stop."""
    request = request_for("builtin:tiny?eos=</s>")
    merge_adapter(request)
    assert json.loads((request.out / "generation_config.json").read_text())["eos_token_id"] == [2, 4]
    merged = AutoModelForCausalLM.from_pretrained(request.out)
    merged.get_output_embeddings().weight.data.zero_()
    merged.get_output_embeddings().weight.data[4] = merged.model(IDS).last_hidden_state[0, -1]
    output = merged.generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=10, do_sample=False
    )
    assert output[0].tolist() == [*IDS[0].tolist(), 4], "the model always says 4, so it says it once"


def test_stop_tokens_of_base_and_training_are_joined() -> None:
    assert stop_ids(None, [4]) == [4]
    assert stop_ids(2, [4]) == [2, 4]
    assert stop_ids([2, 9], [9, 4]) == [2, 9, 4]


def test_an_exported_adapter_loads_in_peft_and_names_its_base(
    request_for: Callable[..., ExportRequest],
) -> None:
    request = request_for()
    exported = export_adapter(request)
    keys = list(load_file(request.out / TENSOR_FILE))
    assert len(keys) == 16
    assert all(KEY.fullmatch(key) for key in keys)
    adapted = PeftModel.from_pretrained(load_model(request.source, torch.float32), request.out)
    assert torch.equal(logits_of(adapted), unmerged_logits(request))
    config = json.loads((request.out / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["target_modules"]) == (
        "builtin:tiny",
        ["q_proj", "v_proj"],
    )
    assert set(exported.files) >= {
        "adapter_config.json",
        TENSOR_FILE,
        "README.md",
        "tokenizer.json",
        "chat_template.jinja",
    }


def test_another_base_is_refused(request_for: Callable[..., ExportRequest]) -> None:
    request = request_for()
    export_adapter(request)
    other = replace(
        request,
        source=resolve_source("builtin:tiny?seed=1"),
        adapter_dir=request.out,
        out=request.out.with_name("m"),
    )
    error = refusal(merge_adapter, other)
    assert error.code == "bad_adapter"
    assert "another model" in error.message


@pytest.mark.parametrize("export_with", [export_adapter, merge_adapter])
def test_broken_adapters_leave_no_folder(
    request_for: Callable[..., ExportRequest], export_with: Any, tmp_path: Path
) -> None:
    request = request_for()
    tensors = load_file(request.adapter_dir / TENSOR_FILE)
    name = next(key for key in tensors if "lora_B" in key)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, request.adapter_dir / TENSOR_FILE)
    error = refusal(export_with, request)
    assert (error.code, error.evidence["tensor"]) == ("non_finite", name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


@pytest.mark.parametrize("export_with", [export_adapter, merge_adapter])
def test_the_same_export_twice_changes_nothing(
    request_for: Callable[..., ExportRequest], export_with: Any, tmp_path: Path
) -> None:
    request = request_for()
    first = export_with(request)
    times = {path: path.stat().st_mtime_ns for path in request.out.iterdir()}
    second = export_with(request)
    assert (first.reused, second.reused, first.files) == (False, True, second.files)
    assert {path: path.stat().st_mtime_ns for path in request.out.iterdir()} == times
    (request.out / "README.md").write_text("mine")
    assert refusal(export_with, request).code == "target_exists"
    assert (request.out / "README.md").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "out"]


def test_a_file_in_the_way_is_a_conflict(request_for: Callable[..., ExportRequest]) -> None:
    request = request_for()
    request.out.write_text("mine")
    assert refusal(merge_adapter, request).code == "target_exists"


def test_a_tensor_that_is_stored_wrong_is_found(
    request_for: Callable[..., ExportRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for()

    def save_another(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        tensors["model.layers.3.self_attn.v_proj.weight"][0, 0] += 1
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(export, "save_file", save_another)
    error = refusal(merge_adapter, request)
    assert (error.code, error.evidence["tensor"]) == ("bad_export", "model.layers.3.self_attn.v_proj.weight")
    assert not request.out.exists()


@pytest.mark.parametrize(
    "checks",
    [
        {"adapter_effect": 0.0, "merge_error": 0.0},
        {"adapter_effect": float("nan"), "merge_error": 0.0},
        {"adapter_effect": 1.0, "merge_error": 2e-3},
        {"adapter_effect": 1.0, "merge_error": float("nan")},
        {"adapter_effect": 1.0, "merge_error": 0.0, "stored_kl": 0.03},
    ],
)
def test_numbers_beyond_rounding_are_refused(checks: dict[str, float]) -> None:
    with pytest.raises(FinetuneError) as caught:
        judge_numbers(checks)
    assert caught.value.code == "bad_export"


def test_a_merge_at_the_wrong_scale_is_found(
    request_for: Callable[..., ExportRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our sum is compared with PEFT's own forward: alpha / rank where the adapter wants alpha / sqrt(rank) is seen."""
    monkeypatch.setattr("finetune.model.adapter.Adapter.scale", 2.0)
    error = refusal(merge_adapter, request_for(use_rslora=True))
    assert (error.code, error.evidence["merge_error"] > 1e-3) == ("bad_export", True)


def test_the_written_template_gives_the_prompt_of_the_training(
    request_for: Callable[..., ExportRequest],
) -> None:
    request = request_for("builtin:tiny?template=none")
    template = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    request = replace(request, chat=ChatFormat(load_tokenizer(request.source), template))
    merge_adapter(request)
    golden = json.loads((request.out / "golden.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(request.out)
    served = tokenizer.apply_chat_template(golden["messages"], add_generation_prompt=True, return_dict=True)
    assert served["input_ids"] == golden["prompt_ids"]
    assert tokenizer.chat_template == template


def test_a_template_that_got_lost_is_found(
    request_for: Callable[..., ExportRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for("builtin:tiny?template=bos")
    monkeypatch.setattr(
        ChatFormat, "template_text", resolve_source("builtin:tiny").tokenizer_config["chat_template"]
    )
    error = refusal(merge_adapter, request)
    assert error.code == "bad_export"
    assert "golden prompt" in error.message


def test_a_model_without_template_exports(request_for: Callable[..., ExportRequest]) -> None:
    request = request_for("builtin:tiny?template=none")
    merge_adapter(request)
    assert not (request.out / "chat_template.jinja").exists()


def test_the_card_states_facts_and_cannot_be_broken_out_of(request_for: Callable[..., ExportRequest]) -> None:
    request = request_for()
    request = replace(
        request, facts={"Training": {"a|b": "<script>\n# c", "loss": float("nan"), "none": None}}
    )
    merge_adapter(request)
    card = (request.out / "README.md").read_text()
    assert re.match(r"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n", card)
    assert "| a\\|b | &lt;script> # c |" in card
    assert "| loss | null |" in card
    assert "| stop tokens | &lt;\\|im_end\\|> |" in card
    assert "none" not in card


def test_an_exported_adapter_tells_its_base(request_for: Callable[..., ExportRequest]) -> None:
    request = request_for()
    export_adapter(request)
    assert json.loads((request.out / BASE_FILE).read_text()) == {
        "id": "builtin:tiny",
        "sha256": model_digest(request.source),
    }
    (request.out / BASE_FILE).write_text("{}")
    broken = replace(request, adapter_dir=request.out, out=request.out.with_name("other"))
    assert refusal(export_adapter, broken).code == "bad_adapter"


def test_equal_adapters_have_equal_bytes(request_for: Callable[..., ExportRequest], tmp_path: Path) -> None:
    """Eight times: an order that changes from write to write would pass once in a while."""
    request = request_for()
    every = [export_adapter(replace(request, out=tmp_path / f"out{number}")).files for number in range(8)]
    assert all(files == every[0] for files in every)
