"""An adapter is read whole or refused; each refusal is made to happen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.model.adapter import (
    CONFIG_FILE,
    TENSOR_FILE,
    Adapter,
    adapter_shapes,
    check_adapter,
    read_adapter_config,
)
from finetune.model.source import Source, resolve_source, weight_shapes

MakeAdapter = Callable[..., Path]


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / TENSOR_FILE)), folder / TENSOR_FILE)


def edit(folder: Path, **values: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(folder: Path, source: Source) -> FinetuneError:
    with pytest.raises(FinetuneError) as caught:
        check_adapter(folder, weight_shapes(source))
    return caught.value


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear", ["model.layers.0.mlp.up_proj"]])
def test_a_sound_adapter_is_read_whole(tiny: Source, make_adapter: MakeAdapter, targets: Any) -> None:
    folder = make_adapter(tiny, target_modules=targets)
    adapter = check_adapter(folder, weight_shapes(tiny))
    assert len(adapter.pairs) == {"q": 8, "a": 28, "m": 1}[targets[0][0]]
    for module, (a, b) in adapter.pairs.items():
        rows, width = weight_shapes(tiny)[f"{module}.weight"]
        assert (tuple(a.shape), tuple(b.shape)) == ((8, width), (rows, 8))


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2.0), (True, 16 / 8**0.5)])
def test_the_scale_is_the_one_of_the_adapters_kind(
    tiny: Source, make_adapter: MakeAdapter, use_rslora: bool, scale: float
) -> None:
    adapter = check_adapter(make_adapter(tiny, use_rslora=use_rslora), weight_shapes(tiny))
    assert adapter.scale == pytest.approx(scale, rel=1e-12)


def test_the_sum_by_hand() -> None:
    config = read_adapter_config_of(r=1, lora_alpha=3)
    pair = (torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0], [20.0], [30.0]]))
    weight = torch.ones(3, 2)
    expected = torch.tensor([[31.0, 61.0], [61.0, 121.0], [91.0, 181.0]])
    assert torch.equal(Adapter(config, {"m": pair}).summed(weight, "m"), expected)
    config.fan_in_fan_out = True
    assert torch.equal(Adapter(config, {"m": pair}).summed(weight.T, "m"), expected.T)


def read_adapter_config_of(**settings: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**settings)


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "_fsdp_wrapped_module.", "module."])
def test_keys_with_a_wrappers_name_are_refused(tiny: Source, make_adapter: MakeAdapter, wrapper: str) -> None:
    folder = make_adapter(tiny)
    rewrite(
        folder,
        lambda tensors: {
            key.replace("model.layers", f"{wrapper}model.layers"): tensors[key] for key in tensors
        },
    )
    error = refusal(folder, tiny)
    assert error.code == "bad_adapter"
    assert error.message.count(wrapper) == 3, "three of the unexpected keys are listed"
    assert "16 unexpected keys" in error.message
    assert "16 missing keys" in error.message


def test_a_missing_key_is_refused(tiny: Source, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(tiny)
    rewrite(folder, lambda tensors: dict(list(tensors.items())[1:]))
    assert refusal(folder, tiny).code == "bad_adapter"


@pytest.mark.parametrize("cut", [lambda tensor: tensor[:0], lambda tensor: tensor[: len(tensor) // 2]])
def test_empty_tensors_and_shards_are_refused(
    tiny: Source, make_adapter: MakeAdapter, cut: Callable[[Tensor], Tensor]
) -> None:
    folder = make_adapter(tiny)
    rewrite(folder, lambda tensors: {key: cut(tensor).clone() for key, tensor in tensors.items()})
    error = refusal(folder, tiny)
    assert error.code == "bad_adapter"
    assert "shape" in error.message


def test_an_adapter_of_a_model_of_another_size_is_refused(tiny: Source, make_adapter: MakeAdapter) -> None:
    error = refusal(make_adapter(tiny), resolve_source("builtin:smollm2-135m"))
    assert error.code == "bad_adapter"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(
    tiny: Source, make_adapter: MakeAdapter, value: float
) -> None:
    folder = make_adapter(tiny)
    broken = "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[broken][3, 3] = value
        return tensors

    rewrite(folder, change)
    error = refusal(folder, tiny)
    assert (error.code, error.evidence["tensor"]) == ("non_finite", broken)


def test_an_adapter_that_learned_nothing_is_refused(tiny: Source, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(tiny)
    rewrite(folder, lambda tensors: {key: tensor * ("lora_A" in key) for key, tensor in tensors.items()})
    assert refusal(folder, tiny).code == "no_learning_signal"


@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny?tied=1"])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_on_embedding_and_head_are_refused(
    make_adapter: MakeAdapter, model: str, target: str
) -> None:
    source = resolve_source(model)
    folder = make_adapter(source, target_modules=["q_proj", target])
    assert refusal(folder, source).code == "bad_value"


@pytest.mark.parametrize(
    "values",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"init_lora_weights": "pissa"},
        {"peft_type": "IA3"},
        {"peft_type": "NO_SUCH_KIND"},
    ],
)
def test_other_kinds_of_adapters_are_refused(
    tiny: Source, make_adapter: MakeAdapter, values: dict[str, Any]
) -> None:
    folder = make_adapter(tiny)
    edit(folder, **values)
    assert refusal(folder, tiny).code == "bad_adapter"


def test_folders_that_hold_no_adapter_are_refused(
    tiny: Source, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    assert refusal(tmp_path, tiny).code == "bad_adapter"
    folder = make_adapter(tiny)
    (folder / TENSOR_FILE).write_bytes((folder / TENSOR_FILE).read_bytes()[:100])
    assert refusal(folder, tiny).code == "bad_adapter"
    (folder / TENSOR_FILE).unlink()
    assert refusal(folder, tiny).code == "bad_adapter"


def test_the_expected_keys_are_those_of_peft(tiny: Source, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(tiny, layers_to_transform=[1, 2])
    stored = {key: tuple(tensor.shape) for key, tensor in load_file(folder / TENSOR_FILE).items()}
    assert adapter_shapes(read_adapter_config(folder), weight_shapes(tiny)) == stored
