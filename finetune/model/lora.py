"""A LoRA layer that computes in the model's type and keeps its weights in fp32.

The library's layer copies its input to fp32 and keeps that copy for the backward, once per adapted module; on small
models that costs more time and memory than the adapter's own arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor


class LoraLinear(PeftLinear):
    """PEFT's adapted linear layer with one fused forward where nothing special is asked of it (no dropout, one adapter)."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        name = self.active_adapters[0]
        special = self.disable_adapters or self.merged or args or options or len(self.active_adapters) != 1
        if special or not isinstance(self.lora_dropout[name], torch.nn.Identity):
            return super().forward(x, *args, **options)
        base = self.base_layer(x)
        return base + _LowRank.apply(
            x, self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        )


class _LowRank(torch.autograd.Function):
    """scaling * (x A^T) B^T with A (rank, in) and B (out, rank) in fp32 and everything else in the type of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        low = F.linear(x, a.to(x.dtype)) * scaling
        ctx.save_for_backward(x, low, a, b)
        ctx.scaling = scaling
        return F.linear(low, b.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, low, a, b = ctx.saved_tensors
        grad = grad_outputs[0]
        grad_low = grad @ b.to(grad.dtype) * ctx.scaling
        grad_x = grad_low @ a.to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_a = grad_low.flatten(0, -2).T @ x.flatten(0, -2)
        grad_b = grad.flatten(0, -2).T @ low.flatten(0, -2)
        return grad_x, grad_a.to(a.dtype), grad_b.to(b.dtype), None
