"""Chunked log-probs against the plain computation, for a frozen and for a trained head; and that full logits never exist."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.model.logprobs import token_logps

N, D, V = 70, 12, 40


def plain(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, temperature: float
) -> torch.Tensor:
    return torch.log_softmax(hidden_ND @ weight_VD.T / temperature, dim=-1)[
        torch.arange(len(targets_N)), targets_N
    ]


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=draw, dtype=torch.float64).float()
    weight = torch.randn(V, D, generator=draw)
    return hidden, weight, torch.randint(V, (N,), generator=draw), torch.randn(N, generator=draw)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("is_trained", [False, True])
def test_equals_plain_log_softmax(
    inputs: tuple[torch.Tensor, ...], is_trained: bool, temperature: float
) -> None:
    hidden, weight, targets, upstream = inputs
    results = []
    for function in (plain, lambda h, w, t, temp: token_logps(h, w, t, temp, chunk=16)):
        own_hidden = hidden.clone().requires_grad_()
        own_weight = weight.clone().requires_grad_(is_trained)
        logps = function(own_hidden, own_weight, targets, temperature)
        (logps * upstream).sum().backward()
        results.append((logps.detach(), own_hidden.grad, own_weight.grad))
    for expected, found in zip(*results, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-6)


def test_no_position_gives_an_empty_result_that_still_reaches_the_graph() -> None:
    for is_trained in (False, True):
        hidden = torch.zeros(0, D, requires_grad=True)
        logps = token_logps(
            hidden, torch.ones(V, D, requires_grad=is_trained), torch.zeros(0, dtype=torch.long)
        )
        logps.sum().backward()
        assert logps.shape == (0,)
        assert hidden.grad is not None


class LargestRows(TorchDispatchMode):
    """Remembers the most rows of any tensor whose last size is the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == V:
                self.rows = max(self.rows, tensor.numel() // V)
        return result


@pytest.mark.parametrize("is_trained", [False, True])
def test_logits_never_exceed_a_chunk(inputs: tuple[torch.Tensor, ...], is_trained: bool) -> None:
    hidden, weight, targets, _ = inputs
    for chunk, expected in ((16, 16), (N, N)):  # the second shows that the watch would see whole logits
        with LargestRows() as watch:
            token_logps(
                hidden.requires_grad_(), weight.clone().requires_grad_(is_trained), targets, chunk=chunk
            ).sum().backward()
        assert watch.rows == expected
