"""Digests of what kernels multiply with: layers that hold their weight packed and out of sight, as vLLM's do on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from finetune.rollout.versions import differing
from finetune.rollout.weights import (
    ServedWeights,
    digest,
    digests,
    drawn_columns,
    placed_matrices,
    sampled,
    served_tensors,
)


class Packed(nn.Module):
    """A layer whose parameter is empty; its weight is in a function."""

    def __init__(self, weight: Tensor, sizes: list[int], bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.output_partition_sizes = sizes
        self.input_size_per_partition = weight.shape[1]
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        copy = weight.clone()
        self.cpu_linear: Callable[..., Tensor] = lambda x, _, bias: nn.functional.linear(x, copy, bias)


class Embedding(nn.Module):
    def __init__(self, weight: Tensor, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.org_vocab_size, self.embedding_dim = rows, weight.shape[1]


class ParallelLMHead(Embedding):
    """Named as vLLM's. It shares its parameter with the embedding and multiplies with a copy of its own."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__(embedding.weight.data, embedding.org_vocab_size)
        self.weight = embedding.weight
        self.quant_method = self
        self.process_weights_after_loading(self)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        copy = self.weight.data.clone()
        self.cpu_linear = lambda x, _, bias: nn.functional.linear(x, copy, bias)


class Model(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self, ours: dict[str, Tensor], rows: int = 5) -> None:
        super().__init__()
        fused = torch.cat([ours[f"block.{name}_proj.weight"] for name in "qkv"])
        bias = torch.cat([ours[f"block.{name}_proj.bias"] for name in "qkv"])
        self.block = nn.Module()
        self.block.qkv_proj = Packed(fused, [4, 2, 2], bias)
        self.block.o_proj = Packed(ours["block.o_proj.weight"], [len(ours["block.o_proj.weight"])])
        self.block.norm = nn.RMSNorm(3)
        padding = torch.zeros(3, fused.shape[1], dtype=fused.dtype)
        self.embed_tokens = Embedding(torch.cat([ours["embed_tokens.weight"], padding]), rows)
        self.lm_head = ParallelLMHead(self.embed_tokens)


class Worker(ServedWeights):
    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.model = model
        self.model_config = type("Config", (), {"dtype": dtype})

    def get_model(self) -> Model:
        return self.model


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def ours(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes = {"q_proj": (4, 3), "k_proj": (2, 3), "v_proj": (2, 3), "o_proj": (3, 4)}
    found = {f"block.{name}.weight": torch.randn(size) for name, size in sizes.items()}
    found |= {f"block.{name}_proj.bias": torch.randn(sizes[f"{name}_proj"][0]) for name in "qkv"}
    found |= {"block.norm.weight": torch.ones(3), "embed_tokens.weight": torch.randn(5, 3)}
    return {name: tensor.to(request.param) for name, tensor in found.items()}


def test_packed_weights_are_read_back_bit_by_bit_under_the_names_of_the_files(
    ours: dict[str, Tensor],
) -> None:
    dtype = ours["block.norm.weight"].dtype
    worker = Worker(Model(ours), dtype)
    served = dict(served_tensors(worker.model, dtype))
    assert set(served) == {*ours, "lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(served[name], tensor), name
    assert torch.equal(served["lm_head.weight"], ours["embed_tokens.weight"])
    assert worker.finetune_weight_names() == list(served)
    assert differing(worker.finetune_weight_digests(), dict(digests(ours.items()))) == []


def test_one_changed_number_in_a_packed_weight_is_found(ours: dict[str, Tensor]) -> None:
    worker = Worker(Model(ours), ours["block.norm.weight"].dtype)
    changed = {name: tensor.clone() for name, tensor in ours.items()}
    changed["block.k_proj.weight"][1, 2] *= 1.01
    found = differing(worker.finetune_weight_digests(), dict(digests(changed.items())))
    assert found == ["block.k_proj.weight"]


def test_samples_are_the_same_columns_on_both_sides() -> None:
    torch.manual_seed(0)
    sizes = {"q_proj": (4, 96), "k_proj": (2, 96), "v_proj": (2, 96), "o_proj": (96, 4)}
    ours = {f"block.{name}.weight": torch.randn(size) for name, size in sizes.items()}
    ours |= {f"block.{name}_proj.bias": torch.randn(sizes[f"{name}_proj"][0]) for name in "qkv"}
    ours |= {"block.norm.weight": torch.ones(3), "embed_tokens.weight": torch.randn(5, 96)}
    worker = Worker(Model(ours), torch.float32)

    def wrong(draw: str) -> list[str]:
        expected = {name: digest(sampled(name, tensor, draw)) for name, tensor in ours.items()}
        return differing(worker.finetune_sampled_digests(draw), expected)

    assert wrong("a") == wrong("b") == []
    sample = dict(served_tensors(worker.model, torch.float32, "a"))["block.k_proj.weight"]
    columns = drawn_columns("block.k_proj.weight", 96, "a")
    assert torch.equal(sample, ours["block.k_proj.weight"][:, columns])
    ours["block.k_proj.weight"][1, columns[7]] += 1
    assert wrong("a") == ["block.k_proj.weight"]
    ours["block.k_proj.weight"][1, columns[7]] -= 1
    ours["block.q_proj.weight"][2] *= -1  # one output
    ours["embed_tokens.weight"][4] += 1  # one token, in the embedding and in the head that shares it
    ours["block.norm.weight"][1] = 2
    names = ["block.q_proj.weight", "block.norm.weight", "embed_tokens.weight", "lm_head.weight"]
    for draw in "abc":
        assert sorted(wrong(draw)) == sorted(names)


def test_columns_are_drawn_anew_for_each_draw_and_each_block() -> None:
    names = ("layers.0.mlp.up.weight", "layers.0.mlp.gate.weight", "layers.1.mlp.up.weight")
    first, fused, other = (drawn_columns(name, 1000, "a").tolist() for name in names)
    again = drawn_columns(names[0], 1000, "b").tolist()
    assert first == fused
    assert len({tuple(columns) for columns in (first, other, again)}) == 3
    assert {number for draw in range(400) for number in drawn_columns("w", 64, str(draw)).tolist()} == set(
        range(64)
    )
    assert drawn_columns("w", 32, "a").tolist() == list(range(32))


def test_a_head_that_was_not_packed_anew_is_found_and_mended(ours: dict[str, Tensor]) -> None:
    worker = Worker(Model(ours), ours["block.norm.weight"].dtype)
    ours["embed_tokens.weight"] = ours["embed_tokens.weight"] * 2
    worker.model.embed_tokens.weight.data[:5] = ours["embed_tokens.weight"]
    expected = dict(digests(ours.items()))
    assert differing(worker.finetune_weight_digests(), expected) == ["lm_head.weight"]
    assert worker.finetune_repack_head() == 1
    assert differing(worker.finetune_weight_digests(), expected) == []


def test_zeros_have_one_digest_and_types_and_shapes_have_their_own() -> None:
    zeros = torch.zeros(2, 3)
    assert digest(-zeros) == digest(zeros)
    assert digest(zeros + 1e-42) == digest(zeros)  # subnormal
    assert digest(zeros + 1e-30) != digest(zeros)
    assert digest(zeros.bfloat16()) != digest(zeros)
    assert digest(zeros.reshape(3, 2)) != digest(zeros)
    assert digest(torch.arange(6).reshape(2, 3).T) == digest(torch.tensor([[0, 3], [1, 4], [2, 5]]))


def test_matrices_of_an_adapter_are_named_by_module_and_what_lies_past_its_rank_is_told() -> None:
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.qkv_proj, model.o_proj, model.idle = nn.Module(), nn.Module(), nn.Module()
    a = [torch.zeros(2, 1, 4, 3) for _ in range(3)]
    b = [torch.zeros(2, 1, 5, 4) for _ in range(3)]
    for number, (left, right) in enumerate(zip(a, b, strict=True)):
        left[1, 0, :2] = number + 1
        right[1, 0, :, :2] = number + 5
    model.qkv_proj.lora_a_stacked, model.qkv_proj.lora_b_stacked = tuple(a), tuple(b)
    model.o_proj.lora_a_stacked, model.o_proj.lora_b_stacked = (a[0].clone(),), (b[0].clone(),)
    model.o_proj.lora_a_stacked[0][1, 0, 3, 1] = 1.0
    model.idle.lora_a_stacked, model.idle.lora_b_stacked = (a[0] * 0,), (b[0] * 0,)
    found = dict(placed_matrices(model, 1, rank=2))
    assert set(found) == {f"{name}_proj.{side}" for name in "qkv" for side in "AB"} | {
        "o_proj.A.past-its-rank",
        "o_proj.B.past-its-rank",
    }
    assert torch.equal(found["k_proj.A"], torch.full((2, 3), 2.0))
    assert torch.equal(found["v_proj.B"], torch.full((5, 2), 7.0))
    assert dict(placed_matrices(model, 0, rank=2)) == {}
