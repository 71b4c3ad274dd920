"""What the client asks of a server besides completions: versions, scores, caches, and whether a running server is fit."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import FinetuneError
from finetune.rollout.engine import Call, Completion, Fault, Sampling
from finetune.rollout.vllm import VllmEngine
from tests.rollout.stub_server import STOP, VOCAB, Stub, StubServer, completion_ids, logprob_of

SAMPLING = Sampling(max_new_tokens=3, stop_ids=[STOP], temperature=1.0)
CALL = Call([7, 8], seed=2, count=4)


def honest(call: Call, index: int, version: str = "base") -> Completion:
    ids = completion_ids(call.prompt_ids, call.seed + index, SAMPLING.max_new_tokens)
    return Completion(ids, [logprob_of(token) for token in ids], False, version)


def test_adapters_are_asked_for_by_their_own_names(engine: VllmEngine, stub: Stub) -> None:
    engine.load_adapter(0, "step-000001", Path("/a/1"))
    engine.activate("step-000001")
    assert engine.version == "step-000001"
    assert engine.sample([CALL], SAMPLING)[0][0] == honest(CALL, 0, "step-000001")
    assert stub.asked[-1]["model"] == "step-000001"
    with pytest.raises(FinetuneError, match="does not hold version step-000002"):
        engine.activate("step-000002")
    assert engine.version == "step-000001"
    engine.unload_adapter(0, "step-000001")
    assert engine.list_models(0) == ["base"]


def test_the_base_name_stands_for_a_version_only_where_the_weights_bear_its_stamp(
    engine: VllmEngine, stub: Stub
) -> None:
    with pytest.raises(FinetuneError, match="does not hold version step-000003 under the name base"):
        engine.activate("step-000003", "base")
    engine.stamp_version(0, "step-000003")
    engine.activate("step-000003", "base")
    assert engine.sample([CALL], SAMPLING)[0][0] == honest(CALL, 0, "step-000003")
    with pytest.raises(FinetuneError, match="does not hold version base"):
        engine.activate("base")
    stub.stamp = "default"  # restarted by somebody: the weights are no longer those
    (outcomes,) = engine.sample([CALL], SAMPLING)
    assert all(
        isinstance(fault, Fault) and "from weights default, not from step-000003" in fault.text
        for fault in outcomes
    )


def test_scores_are_those_of_the_given_ids(engine: VllmEngine, stub: Stub) -> None:
    found = engine.score(0, [[1, 2, 3], [4, 5]], "base")
    assert found == [[logprob_of(2), logprob_of(3)], [logprob_of(5)]]

    def other_token(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        return answer | {"prompt_logprobs": [None, {"9": {"logprob": -1.0}}]}

    lies: list[Any] = [
        other_token,
        lambda body, answer: answer | {"prompt_logprobs": None},
        lambda body, answer: answer | {"prompt_logprobs": [None, {"5": {"logprob": float("nan")}}]},
        lambda body, answer: answer | {"model": "other"},
        lambda body, answer: (500, {}),
        lambda body, answer: (404, {}),
    ]
    for lie in lies:
        stub.lie = lie
        with pytest.raises(FinetuneError, match="no log-probs of base") as caught:
            engine.score(0, [[4, 5]], "base")
        assert caught.value.code == "engine_failed"


def test_a_scoring_request_runs_alone_where_the_server_might_not_bear_company(
    engine: VllmEngine, stub: Stub
) -> None:
    running, most, lock = 0, {True: 0, False: 0}, threading.Lock()

    def slow(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        nonlocal running
        scores = body["sampling_params"]["prompt_logprobs"] is not None
        with lock:
            running += 1
            most[scores] = max(most[scores], running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return answer

    stub.lie = slow
    other = threading.Thread(
        target=engine.sample, args=([Call([1 + index]) for index in range(30)], SAMPLING)
    )
    other.start()
    engine.score(0, [[1, 2], [3, 4], [5, 6]], "base")
    other.join()
    assert most[True] == 1
    assert most[False] > 1


def test_the_prefix_cache_is_reset_as_soon_as_the_server_lets_it_go(engine: VllmEngine, stub: Stub) -> None:
    stub.cache_is_held = 2
    engine.reset_prefix_cache(0)
    assert stub.paths.count("/reset_prefix_cache") == 3
    stub.cache_is_held = 1000
    with pytest.raises(FinetuneError, match="kept its prefix cache"):
        engine.reset_prefix_cache(0, limit_s=0.1)


def test_a_server_without_our_extension_has_no_digests(engine: VllmEngine) -> None:
    assert engine.weight_digests(0) is None
    with pytest.raises(FinetuneError, match="no attribute 'other'"):
        engine.call_workers(0, "other")


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "old": ({"version": "0.29.1"}, "0.30 or later"),
    "no token ids": ({"lacking": {"/inference/v1/generate"}}, "--enable-scale-out"),
    "log-probs before temperature": ({"temperature_is_seen": False}, "--logprobs-mode processed_logprobs"),
    "no adapters": ({"lacking": {"/v1/load_lora_adapter"}}, "--enable-lora"),
    "no reload": ({"lacking": {"/weight_info"}}, "VLLM_SERVER_DEV_MODE=1"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_running_server_that_is_unfit_is_refused_with_what_it_lacks(name: str) -> None:
    values, lacked = UNFIT[name]
    stub = Stub(**values)
    sync: Any = "merged" if name == "no reload" else "adapter"
    with StubServer(stub), pytest.raises(FinetuneError, match=lacked) as caught:
        VllmEngine([stub.url], vocab_size=VOCAB, sync=sync)
    assert caught.value.code == "engine_unfit"


def test_a_running_server_that_cuts_the_distribution_or_serves_lower_ranks_is_refused(stub: Stub) -> None:
    with pytest.raises(FinetuneError, match="rank 16, this run trains rank 32"):
        VllmEngine([stub.url], vocab_size=VOCAB, sync="adapter", lora_rank=32)
    VllmEngine([stub.url], vocab_size=VOCAB, sync="adapter", lora_rank=16).close()

    def cut(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] = -9999.0
        return answer

    stub.lie = cut
    with pytest.raises(FinetuneError, match="cuts off unlikely tokens"):
        VllmEngine([stub.url], vocab_size=VOCAB)


def test_a_url_where_nothing_answers_is_an_error_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(FinetuneError, match="no answer from the engine") as caught:
        VllmEngine(["http://127.0.0.1:9"], vocab_size=VOCAB)
    assert caught.value.code == "engine_failed"
    assert threading.active_count() == before


def test_waiting_beats(stub: Stub) -> None:
    beats: list[int] = []
    engine = VllmEngine([stub.url], vocab_size=VOCAB, beat=lambda: beats.append(1))
    stub.lie = lambda body, answer: time.sleep(1.2) or answer
    engine.sample([Call([1])], SAMPLING)
    assert beats
    engine.close()
