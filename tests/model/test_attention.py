"""The kernel for short rows against torch's own attention: outputs and gradients, and when it steps aside."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.model import attention
from finetune.model.attention import attention_forward

B, H, K, D = 2, 6, 2, 16


def inputs(length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    shapes = [(B, H, length, D), (B, K, length, D), (B, K, length, D)]
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    module = SimpleNamespace(is_causal=True, num_key_value_groups=H // K, training=True)
    output, _ = attention_forward(module, query, key, value, None, **options)  # type: ignore[arg-type]
    return output


def torchs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=scale
    )
    return result.transpose(1, 2)


@pytest.mark.parametrize("length", [2, 37])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_torch_in_output_and_gradients(length: int, scale: float | None) -> None:
    results = []
    for function, options in ((torchs, {"scale": scale}), (ours, {"scaling": scale})):
        tensors = inputs(length)
        output = function(*tensors, **options)
        output.square().sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in tensors)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_bf16_is_as_near_to_fp32_as_torchs_own() -> None:
    exact = torchs(*inputs(64))
    errors = [(function(*inputs(64, torch.bfloat16)).float() - exact).norm() for function in (torchs, ours)]
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("case", ["long", "no gradient", "dropout", "one token"])
def test_steps_aside_for_what_it_does_not_serve(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **__: (asked.append(1), None))
    monkeypatch.setattr(attention, "SHORT_ROW_TOKENS", 40)
    tensors = inputs({"long": 41, "one token": 1}.get(case, 20))
    if case == "no gradient":
        tensors = [tensor.detach() for tensor in tensors]
    ours(*tensors, **({"dropout": 0.1} if case == "dropout" else {}))
    assert asked == [1]
