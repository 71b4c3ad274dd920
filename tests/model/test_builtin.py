"""Models and tokenizers load in the type asked for; the builtin ones are what they are said to be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.errors import FinetuneError
from finetune.model.builtin import (
    load_model,
    load_tokenizer,
    model_folder,
    model_problems,
    model_warnings,
    write_model,
)
from finetune.model.source import Source, resolve_source

ROOT = Path(__file__).parents[2]
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def chat_text(model: str) -> str:
    tokenizer = load_tokenizer(resolve_source(model))
    return tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_get_the_type_and_rotary_tables_stay_fp32(
    tiny: Source, tmp_path: Path, dtype: torch.dtype
) -> None:
    write_model(tiny, tmp_path / "model")
    for source in (tiny, resolve_source(str(tmp_path / "model"))):
        model = load_model(source, dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
        assert not model.training
        assert model.config._attn_implementation == "sdpa"


def test_a_written_model_computes_what_the_one_in_memory_does(tiny: Source, tmp_path: Path) -> None:
    write_model(tiny, tmp_path / "model")
    ids = torch.arange(20)[None]
    written = resolve_source(str(tmp_path / "model"))
    with torch.no_grad():
        one, other = (load_model(source, torch.float32)(ids).logits for source in (tiny, written))
    assert torch.equal(one, other)
    assert load_tokenizer(tiny)("2+2=4").input_ids == load_tokenizer(written)("2+2=4").input_ids


def test_making_a_tiny_model_leaves_the_random_state_alone(tiny: Source) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load_model(tiny, torch.float32)
    assert torch.equal(torch.rand(1), expected)


def test_the_options_of_tiny_are_kept() -> None:
    source = resolve_source("builtin:tiny?vocabulary=400&context=64&tied=1&eos=</s>&pad=eos&seed=3")
    model, tokenizer = load_model(source, torch.float32, "eager"), load_tokenizer(source)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (400, 64)
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("</s>", "</s>", 328)
    assert model.config._attn_implementation == "eager"
    other = load_model(resolve_source("builtin:tiny?vocabulary=400&tied=1"), torch.float32)
    assert not torch.equal(model.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_the_templates_of_tiny() -> None:
    turns = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert chat_text("builtin:tiny") == turns
    assert chat_text("builtin:tiny?template=gen") == turns
    assert chat_text("builtin:tiny?template=bos") == "<s>" + turns
    assert chat_text("builtin:tiny?template=sys_reject") == turns
    assert load_tokenizer(resolve_source("builtin:tiny?template=none")).chat_template is None
    assert load_tokenizer(resolve_source("builtin:tiny?post_bos=1"))("a").input_ids[0] == 1
    rejecting = load_tokenizer(resolve_source("builtin:tiny?template=sys_reject"))
    with pytest.raises(Exception, match="System role not supported"):
        rejecting.apply_chat_template([{"role": "system", "content": "x"}, *CHAT], tokenize=False)


def test_smollm2_answers(tmp_path: Path) -> None:
    source = resolve_source("builtin:smollm2-135m")
    tokenizer, model = load_tokenizer(source), load_model(source, torch.bfloat16)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**encoded, max_new_tokens=12, do_sample=False)[0, encoded["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)


@pytest.mark.parametrize(
    "text", ["x=1234, -7 and 12.50", "  two  spaces\n\n\ttab", "naïve — 漢字 🙂", "I'm, we'll"]
)
def test_the_tokenizer_of_smollm2_gives_text_back_and_splits_digits(text: str) -> None:
    tokenizer = load_tokenizer(resolve_source("builtin:smollm2-135m"))
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert all(len(piece) == 1 for piece in pieces if any(letter.isdigit() for letter in piece))


@pytest.mark.slow
@pytest.mark.proof
def test_two_processes_convert_smollm2_once(tmp_path: Path) -> None:
    """Both start with an empty cache: one converts, the other waits for it, and no half-made folder is ever seen."""
    code = """
from finetune.model.builtin import model_folder
from finetune.model.source import resolve_source
folder = model_folder(resolve_source("builtin:smollm2-135m"))
print(folder, (folder / "model.safetensors").stat().st_mtime_ns, *sorted(path.name for path in folder.iterdir()))
"""
    environment = os.environ | {"FINETUNE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1]
    assert "model.safetensors" in said[0]
    assert len([path for path in (tmp_path / "models").iterdir() if path.is_dir()]) == 1
    made, shared = (
        Path(text) for text in (said[0].split()[0], str(model_folder(resolve_source("builtin:smollm2-135m"))))
    )
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (made / name).read_bytes() == (shared / name).read_bytes(), (
            "the conversion gives the same bytes every time"
        )


def test_the_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but no more")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("finetune.model.builtin.smollm2_file", lambda: broken)
    with pytest.raises(FinetuneError) as caught:
        load_tokenizer(resolve_source("builtin:smollm2-135m"))
    assert caught.value.code == "broken_package"
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_tokens_past_the_embedding_are_found(tiny: Source) -> None:
    model, tokenizer = load_model(tiny, torch.float32), load_tokenizer(tiny)
    assert model_problems(tokenizer, model.config) == []
    tokenizer.add_tokens([AddedToken("<mol>", special=True)])
    (problem,) = model_problems(tokenizer, model.config)
    assert (problem.code, problem.evidence["tokens"], problem.evidence["rows"]) == (
        "tokens_past_embedding",
        ["<mol>"],
        328,
    )
    model.resize_token_embeddings(329)
    assert model_problems(tokenizer, model.config) == []


def test_padding_that_also_ends_answers_is_told() -> None:
    own, shared = (load_tokenizer(resolve_source(f"builtin:tiny?pad={pad}")) for pad in ("own", "eos"))
    assert model_warnings(own, [4]) == []
    assert [code for code, _ in model_warnings(shared, [4])] == ["pad_is_stop_token"]
    assert model_warnings(shared, [2]) == []


def test_a_tokenizer_that_is_not_there_has_a_code(tiny: Source, tmp_path: Path) -> None:
    write_model(tiny, tmp_path)
    for path in (*tmp_path.glob("tokenizer*"), tmp_path / "chat_template.jinja"):
        path.unlink()
    with pytest.raises(FinetuneError) as caught:
        load_tokenizer(resolve_source(str(tmp_path)))
    assert caught.value.code == "unsupported_model"


def test_an_attention_kernel_that_is_not_installed_is_a_missing_package(tiny: Source, tmp_path: Path) -> None:
    write_model(tiny, tmp_path)
    for source in (tiny, resolve_source(str(tmp_path))):
        with pytest.raises(FinetuneError) as caught:
            load_model(source, torch.bfloat16, "flash_attention_2")
        assert caught.value.code == "missing_package"


def test_the_libraries_load_what_is_written(tiny: Source, tmp_path: Path) -> None:
    write_model(tiny, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (model.dtype, model.generation_config.eos_token_id, tokenizer.chat_template is None) == (
        torch.bfloat16,
        4,
        False,
    )
