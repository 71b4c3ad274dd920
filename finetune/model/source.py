"""Where a model comes from (folder, Hub id, builtin) and what can be told of it without torch: safety, digest, sizes.

Rule: nothing of a model runs and nothing is unpickled. Weights are safetensors alone, and a model that brings its own
code is refused unless the user allows it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.errors import FinetuneError
from finetune.model.catalogue import (
    SMOLLM2_CONFIG,
    SMOLLM2_TOKENS,
    llama_shapes,
    smollm2_file,
    smollm2_identity,
    tiny_config,
    tiny_identity,
    tiny_options,
    tiny_tokens,
)

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
# Everything beside the weights that decides what the model computes and how text becomes ids.
DEFINING_FILES = (
    "config.json",
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
SMALL_HUB_FILES = ["config.json", "tokenizer_config.json", "chat_template.jinja"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
UNSAFE_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack"}
LARGEST_HEADER = 100_000_000  # the limit of the safetensors format itself


@dataclass(frozen=True)
class Source:
    """A model that was found and judged safe. `folder` holds its files; builtins have none: they are made on loading."""

    id: str
    kind: Literal["folder", "hub", "smollm2", "tiny"]
    folder: Path | None
    revision: str | None  # commit of a Hub model
    options: dict[str, Any]  # of builtin:tiny
    config: dict[str, Any]  # config.json
    tokenizer_config: dict[str, Any] | None  # tokenizer_config.json, the chat template put in
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """Sizes from which memory and speed follow. body: all parameters but the embedding and the head."""

    parameters: int
    body: int
    head: int  # rows x width of the output layer, tied or not
    tied: bool
    weight_bytes: int
    vocab_rows: int
    hidden: int
    layers: int
    context: int
    dtype: str


def resolve_source(
    model: str, revision: str | None = None, trust_remote_code: bool = False, download: bool = True
) -> Source:
    """Return the model that `--model` names.

    With `download` false only small JSON files of a Hub model are fetched. Raises FinetuneError: model_missing,
    unsafe_model, unsupported_model, bad_value, setting_without_effect, access_denied, offline, missing_package.
    """
    path = Path(model).expanduser()
    is_hub = not model.startswith("builtin:") and not path.is_dir()
    if revision is not None and not is_hub:
        raise FinetuneError(
            "setting_without_effect",
            f"revision: only a Hub model has one, {model} has not; leave it out",
            setting="revision",
        )
    if model.startswith("builtin:"):
        return _builtin(model)
    if not is_hub:
        return _from_folder(model, "folder", path.resolve(), trust_remote_code, with_weights=True)
    if not HUB_ID.fullmatch(model):
        text = f"model {model}: no such folder, and neither a Hub id (owner/name) nor builtin:NAME"
        raise FinetuneError("model_missing", text, model=model)
    folder = _hub_folder(model, revision, trust_remote_code, download)
    return _from_folder(model, "hub", folder, trust_remote_code, with_weights=download)


def _builtin(model: str) -> Source:
    name, _, query = model.removeprefix("builtin:").partition("?")
    if name == "tiny":
        options = tiny_options(query)
        return Source(model, "tiny", None, None, options, tiny_config(options), tiny_tokens(options))
    if model == "builtin:smollm2-135m":
        smollm2_file()
        return Source(model, "smollm2", None, None, {}, SMOLLM2_CONFIG, SMOLLM2_TOKENS)
    text = f"model {model}: the builtins are builtin:smollm2-135m and builtin:tiny[?option=value&...]"
    raise FinetuneError("model_missing", text, model=model)


def _from_folder(
    model: str, kind: Literal["folder", "hub"], folder: Path, trust: bool, with_weights: bool
) -> Source:
    if not (folder / "config.json").is_file():
        raise FinetuneError("model_missing", _no_config(model, folder), model=model)
    config = _read_json(folder / "config.json")
    tokens = _tokenizer_config(folder)
    _refuse_code(model, config, tokens or {}, trust)
    _refuse_unsupported(model, config)
    if with_weights:
        _check_weights(model, folder)
    return Source(model, kind, folder, folder.name if kind == "hub" else None, {}, config, tokens, trust)


def _no_config(model: str, folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"model {model} is an adapter: give its base with --model and the adapter with --init-adapter"
    return f"model {model}: {folder} has no config.json"


def _tokenizer_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    template = folder / "chat_template.jinja"
    own = {"chat_template": template.read_text(encoding="utf-8")} if template.is_file() else {}
    return _read_json(path) | own


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FinetuneError("unsupported_model", f"{path}: not JSON: {error}", file=str(path)) from error
    if not isinstance(value, dict):
        raise FinetuneError("unsupported_model", f"{path}: not a JSON object", file=str(path))
    return value


def _refuse_code(model: str, config: dict[str, Any], tokens: dict[str, Any], trust: bool) -> None:
    files = [
        name
        for name, content in (("config.json", config), ("tokenizer_config.json", tokens))
        if content.get("auto_map")
    ]
    if files and not trust:
        what = f"{' and '.join(files)} would run the model's own code (auto_map)"
        text = f"model {model}: {what}; read it, then allow it with --trust-remote-code"
        raise FinetuneError("unsafe_model", text, files=files)


def _refuse_unsupported(model: str, config: dict[str, Any]) -> None:
    """Refuse what is no causal language model of plain weights, as far as config.json tells."""
    names = config.get("architectures") or []
    causal = [name for name in names if name.endswith(("ForCausalLM", "LMHeadModel"))]
    has_text_part = "text_config" in config and any(
        name.endswith("ForConditionalGeneration") for name in names
    )
    reason = ""
    if config.get("is_encoder_decoder"):
        reason = "it is an encoder-decoder"
    elif names and not causal and not has_text_part:
        reason = f"its class is {', '.join(names)}"
    elif config.get("quantization_config"):
        reason = f"its weights are quantised ({config['quantization_config'].get('quant_method', 'unknown')})"
    if reason:
        raise FinetuneError(
            "unsupported_model",
            f"model {model}: only causal language models in full precision are trained, and {reason}",
            model=model,
        )


def _check_weights(model: str, folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    if WEIGHTS_FILE not in names and INDEX_FILE not in names:
        unsafe = sorted(name for name in names if Path(name).suffix in UNSAFE_WEIGHTS)
        if unsafe:
            text = f"model {model}: {unsafe[0]} can run code when read; convert it to safetensors with save_pretrained"
            raise FinetuneError("unsafe_model", text, files=unsafe[:20])
        raise FinetuneError(
            "model_missing",
            f"model {model}: {folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            model=model,
        )
    for path in weight_files(folder):
        if not path.is_file():
            raise FinetuneError(
                "model_missing",
                f"model {model}: {path.name}, which {INDEX_FILE} names, is missing",
                file=path.name,
            )
        read_header(path)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up a model, in order of their names."""
    if not (folder / INDEX_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    names = sorted(set(_read_json(folder / INDEX_FILE).get("weight_map", {}).values()))
    foreign = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if foreign or not names:
        what = f"{foreign[0]!r} is no safetensors file of this folder" if foreign else "it names no file"
        raise FinetuneError("unsafe_model", f"{folder / INDEX_FILE}: {what}", files=foreign[:20])
    return [folder / name for name in names]


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return name -> {dtype, shape, data_offsets} of a safetensors file; model_missing is raised where it is cut short."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(size, LARGEST_HEADER) else b""
    try:
        header = json.loads(text)
    except ValueError as error:
        raise FinetuneError(
            "model_missing", f"{path}: no whole safetensors file; fetch or copy it again", file=str(path)
        ) from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        raise FinetuneError(
            "model_missing", f"{path}: {size} bytes instead of {end}; fetch or copy it again", file=str(path)
        )
    return header


def _hub_folder(model: str, revision: str | None, trust: bool, download: bool) -> Path:
    """Return the snapshot of a Hub model in the local cache; the folder's name is the commit."""
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    whole = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"] + (["*.py"] if trust else [])
    wanted = whole if download else SMALL_HUB_FILES
    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"])
        )
    except hub.GatedRepoError as error:
        text = f"model {model} is gated: accept its licence at https://huggingface.co/{model} and set HF_TOKEN to your token"
        raise FinetuneError("access_denied", text, model=model) from error
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError) as error:
        at = f" at revision {revision}" if revision else ""
        text = f"model {model}: no such folder here, and the Hub has no such model{at}; or it is private: set HF_TOKEN"
        raise FinetuneError("model_missing", text, model=model) from error
    except OSError as error:
        reason = type(error).__name__
        text = f"model {model}: no such folder here, and the Hub cannot be reached ({reason}); fetch it where there is a network"
        raise FinetuneError("offline", text, model=model) from error


def weight_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stored tensor by name; empty for a Hub model whose weights were not fetched."""
    if source.folder is None:
        return llama_shapes(source.config)
    return {name: tuple(entry["shape"]) for name, entry in _headers(source.folder)}


def _headers(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in weight_files(folder):
        if path.is_file():
            yield from read_header(path).items()


def text_config(source: Source) -> dict[str, Any]:
    """Return the part of the config that describes the language model."""
    return source.config.get("text_config") or source.config


def model_facts(source: Source) -> ModelFacts:
    """Return the sizes of a model from its config and its weight headers."""
    config = text_config(source)
    rows, hidden = config["vocab_size"], config.get("hidden_size") or config["n_embd"]
    shapes = weight_shapes(source)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    outer = sum(math.prod(shape) for shape in shapes.values() if is_vocabulary_sized(shape, rows))
    return ModelFacts(
        parameters=parameters,
        body=parameters - outer,
        head=rows * hidden,
        tied=bool(source.config.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
        weight_bytes=_weight_bytes(source, parameters),
        vocab_rows=rows,
        hidden=hidden,
        layers=config.get("num_hidden_layers") or config["n_layer"],
        context=config.get("max_position_embeddings") or config["n_positions"],
        dtype=str(
            config.get("dtype") or config.get("torch_dtype") or source.config.get("dtype") or "float32"
        ),
    )


def _weight_bytes(source: Source, parameters: int) -> int:
    if source.folder is None:
        return 2 * parameters
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for _, entry in _headers(source.folder))


def is_vocabulary_sized(shape: tuple[int, ...], rows: int) -> bool:
    """Whether a tensor of this shape is the embedding or the head."""
    return len(shape) == 2 and shape[0] == rows


def target_problems(source: Source, lora_targets: str) -> list[FinetuneError]:
    """Return what is wrong with `--lora-targets`: modules that do not exist, or that must not get adapters.

    An adapter on the embedding or the head breaks the tie between the two and is not served by vLLM.
    """
    if lora_targets == "all-linear":
        return []
    shapes = weight_shapes(source)
    rows = text_config(source)["vocab_size"]
    modules = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
    inner = sorted(
        {name.rpartition(".")[2] for name, shape in modules.items() if not is_vocabulary_sized(shape, rows)}
    )
    problems = []
    for target in (name.strip() for name in lora_targets.split(",")):
        hits = [shape for name, shape in modules.items() if f".{name}".endswith(f".{target}")]
        outer = target in ("lm_head", "embed_tokens") or any(
            is_vocabulary_sized(shape, rows) for shape in hits
        )
        reason = (
            "is the embedding or the head, which cannot be adapted" if outer else "names no linear module"
        )
        if outer or (shapes and not hits):
            text = f"lora_targets: {target} {reason}; there are: {', '.join(inner)}, or all-linear for all of them"
            problems.append(FinetuneError("bad_value", text, setting="lora_targets", modules=inner))
    return problems


def model_digest(source: Source, all_bytes: bool = False) -> str:
    """Return a sha256 of what the model is: config, tokenizer, and header and size (or all bytes) of its weight files.

    Independent of where it lies. A Hub model is known by its commit, so that a plan needs no weights.
    """
    if source.kind == "tiny":
        return tiny_identity(source.options)
    if source.kind == "smollm2":
        return smollm2_identity(smollm2_file(), all_bytes)
    if source.kind == "hub" and not all_bytes:
        return hashlib.sha256(f"hub {source.id} {source.revision}".encode()).hexdigest()
    assert source.folder is not None
    digest = hashlib.sha256()
    for path in [source.folder / name for name in DEFINING_FILES]:
        if path.is_file():
            digest.update(f"{path.name} {_file_digest(path)}\n".encode())
    for path in weight_files(source.folder):
        content = _file_digest(path) if all_bytes else json.dumps(read_header(path), sort_keys=True)
        digest.update(f"{path.name} {path.stat().st_size} {content}\n".encode())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
