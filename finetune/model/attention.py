"""Causal attention for training short rows on a CPU, where torch's own backward takes a fifth of a step.

Its probabilities exist whole, so it serves rows of at most `SHORT_ROW_TOKENS` tokens; everything else (longer or packed rows, a
cache, a mask, dropout) goes to torch's scaled_dot_product_attention.

Tensors: B sequence, H query head, K key head, T token, D head size, M = B * H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from finetune.model.footprint import SHORT_ROW_TOKENS, SHORT_ROWS


def register_attention() -> None:
    """Make the kernel known to transformers under its name; its masks are those of sdpa."""
    AttentionInterface.register(SHORT_ROWS, attention_forward)
    AttentionMaskInterface.register(SHORT_ROWS, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention output of shape (B, T, H, D), as transformers expects it of an attention function."""
    length = query_BHTD.shape[2]
    is_plain = attention_mask is None and not dropout and options.get("is_causal") is not False
    is_causal = getattr(module, "is_causal", False) and 1 < length == key_BKTD.shape[2] <= SHORT_ROW_TOKENS
    if not (is_plain and is_causal and query_BHTD.requires_grad):
        output, _ = sdpa_attention_forward(
            module,
            query_BHTD,
            key_BKTD,
            value_BKTD,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **options,
        )
        return output, None
    groups = query_BHTD.shape[1] // key_BKTD.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1).flatten(0, 1) for tensor in (key_BKTD, value_BKTD))
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    output_MTD = _Causal.apply(query_BHTD.flatten(0, 1), key, value, scale)
    return output_MTD.view(query_BHTD.shape).transpose(1, 2).contiguous(), None


class _Causal(torch.autograd.Function):
    """softmax(scale * Q K^T + causal mask) V; the mask is added while the product is made."""

    @staticmethod
    def forward(ctx: Any, query_MTD: Tensor, key_MTD: Tensor, value_MTD: Tensor, scale: float) -> Tensor:
        length = query_MTD.shape[1]
        mask_TT = query_MTD.new_full((length, length), float("-inf")).triu_(1)
        scores_MTT = torch.baddbmm(
            mask_TT.expand(len(query_MTD), -1, -1), query_MTD, key_MTD.transpose(1, 2), alpha=scale
        )
        probabilities_MTT = torch.softmax(scores_MTT, dim=-1)
        ctx.save_for_backward(query_MTD, key_MTD, value_MTD, probabilities_MTT)
        ctx.scale = scale
        return torch.bmm(probabilities_MTT, value_MTD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query_MTD, key_MTD, value_MTD, probabilities_MTT = ctx.saved_tensors
        grad_MTD = grad_outputs[0]
        grad_value_MTD = torch.bmm(probabilities_MTT.transpose(1, 2), grad_MTD)
        grad_probabilities_MTT = torch.bmm(grad_MTD, value_MTD.transpose(1, 2))
        grad_scores_MTT = torch._softmax_backward_data(
            grad_probabilities_MTT, probabilities_MTT, -1, query_MTD.dtype
        ).mul_(ctx.scale)
        grad_query_MTD = torch.bmm(grad_scores_MTT, key_MTD)
        return grad_query_MTD, torch.bmm(grad_scores_MTT.transpose(1, 2), query_MTD), grad_value_MTD, None
