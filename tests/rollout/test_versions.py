"""Versions on the disk: the right numbers, whole, each under a path of its own, and nothing left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.model.builtin import load_model
from finetune.model.source import resolve_source, weight_shapes
from finetune.rollout import versions
from finetune.rollout.versions import (
    VersionStore,
    adapter_version,
    base_version,
    check_modules,
    differing,
    memory_folder,
    whole_version,
)
from finetune.rollout.weights import digest, sampled

MODEL = "builtin:tiny?seed=5&tied=1"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
FILES = {"adapter_config.json": json.dumps(CONFIG | {"task_type": "CAUSAL_LM"}), "base_model.json": "{}"}
KEY = "base_model.model.{}.lora_{}.weight"


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[VersionStore]:
    store = VersionStore(resolve_source(MODEL), request.param, "run", tmp_path)
    yield store
    store.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(1)
    found = {}
    for name, shape in weight_shapes(resolve_source(MODEL)).items():
        module = name.removesuffix(".weight")
        if module.endswith(("q_proj", "down_proj")):
            found[KEY.format(module, "A")] = torch.randn(4, shape[1])
            found[KEY.format(module, "B")] = torch.randn(shape[0], 4) * 0.1
    return found


def test_an_adapter_of_zeros_is_the_base_and_each_number_has_its_name(tensors: dict[str, Tensor]) -> None:
    zeros = {name: tensor * (".lora_A." in name) for name, tensor in tensors.items()}
    assert adapter_version(7, zeros, FILES).name == base_version().name == "base"
    assert adapter_version(7, tensors, FILES).name == "step-000007"
    assert whole_version(12, []).name == "step-000012"


def test_an_adapter_is_written_whole_and_its_probe_is_the_same_file(
    store: VersionStore, tensors: dict[str, Tensor]
) -> None:
    files = store.write_adapter(adapter_version(1, tensors, FILES))
    stored = load_file(files.folder / "adapter_model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)
    assert {path.name for path in files.folder.iterdir()} == {"adapter_model.safetensors", *FILES}
    probe = store.write_probe(files, 16.0)
    assert probe.folder != files.folder
    assert (probe.folder / "adapter_model.safetensors").samefile(files.folder / "adapter_model.safetensors")
    own, other = (json.loads((one.folder / "adapter_config.json").read_text()) for one in (files, probe))
    assert other == own | {"lora_alpha": 96.0}
    store.remove(probe)
    assert not probe.folder.exists()
    assert files.folder.exists()


def test_digests_of_an_adapter_are_of_the_matrices_as_the_kernels_have_them(
    store: VersionStore, tensors: dict[str, Tensor]
) -> None:
    files = store.write_adapter(adapter_version(1, tensors, FILES))
    module = "model.layers.1.self_attn.q_proj"
    assert files.rank == 4
    assert len(files.digests) == len(tensors)
    assert files.digests[f"{module}.A"] == digest(tensors[KEY.format(module, "A")].to(store.dtype))
    scaled = tensors[KEY.format(module, "B")].to(store.dtype) * 1.5
    assert files.digests[f"{module}.B"] == digest(scaled)


def test_merged_weights_are_summed_in_fp32_and_rounded_once(
    store: VersionStore, tensors: dict[str, Tensor]
) -> None:
    base = load_model(resolve_source(MODEL), torch.float32).state_dict()
    files = store.write_merged(adapter_version(1, tensors, FILES))
    stored = load_file(files.folder / "model.safetensors")
    assert "lm_head.weight" not in stored  # tied stays tied
    # Fused into one product, a sum in fp32 may end in another last bit.
    resolution = 2 * torch.finfo(store.dtype).eps
    changed = 0
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        expected = base[name]
        if KEY.format(module, "B") in tensors:
            expected = expected + 1.5 * (tensors[KEY.format(module, "B")] @ tensors[KEY.format(module, "A")])
            changed += 1
        assert torch.allclose(tensor, expected.to(store.dtype), rtol=resolution, atol=1e-7), name
        assert files.digests[name] == digest(sampled(name, tensor, files.draw or ""))
    assert changed == len(tensors) // 2
    config = json.loads((files.folder / "config.json").read_text())
    assert config["dtype"] == str(store.dtype).removeprefix("torch.")
    assert store.whole_digests(files) == {name: digest(tensor) for name, tensor in stored.items()}
    again = store.linked(files)
    assert again.folder != files.folder
    assert (again.folder / "model.safetensors").samefile(files.folder / "model.safetensors")
    base_files = store.write_merged(base_version())
    assert len(differing(store.whole_digests(files), base_files.digests)) == changed
    store.remove(base_files)
    assert store.base_folder.is_dir()  # the base's own files are nobody's version


def test_each_version_draws_other_columns_of_its_matrices(
    store: VersionStore, tensors: dict[str, Tensor]
) -> None:
    one, two = (store.write_merged(adapter_version(1, tensors, FILES)) for _ in range(2))
    assert one.draw != two.draw
    matrices = {name for name, shape in weight_shapes(store.source).items() if len(shape) == 2}
    assert {name for name in one.digests if one.digests[name] != two.digests[name]} == matrices
    assert store.whole_digests(one) == store.whole_digests(two)


def test_whole_weights_are_read_once_and_split_into_files_where_they_are_large(
    store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "SHARD_BYTES", 200_000)
    parameters = dict(load_model(resolve_source(MODEL), torch.float32).named_parameters())
    files = store.write_merged(whole_version(3, iter(parameters.items())))
    places = json.loads((files.folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(places.values())) > 2
    for name, parameter in parameters.items():
        stored = load_file(files.folder / places[name])[name]
        assert torch.equal(stored, parameter.to(store.dtype))
    assert set(files.digests) == set(parameters)


def test_keys_that_fit_no_module_or_lack_a_side_are_refused() -> None:
    modules = {"model.layers.0.q_proj", "model.layers.0.v_proj"}
    good = [KEY.format("model.layers.0.q_proj", side) for side in "AB"]
    check_modules(good, modules)
    bad = [
        [],
        good[:1],
        [*good, KEY.format("model.layers.1.q_proj", "A"), KEY.format("model.layers.1.q_proj", "B")],
        [name.replace("model.layers", "module.model.layers") for name in good],
        [name.replace("base_model.model.", "") for name in good],
    ]
    for keys in bad:
        with pytest.raises(FinetuneError) as caught:
            check_modules(keys, modules)
        assert caught.value.code == "bad_adapter"


def test_a_strange_adapter_is_not_even_written(store: VersionStore, tensors: dict[str, Tensor]) -> None:
    strange = {name.replace("layers", "blocks"): tensor for name, tensor in tensors.items()}
    for write in (store.write_adapter, store.write_merged):
        with pytest.raises(FinetuneError) as caught:
            write(adapter_version(1, strange, FILES))
        assert caught.value.code == "bad_adapter"
    assert not [path for path in store.folder.iterdir() if "v0" in path.name]


def test_differences_of_digests() -> None:
    ours = {"model.embed_tokens.weight": "e", "model.norm.weight": "n"}
    assert differing({**ours, "lm_head.weight": "e"}, ours) == []
    assert differing({**ours, "model.embed_tokens.weight.packed": "e"}, ours) == []
    assert differing({**ours, "lm_head.weight": "stale"}, ours) == ["lm_head.weight"]
    assert differing({**ours, "extra": "x"}, ours) == ["extra"]
    assert differing({"model.norm.weight": "n"}, ours) == ["model.embed_tokens.weight"]
    assert differing(ours, ours | {"layers.0.rotary_emb.inv_freq": "f", "lm_head.weight": "e"}) == []


def test_what_a_killed_attempt_left_is_removed_and_a_living_one_is_not(tmp_path: Path) -> None:
    dead, alive, foreign = (
        tmp_path / name
        for name in (f"finetune-run-{2**22 + 1}", f"finetune-run-{os.getppid()}", "finetune-other-1x")
    )
    for folder in (dead, alive, foreign):
        folder.mkdir()
    VersionStore(resolve_source(MODEL), torch.float32, "run", tmp_path).close()
    assert sorted(tmp_path.iterdir()) == sorted([alive, foreign])


def test_where_nothing_can_be_written_the_error_says_so(
    store: VersionStore, tensors: dict[str, Tensor]
) -> None:
    assert store.base_folder
    blocked = store.folder
    store.folder = blocked / "base" / "config.json"  # a file: no folder can be made in it
    with pytest.raises(FinetuneError) as caught:
        store.write_adapter(adapter_version(1, tensors, FILES))
    store.folder = blocked
    assert caught.value.code == "disk_full"


def test_memory_is_taken_where_there_is_room() -> None:
    assert memory_folder(0) == Path("/dev/shm")
    assert memory_folder(2**60) != Path("/dev/shm")
