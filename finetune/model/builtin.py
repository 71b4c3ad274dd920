"""Load a model and its tokenizer from their source, and make the builtin ones.

Rule: what is trained, evaluated and exported all comes through these functions, so it has one type, one attention and
one tokenizer, and the rotary tables stay in fp32 whatever the type of the weights.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from finetune.errors import FinetuneError, boundary
from finetune.model.attention import register_attention
from finetune.model.catalogue import (
    SMOLLM2_CONFIG,
    SMOLLM2_TOKENS,
    TINY_SPECIAL_TOKENS,
    smollm2_file,
    smollm2_identity,
    tiny_config,
    tiny_tokens,
)
from finetune.model.footprint import SHORT_ROWS
from finetune.model.source import WEIGHTS_FILE, Source
from finetune.records import folder_written_whole

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TINY_TEXT = [
    "What is the capital of France? Paris.",
    "2+2=4 and 3+3=6",
    "CCO c1ccccc1 CC(=O)O",
    "system user assistant tool",
    "the answer is forty two. ",
] * 50


def load_tokenizer(source: Source) -> Any:
    """Return a model's tokenizer, chat template included; raises FinetuneError(unsupported_model) where none loads."""
    if source.kind == "tiny":
        return _tiny_tokenizer(source.options)
    folder = model_folder(source)
    with boundary("unsupported_model", f"tokenizer of {source.id}"):
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=source.trust_remote_code, local_files_only=True
        )


def load_model(source: Source, dtype: torch.dtype, attention: str = "auto") -> PreTrainedModel:
    """Return the model on the CPU, in evaluation mode, its parameters in `dtype`.

    Raises FinetuneError: unsupported_model (also where a weight is missing, which transformers would fill with random
    numbers), missing_package for an attention kernel that is not installed.
    """
    kernel = "sdpa" if attention == "auto" else attention
    if kernel == SHORT_ROWS:
        register_attention()
    with boundary("unsupported_model", f"model {source.id}"):
        try:
            if source.kind == "tiny":
                return _tiny_model(source.options, dtype, kernel)
            return _pretrained(source, dtype, kernel)
        except ImportError as error:
            text = f"model {source.id}, attention {attention}: {str(error)[:300]}"
            raise FinetuneError("missing_package", text, setting="attention") from error


def _pretrained(source: Source, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(
        model_folder(source),
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=source.trust_remote_code,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        text = f"model {source.id}: {len(missing)} weights of {type(model).__name__} are missing, as {', '.join(missing[:3])}"
        raise FinetuneError("unsupported_model", text, missing=missing[:20])
    return model


def model_folder(source: Source) -> Path:
    """Return the folder that holds the model's files; builtin:smollm2-135m is converted into the cache, once."""
    if source.kind == "smollm2":
        return _smollm2_folder()
    assert source.folder is not None, "builtin:tiny has no files; write_model makes some"
    return source.folder


def model_problems(tokenizer: Any, config: PretrainedConfig) -> list[FinetuneError]:
    """Return what keeps a tokenizer and a model from being trained together: tokens without a row in the embedding."""
    rows = config.get_text_config().vocab_size
    past = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if not past:
        return []
    shown = ", ".join(f"{token} ({number})" for number, token in past[:3])
    what = f"the tokenizer has {len(past)} tokens past the {rows} rows of the embedding, as {shown}"
    fix = "take them out of the tokenizer, or resize the embedding before: an adapter cannot hold new rows"
    return [
        FinetuneError(
            "tokens_past_embedding", f"{what}; {fix}", tokens=[token for _, token in past[:20]], rows=rows
        )
    ]


def model_warnings(tokenizer: Any, stop_ids: list[int]) -> list[tuple[str, str]]:
    """Return what a user should know of a tokenizer; stop_ids: the tokens that end an answer."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id not in stop_ids:
        return []
    what = f"the padding token {tokenizer.pad_token} also ends answers; here an end is learned and padding is not"
    return [
        (
            "pad_is_stop_token",
            f"{what}, other programs may mask both: give the tokenizer a padding token of its own",
        )
    ]


def write_model(source: Source, folder: Path) -> None:
    """Write a model as a local folder of the usual form (bf16 safetensors, tokenizer, template, generation config)."""
    load_model(source, torch.bfloat16).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def _smollm2_folder() -> Path:
    file = smollm2_file()
    cache = Path(os.environ.get("FINETUNE_CACHE", "~/.cache/finetune")).expanduser() / "models"
    folder = cache / f"smollm2-135m-{smollm2_identity(file)[:8]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{folder.name}.lock"):
            if not folder.is_dir():  # another process may have made it while this one waited
                with (
                    boundary("broken_package", f"conversion of {file.name}"),
                    folder_written_whole(folder) as temporary,
                ):
                    _convert_smollm2(file, temporary)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_smollm2(file: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    config = LlamaConfig(**SMOLLM2_CONFIG)
    weights = {_llama_name(tensor.name): _dequantized(tensor, config) for tensor in reader.tensors}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        _forget_version(folder / name)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    _smollm2_tokenizer(tokens, kinds, merges).save_pretrained(folder)


def _forget_version(path: Path) -> None:
    """Take the library's version out of a file that it wrote, so that a conversion is the same under all of them."""
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop("transformers_version", None)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_GGUF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _llama_name(name: str) -> str:
    """Return the transformers name of a GGUF tensor, as model.layers.0.mlp.up_proj.weight of blk.0.ffn_up.weight."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
            name
        ]
    _, layer, module, _ = name.split(".")
    return f"model.layers.{layer}.{_GGUF_NAMES[module]}.weight"


def _dequantized(tensor: Any, config: LlamaConfig) -> Tensor:
    from gguf import dequantize

    weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
        tensor.name.split(".")[-2]
    )
    if heads:  # GGUF interleaves the two halves of each rotary head
        rows, width = weight.shape
        weight = weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
    return torch.from_numpy(weight.copy()).bfloat16()


def _smollm2_tokenizer(tokens: list[str], kinds: list[int], merges: list[str]) -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer of SmolLM2, which sees every digit as a token of its own (GGUF calls this `smollm`)."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    inner = Tokenizer(models.BPE(vocabulary, pairs))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    control = 3  # the GGUF kind of tokens that are no text
    inner.add_special_tokens(
        [
            AddedToken(token, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **SMOLLM2_TOKENS
    )


def _tiny_tokenizer(options: dict[str, Any]) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options["vocabulary"],
        special_tokens=list(TINY_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_TINY_TEXT, trainer)
    if options["post_bos"]:
        start = ("<s>", inner.token_to_id("<s>"))
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[start]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **tiny_tokens(options)
    )


def _tiny_model(options: dict[str, Any], dtype: torch.dtype, attention: str) -> PreTrainedModel:
    config = LlamaConfig(**tiny_config(options))
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options["seed"])
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # the parameters alone: rotary tables must not be rounded
        parameter.data = parameter.data.bfloat16().to(dtype)
    model.config.dtype = dtype
    return model.eval()
