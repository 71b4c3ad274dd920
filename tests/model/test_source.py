"""Models are found, judged and described without torch; each refusal is made to happen."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import FinetuneError
from finetune.model.builtin import load_model, write_model
from finetune.model.source import (
    Source,
    model_digest,
    model_facts,
    read_header,
    resolve_source,
    target_problems,
    weight_shapes,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tiny: Source, tmp_path: Path) -> Path:
    write_model(tiny, tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(model: Path | str, **options: Any) -> FinetuneError:
    with pytest.raises(FinetuneError) as caught:
        resolve_source(str(model), **options)
    return caught.value


def test_resolving_and_describing_a_model_imports_no_torch(folder: Path) -> None:
    code = f"""
import sys
from finetune.model.source import *
for model in ("builtin:tiny?tied=1", "builtin:smollm2-135m", {str(folder)!r}):
    source = resolve_source(model)
    model_digest(source), model_facts(source), weight_shapes(source), target_problems(source, "q_proj")
print(sorted({{"torch", "transformers", "tokenizers", "safetensors"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_gives_config_template_and_sizes(folder: Path) -> None:
    source = resolve_source(str(folder))
    assert (source.kind, source.folder, source.config["vocab_size"]) == ("folder", folder, 328)
    assert source.tokenizer_config is not None
    assert "<|im_start|>" in source.tokenizer_config["chat_template"]
    facts = model_facts(source)
    assert (facts.parameters, facts.head, facts.body) == (871_552, 328 * 128, 871_552 - 2 * 328 * 128)
    assert (facts.weight_bytes, facts.context, facts.tied, facts.dtype) == (
        2 * 871_552,
        512,
        False,
        "bfloat16",
    )


@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny?tied=1&vocabulary=300"])
def test_what_is_said_of_a_builtin_is_what_its_files_say(model: str, tmp_path: Path) -> None:
    source = resolve_source(model)
    write_model(source, tmp_path / "model")
    written = resolve_source(str(tmp_path / "model"))
    assert weight_shapes(source) == weight_shapes(written)
    assert model_facts(source) == model_facts(written)


def test_smollm2_has_its_known_size() -> None:
    facts = model_facts(resolve_source("builtin:smollm2-135m"))
    assert (facts.parameters, facts.body, facts.head, facts.tied) == (
        134_515_008,
        106_203_456,
        28_311_552,
        True,
    )


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("no/such/folder", "model_missing", "Hub id"),
        ("nofolder", "model_missing", "Hub id"),
        ("builtin:huge", "model_missing", "builtin:tiny"),
        ("builtin:smollm2-135m?seed=1", "model_missing", "builtin:smollm2-135m"),
        ("builtin:tiny?vocabluary=300", "bad_value", "did you mean vocabulary"),
        ("builtin:tiny?vocabulary=260", "bad_value", "261 to"),
        ("builtin:tiny?template=mad", "bad_value", "sys_reject"),
        ("builtin:tiny?tied=yes", "bad_value", "0 | 1"),
    ],
)
def test_a_model_that_is_not_there_is_refused(model: str, code: str, said: str) -> None:
    error = refusal(model)
    assert error.code == code
    assert said in error.message


def test_a_revision_of_what_has_none_is_refused(folder: Path) -> None:
    assert refusal(folder, revision="main").code == "setting_without_effect"
    assert refusal("builtin:tiny", revision="main").code == "setting_without_effect"


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder).code == "model_missing"
    (folder / "adapter_config.json").write_text("{}")
    assert "--init-adapter" in refusal(folder).message
    (folder / "config.json").write_text("{not json")
    assert refusal(folder).code == "unsupported_model"
    (folder / "config.json").write_text("[]")
    assert refusal(folder).code == "unsupported_model"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_the_model_never_runs_unasked(folder: Path, tmp_path: Path, file: str) -> None:
    marker = tmp_path / "code-ran"
    (folder / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    edit(
        folder / file,
        auto_map={"AutoModelForCausalLM": "modeling_own.Own", "AutoTokenizer": ["modeling_own.Own", None]},
    )
    error = refusal(folder)
    assert (error.code, error.evidence["files"]) == ("unsafe_model", [file])
    assert resolve_source(str(folder), trust_remote_code=True).trust_remote_code
    assert not marker.exists()


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refusal(folder)
    assert (error.code, error.evidence["files"]) == ("unsafe_model", ["pytorch_model.bin"])
    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder).code == "model_missing"


@pytest.mark.parametrize("size", [100, 200_000])
def test_weights_cut_short_are_refused(folder: Path, size: int) -> None:
    os.truncate(folder / "model.safetensors", size)
    assert refusal(folder).code == "model_missing"


def test_an_index_may_name_files_of_its_folder_alone(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    for name in ("../model.safetensors", "/etc/passwd", "model.bin"):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        assert refusal(folder).code == "unsafe_model"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}))
    assert refusal(folder).code == "model_missing"
    index.write_text("{}")
    assert refusal(folder).code == "unsafe_model"


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["BertForMaskedLM"]},
        {"architectures": ["T5ForConditionalGeneration"]},
        {"is_encoder_decoder": True},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_models_of_another_kind_are_refused(folder: Path, values: dict[str, Any]) -> None:
    edit(folder / "config.json", **values)
    assert refusal(folder).code == "unsupported_model"


def test_the_digest_is_of_content_and_of_no_path(folder: Path, tmp_path: Path) -> None:
    source = resolve_source(str(folder))
    digest, whole = model_digest(source), model_digest(source, all_bytes=True)
    folder.rename(tmp_path / "elsewhere")
    moved = resolve_source(str(tmp_path / "elsewhere"))
    assert (model_digest(moved), model_digest(moved, all_bytes=True)) == (digest, whole)
    weights = tmp_path / "elsewhere" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_digest(moved) == digest, "bytes of weights are read on demand only"
    assert model_digest(moved, all_bytes=True) != whole
    (tmp_path / "elsewhere" / "chat_template.jinja").write_text("{{ messages }}")
    assert model_digest(moved) != digest


def test_builtins_have_digests_of_their_own() -> None:
    models = ["builtin:tiny", "builtin:tiny?seed=1", "builtin:tiny?tied=1", "builtin:smollm2-135m"]
    digests = [model_digest(resolve_source(model)) for model in models]
    assert len(set(digests)) == 4
    assert digests[0] == model_digest(resolve_source("builtin:tiny?seed=0"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.model.catalogue.SMOLLM2_PACKAGE", "no_such_package")
    assert refusal("builtin:smollm2-135m").code == "missing_package"


@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny?tied=1", "builtin:smollm2-135m"])
def test_adapters_go_on_inner_linear_modules_alone(model: str) -> None:
    source = resolve_source(model)
    for good in ("all-linear", "q_proj", "q_proj, v_proj", "model.layers.0.mlp.up_proj"):
        assert target_problems(source, good) == []
    problems = target_problems(source, "q_proj,lm_head,embed_tokens,no_proj,input_layernorm,roj")
    assert [problem.code for problem in problems] == ["bad_value"] * 5
    assert ["embedding or the head" in problem.message for problem in problems] == [
        True,
        True,
        False,
        False,
        False,
    ]


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub that downloads ask, serving `files` (path -> bytes) of one model, or only refusing."""

    files: dict[str, bytes]
    refuse: dict[str, str] | None
    commit = "0" * 39 + "1"

    def do_GET(self) -> None:
        if self.refuse:
            return self.reply(403 if self.refuse["X-Error-Code"] == "GatedRepo" else 404, self.refuse)
        if self.path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in self.files]
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0"}
                for name, data in self.files.items()
            ]
            body = (
                tree if "/tree/" in self.path else {"id": "me/tiny", "sha": self.commit, "siblings": siblings}
            )
            return self.reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())
        name = self.path.rpartition("/")[2]
        if name not in self.files:
            return self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit})
        return self.reply(200, {"X-Repo-Commit": self.commit, "ETag": f'"{name}"'}, self.files[name])

    do_HEAD = do_GET

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""


@pytest.fixture
def resolve_on_hub(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Return a function that resolves me/tiny in a fresh process against a Hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = """
import json, sys
from finetune.errors import FinetuneError
from finetune.model.source import model_digest, resolve_source
try:
    source = resolve_source("me/tiny", download=json.loads(sys.argv[1]))
    print(json.dumps([source.kind, str(source.folder), source.revision, model_digest(source)]))
except FinetuneError as error:
    print(json.dumps(error.code))
"""

    def resolve(files: dict[str, bytes], refuse: dict[str, str] | None = None, download: bool = True) -> Any:
        Hub.files, Hub.refuse = files, refuse
        address = f"http://127.0.0.1:{server.server_port}"
        environment = os.environ | {
            "HF_ENDPOINT": address,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "hub"),
        }
        command = [sys.executable, "-c", code, json.dumps(download)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    yield resolve
    server.shutdown()


def test_a_hub_model_is_known_by_its_commit(resolve_on_hub: Callable[..., Any], folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"own.py": b"raise SystemExit"}
    kind, quick_folder, quick_revision, quick_digest = resolve_on_hub(files, download=False)
    assert (kind, quick_revision) == ("hub", Hub.commit)
    assert not (Path(quick_folder) / "model.safetensors").exists()
    kind, whole_folder, revision, digest = resolve_on_hub(files)
    assert (kind, revision, digest) == ("hub", Hub.commit, quick_digest)
    assert read_header(Path(whole_folder) / "model.safetensors")
    assert not (Path(whole_folder) / "own.py").exists(), "code is not even fetched"


def test_what_the_hub_refuses_has_a_code(resolve_on_hub: Callable[..., Any]) -> None:
    assert resolve_on_hub({}, {"X-Error-Code": "GatedRepo"}) == "access_denied"
    assert resolve_on_hub({}, {"X-Error-Code": "RepoNotFound"}) == "model_missing"
    assert resolve_on_hub({"README.md": b""}, download=False) == "model_missing"


def test_without_a_network_a_hub_model_is_offline() -> None:
    assert refusal("me/never-fetched").code == "offline"
    assert refusal("me/never-fetched", download=False).code == "offline"


def test_weights_that_a_file_lacks_are_not_made_up(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=5)
    import torch

    with pytest.raises(FinetuneError) as caught:
        load_model(resolve_source(str(folder)), torch.float32)
    assert caught.value.code == "unsupported_model"
    assert "model.layers.4" in caught.value.message
