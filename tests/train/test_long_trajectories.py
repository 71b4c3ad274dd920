"""What an agent's long work costs: a trajectory of 16,000 tokens never makes whole logits, and many segments need no more
memory than few."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.model import policy
from finetune.model.footprint import LOGITS_CHUNK
from finetune.model.logprobs import token_logps
from finetune.rank import run_rank
from finetune.records import StopFlag
from tests.train.agent_batches import agent_rollout, conversation, torn, write_batches
from tests.train.runs import finish, make_prompts_run, metrics

VOCABULARY, CONTEXT = 49_152, 16_384
MODEL = f"builtin:tiny?vocabulary={VOCABULARY}&context={CONTEXT}"
COMMON: dict[str, Any] = {
    "model": MODEL,
    "tasks": ["builtin:desk"],
    "data": ["tasks:builtin:desk"],
    "num_prompts": 8,
    "group_size": 2,
    "global_batch_size": 2,
    "max_steps": 1,
    "max_length": CONTEXT,
}


class WholeLogits(Exception):
    """A tensor over the vocabulary has more rows than a chunk."""


class NoWholeLogits(TorchDispatchMode):
    """Fails on any tensor whose last size is the vocabulary and whose rows exceed the chunk; counts those that do not."""

    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == VOCABULARY:
                self.seen += 1
                if tensor.numel() // VOCABULARY > LOGITS_CHUNK:
                    raise WholeLogits(f"{function}: {tuple(tensor.shape)}")
        return result


def batches(folder: Path, num_calls: int, tokens: tuple[int, int], cut: bool = False) -> Path:
    """Write a batch of two rollouts, of which the first has all the calls."""
    draw = random.Random(3)
    calls = conversation("1-0-0", draw, num_calls, tokens)
    first = torn(calls, set(range(num_calls))) if cut else calls
    other = agent_rollout("1-0-1", 0, 1, 0.0, conversation("1-0-1", draw, 1))
    return write_batches(folder, [agent_rollout("1-0-0", 0, 0, 1.0, first), other], 1)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_trajectory_of_16000_tokens_trains_without_whole_logits(
    is_chunked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = batches(tmp_path / "a", 40, (200, 200))
    run = make_prompts_run(tmp_path / "run", replay=str(recorded), **COMMON)
    if not is_chunked:
        monkeypatch.setattr(policy, "token_logps", functools.partial(token_logps, chunk=CONTEXT))
        with NoWholeLogits(), pytest.raises(WholeLogits):
            run_rank(run, 0, 1, None, StopFlag())
        return
    with NoWholeLogits() as watch:
        assert run_rank(run, 0, 1, None, StopFlag()).status == "succeeded"
    assert watch.seen >= 8000 // LOGITS_CHUNK
    (line,) = metrics(run)
    assert line["num_supervised"] > 8000
    assert line["ledger"]["calls"]["trained"] == 41


@pytest.mark.slow
@pytest.mark.proof
def test_many_segments_need_no_more_memory_than_few(tmp_path: Path) -> None:
    def peak(name: str, num_segments: int, **settings: Any) -> int:
        # Each segment is one call of some 1,500 tokens that continues nothing.
        draw = random.Random(3)
        calls = [conversation("1-0-0", draw, 1, (700, 800))[0] for _ in range(num_segments)]
        for index, call in enumerate(calls):
            call.index, call.digest = index, str(index)
        other = agent_rollout("1-0-1", 0, 1, 0.0, conversation("1-0-1", draw, 1))
        recorded = write_batches(tmp_path / name, [agent_rollout("1-0-0", 0, 0, 1.0, calls), other], 1)
        run = make_prompts_run(
            tmp_path / f"{name}-run",
            replay=str(recorded),
            **COMMON | {"init_adapter": None} | settings,
        )
        outcome = finish(run)
        assert outcome["exit_code"] == 0, outcome
        return int(metrics(run)[0]["peak_memory_bytes"])

    few, many = peak("few", 4), peak("many", 64)
    assert many <= 1.10 * few, (few, many)
    together = peak("together", 64, batch_size_per_gpu=64, micro_batch_tokens=200_000)
    assert together > 1.3 * few, "the measurement would see it"
