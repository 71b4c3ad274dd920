"""The policy: its adapter layers against PEFT's own, its log-probs against the model's logits, its guards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finetune.config import SftConfig
from finetune.data.batches import Budget, rank_batches
from finetune.errors import FinetuneError
from finetune.knobs import build
from finetune.model.builtin import load_model
from finetune.model.lora import LoraLinear
from finetune.model.policy import Policy, build_policy, check_head, check_packing
from finetune.model.source import resolve_source
from finetune.records import Example

TINY = "builtin:tiny"


def made_policy(**settings: Any) -> Policy:
    fixed = {
        "model": TINY,
        "data": ["x"],
        "dtype": "fp32",
        "attention": "sdpa",
        "gradient_checkpointing": False,
    }
    config = build(SftConfig, {**fixed, **settings})
    return build_policy(config, resolve_source(config.model))


def examples(*lengths: int) -> list[Example]:
    draw = torch.Generator().manual_seed(1)
    rows = []
    for row, length in enumerate(lengths):
        ids = torch.randint(5, 300, (length,), generator=draw).tolist()
        rows.append(Example(ids, [0.0] * 3 + [1.0] * (length - 3), row, "f", row + 1))
    return rows


def test_all_linear_adapts_every_layer_and_never_the_head() -> None:
    names = set(made_policy().trainable())
    assert len(names) == 4 * 7 * 2
    assert not [name for name in names if "lm_head" in name or "embed" in name]
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in names)


def test_targets_that_name_nothing_are_refused() -> None:
    with pytest.raises(FinetuneError, match="lora_targets") as caught:
        made_policy(lora_targets="no_such_module")
    assert caught.value.code == "bad_value"


def test_start_depends_on_the_seed_alone() -> None:
    first, again, other = (made_policy(seed=seed).trainable() for seed in (0, 0, 1))
    name = next(name for name in first if "lora_A" in name)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_logps_equal_the_models_own_for_padded_rows() -> None:
    policy = made_policy()
    rows = examples(9, 30, 17)
    (batch,), total = rank_batches(range(3), rows, Budget(4096), 0, 1)
    assert total == 9 + 30 + 17 - 9
    with torch.no_grad():
        ours = policy(batch)
        for row, example in enumerate(rows):
            logits = policy.causal_model(torch.tensor([example.input_ids])).logits[0].log_softmax(-1)
            expected = [
                float(logits[place - 1, example.input_ids[place]])
                for place in range(3, len(example.input_ids))
            ]
            torch.testing.assert_close(ours[batch.row_N == row], torch.tensor(expected), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_adapter_layer_equals_pefts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["0"]}
    results = []
    for custom in ({}, {torch.nn.Linear: LoraLinear}):
        torch.manual_seed(0)
        config = LoraConfig(**settings)
        config._register_custom_module(custom) if custom else None
        model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(24, 16)).to(dtype), config)
        layer = model.base_model.model[0]
        assert isinstance(layer, LoraLinear) == bool(custom)
        torch.nn.init.normal_(layer.lora_B["default"].weight)
        x = torch.randn(5, 7, 24, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        out = model(x)
        out.float().square().sum().backward()
        results.append(
            (out, x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad)
        )
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        difference = (found.float() - expected.float()).norm() / expected.float().norm()
        assert difference < (1e-6 if dtype is torch.float32 else 1.5e-2)


def test_dropout_leaves_the_fused_path() -> None:
    policy = made_policy(lora_dropout=0.5)
    (batch,), _ = rank_batches([0], examples(20), Budget(4096), 0, 1)
    layer = next(module for module in policy.modules() if isinstance(module, LoraLinear))
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(1.0)
        assert not torch.equal(policy(batch), policy(batch))
        policy.eval()
        assert torch.equal(policy(batch), policy(batch))


def test_a_head_that_does_more_than_a_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made_policy()
    check_head(policy)
    head = policy.causal_model.get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda hidden: torch.tanh(hidden @ head.weight.T / 0.1) * 0.1)
    with pytest.raises(FinetuneError) as caught:
        check_head(policy)
    assert caught.value.code == "unsupported_model"


@pytest.mark.parametrize("attention", ["sdpa", "short_rows", "eager"])
def test_packed_rows_equal_rows_alone(attention: str) -> None:
    policy = made_policy(attention=attention)
    rows = examples(9, 30, 17)
    (packed,), _ = rank_batches(range(3), rows, Budget(4096, packing=True), 0, 1)
    assert packed.input_ids_BT.shape[0] == 1
    check_packing(policy, policy)
    with torch.no_grad():
        together = policy(packed)
        for row in range(3):
            (alone,), _ = rank_batches([row], rows, Budget(4096), 0, 1)
            torch.testing.assert_close(together[packed.row_N == row], policy(alone), rtol=0, atol=2e-5)


def test_attention_that_lets_packed_rows_see_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made_policy()
    base = policy.causal_model.base_model
    forward = base.forward

    def with_mask_of_ones(**inputs: Any) -> Any:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return forward(**inputs)

    monkeypatch.setattr(base, "forward", with_mask_of_ones)
    with pytest.raises(FinetuneError) as caught:
        check_packing(policy, policy)
    assert caught.value.code == "packing_unsafe"


def test_one_forward_of_the_policy_is_one_forward_of_the_model() -> None:
    policy = made_policy()
    calls = []
    policy.causal_model.base_model.register_forward_hook(lambda *_: calls.append(1))
    (batch,), _ = rank_batches([0], examples(20), Budget(4096), 0, 1)
    policy(batch).sum().backward()
    assert calls == [1]


def test_full_tuning_trains_every_weight_in_fp32() -> None:
    policy = made_policy(tuning="full", dtype="bf16")
    assert all(parameter.dtype is torch.float32 for parameter in policy.parameters())
    assert len(policy.trainable()) == len(list(policy.model.parameters()))
    check_head(policy)
    (batch,), _ = rank_batches([0], examples(20), Budget(4096), 0, 1)
    policy(batch).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in policy.parameters())


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = made_policy(gradient_checkpointing=checkpointing)
        (batch,), _ = rank_batches([0], examples(20), Budget(4096), 0, 1)
        policy(batch).sum().backward()
        gradients.append([parameter.grad for parameter in policy.trainable().values()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_foreign_adapter_is_refused_as_a_start(tmp_path: Path) -> None:
    """CE-07: keys under a wrapper's name load as nothing in other programs."""
    from safetensors.torch import load_file, save_file

    model = get_peft_model(
        load_model(resolve_source(TINY), torch.float32, "sdpa"), LoraConfig(r=4, target_modules=["q_proj"])
    )
    model.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    save_file(
        {
            name.replace("model.layers", "_orig_mod.model.layers"): tensor
            for name, tensor in load_file(file).items()
        },
        file,
    )
    with pytest.raises(FinetuneError, match="_orig_mod") as caught:
        made_policy(init_adapter=str(tmp_path))
    assert caught.value.code == "bad_adapter"


def test_collate_gives_padding_no_weight() -> None:
    rows = examples(9, 30)
    (batch,), _ = rank_batches(range(2), rows, Budget(4096), 0, 1)
    assert batch.input_ids_BT.shape == (2, 29)  # the last token predicts nothing
    assert len(batch.targets_N) == (9 - 3) + (30 - 3)
    assert batch.num_tokens == 8 + 29


def test_adapter_of_another_model_is_refused_as_a_start(tmp_path: Path) -> None:
    """The shapes fit; that it was trained on other weights is known from the file beside it."""
    from safetensors.torch import save_file

    from finetune.model.policy import adapter_files

    policy = made_policy(model="builtin:tiny?seed=1")
    for name, text in adapter_files(policy, resolve_source("builtin:tiny?seed=1")).items():
        (tmp_path / name).write_text(text)
    save_file(
        {name: tensor.detach() for name, tensor in policy.trainable().items()},
        tmp_path / "adapter_model.safetensors",
    )
    made_policy(model="builtin:tiny?seed=1", init_adapter=str(tmp_path))
    with pytest.raises(FinetuneError, match="another model") as caught:
        made_policy(init_adapter=str(tmp_path))
    assert caught.value.code == "bad_adapter"
