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
        a, b, layer = self.lora_A[name].weight, self.lora_B[name].weight, self.base_layer
        return _AdaptedLinear.apply(x, layer.weight, layer.bias, a, b, self.scaling[name])


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + bias + scaling * (x A^T) B^T with W frozen, A (rank, in) and B (out, rank) in fp32, the rest in the type of x.

    The low-rank part is added inside the matrix products, forward and backward, so no second large tensor exists.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        rows = x.flatten(0, -2)
        low = F.linear(rows, a.to(x.dtype)).mul_(scaling)
        out = F.linear(rows, weight, bias).addmm_(low, b.to(x.dtype).T)
        ctx.save_for_backward(x, low, weight, a, b)
        ctx.scaling = scaling
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, a, b = ctx.saved_tensors
        grad = grad_outputs[0].flatten(0, -2)
        grad_low = (grad @ b.to(grad.dtype)).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low, a.to(grad.dtype)).view_as(x)
        grad_a = grad_low.T @ x.flatten(0, -2)
        grad_b = grad.T @ low
        return grad_x, None, None, grad_a.to(a.dtype), grad_b.to(b.dtype), None
