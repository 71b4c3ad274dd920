"""Log-probabilities of chosen tokens from hidden states, in chunks; the logits of all positions never exist.

Tensors: N supervised positions, C positions of one chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from finetune.model.footprint import LOGITS_CHUNK


def token_logps(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    chunk: int = LOGITS_CHUNK,
    entropy_N: Tensor | None = None,
) -> Tensor:
    """Return log p(target) at each position, shape (N,), float32: log_softmax(hidden @ weight^T / temperature)[target].

    entropy_N, where it is given, is filled with the entropy of each position's distribution in nats, outside the graph.

    A frozen head costs two matrix products a position instead of the three of recomputation, see `_FrozenHead`; a
    trained one recomputes its logits chunk by chunk. Both equal the plain computation up to rounding.
    """
    if not weight_VD.requires_grad:
        return _FrozenHead.apply(hidden_ND, weight_VD, targets_N, temperature, chunk, entropy_N)
    if not len(hidden_ND):
        return hidden_ND.sum(dim=1).float()
    parts = []
    for start in range(0, len(hidden_ND), chunk):
        part = slice(start, start + chunk)
        # Bound and not passed on: what a checkpoint is given must not be written to.
        into = functools.partial(_chunk_logps, entropy_C=None if entropy_N is None else entropy_N[part])
        parts.append(
            checkpoint(into, hidden_ND[part], weight_VD, targets_N[part], temperature, use_reentrant=False)
        )
    return torch.cat(parts)


def _chunk_logps(
    hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, temperature: float, entropy_C: Tensor | None
) -> Tensor:
    logits_CV = F.linear(hidden_CD, weight_VD).float() / temperature
    if entropy_C is not None:
        logps_CV = logits_CV.detach().log_softmax(dim=1)
        entropy_C.copy_(-(logps_CV.exp() * logps_CV).sum(dim=1))
    return logits_CV.gather(1, targets_C[:, None])[:, 0] - logits_CV.logsumexp(dim=1)


class _FrozenHead(torch.autograd.Function):
    """Log-probs through a head that is not trained.

    d log p(target) / d hidden = (onehot(target) - softmax(logits)) @ weight / temperature does not depend on what
    comes later in the loss, so it is made while the logits of the chunk are there: the backward only scales it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        entropy_N: Tensor | None,
    ) -> Tensor:
        wants_grad = hidden_ND.requires_grad
        logps_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
        slope_ND = torch.empty_like(hidden_ND) if wants_grad else None
        for start in range(0, len(hidden_ND), chunk):
            part = slice(start, start + chunk)
            targets_C1 = targets_N[part, None]
            logits_CV = F.linear(hidden_ND[part], weight_VD).float().div_(temperature)
            logsumexp_C1 = logits_CV.logsumexp(dim=1, keepdim=True)
            logps_N[part] = (logits_CV.gather(1, targets_C1) - logsumexp_C1)[:, 0]
            logits_CV.sub_(logsumexp_C1)
            if entropy_N is not None:
                entropy_N[part] = -(logits_CV.exp() * logits_CV).sum(dim=1)
            if slope_ND is not None:
                minus_softmax_CV = logits_CV.exp_().neg_()
                minus_softmax_CV.scatter_add_(1, targets_C1, torch.ones_like(targets_C1, dtype=torch.float32))
                slope_ND[part] = minus_softmax_CV.to(weight_VD.dtype) @ weight_VD
        if slope_ND is not None:
            ctx.save_for_backward(slope_ND)
        ctx.temperature = temperature
        return logps_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (slope_ND,) = ctx.saved_tensors
        scale_N1 = (grad_outputs[0] / ctx.temperature)[:, None]
        return (scale_N1 * slope_ND).to(slope_ND.dtype), None, None, None, None, None
