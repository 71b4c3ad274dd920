"""The client of vLLM servers against a stand-in that lies: what cannot be trained on is asked again or lost, never shifted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from finetune.errors import FinetuneError
from finetune.rollout.engine import Call, Completion, Fault, Sampling
from finetune.rollout.slots import Slots
from finetune.rollout.vllm import VllmEngine
from tests.rollout.stub_server import STOP, VOCAB, Stub, StubServer, completion_ids, logprob_of

SAMPLING = Sampling(max_new_tokens=3, stop_ids=[STOP], temperature=1.0)
CALL = Call([7, 8], seed=2, count=4)


def honest(call: Call, index: int, version: str = "base") -> Completion:
    ids = completion_ids(call.prompt_ids, call.seed + index, SAMPLING.max_new_tokens)
    return Completion(ids, [logprob_of(token) for token in ids], False, version)


def changing(change: Callable[[dict[str, Any]], Any], only_first: bool = False) -> Any:
    """Return a lie that changes the choice of seed 3 (index 1 of CALL), always or in the first answer alone."""
    told: list[int] = []

    def lie(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        index = 3 - body["sampling_params"]["seed"]
        if 0 <= index < len(answer["choices"]) and not (only_first and told):
            told.append(index)
            change(answer["choices"][index])
        return answer

    return lie


def test_ids_and_logprobs_come_as_served(engine: VllmEngine) -> None:
    calls = [CALL, Call([1, 2, 3], seed=40, count=1), Call([9], seed=0, count=0)]
    found = engine.sample(calls, SAMPLING)
    assert found == [[honest(CALL, i) for i in range(4)], [honest(calls[1], 0)], []]


def test_each_request_carries_every_parameter_and_ids_instead_of_text(engine: VllmEngine, stub: Stub) -> None:
    engine.sample([Call([7, 8], seed=2, count=2)], Sampling(3, [STOP, 9], 0.7))
    (body,) = stub.asked
    assert (body["token_ids"], body["model"]) == ([7, 8], "base")
    assert "prompt" not in body
    expected = {
        "n": 2,
        "seed": 2,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 3,
        "min_tokens": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [4, 9],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    assert expected.items() <= body["sampling_params"].items()


def test_choices_are_matched_by_index_not_by_position(engine: VllmEngine, stub: Stub) -> None:
    stub.lie = lambda body, answer: answer | {"choices": answer["choices"][::-1]}
    calls = [CALL, Call([1, 1], seed=9, count=3)]
    assert engine.sample(calls, SAMPLING) == [[honest(call, i) for i in range(call.count)] for call in calls]


def test_a_missing_choice_is_asked_for_again_with_its_own_seed(engine: VllmEngine, stub: Stub) -> None:
    stub.lie = lambda body, answer: (
        answer
        | {"choices": [c for c in answer["choices"] if body["sampling_params"]["n"] == 1 or c["index"] != 2]}
    )
    assert engine.sample([CALL], SAMPLING) == [[honest(CALL, i) for i in range(4)]]
    assert [(b["sampling_params"]["n"], b["sampling_params"]["seed"]) for b in stub.asked] == [(4, 2), (1, 4)]


def test_a_choice_that_stays_missing_is_lost_and_shifts_no_other(engine: VllmEngine, stub: Stub) -> None:
    def lie(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        first = body["sampling_params"]["seed"]
        return answer | {"choices": [c for c in answer["choices"] if first + c["index"] != 3]}

    stub.lie = lie
    ((first, lost, *others),) = engine.sample([CALL], SAMPLING)
    assert [first, *others] == [honest(CALL, 0), honest(CALL, 2), honest(CALL, 3)]
    assert lost == Fault("protocol", "0 choices with index 0 among 0")
    assert len(stub.asked) == 3  # the call, and twice the one


def test_of_two_choices_with_one_index_neither_is_believed(engine: VllmEngine, stub: Stub) -> None:
    def lie(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        if len(answer["choices"]) == 4:
            answer["choices"][1]["index"] = 0
        return answer

    stub.lie = lie
    assert engine.sample([CALL], SAMPLING) == [[honest(CALL, i) for i in range(4)]]
    assert sorted(body["sampling_params"]["seed"] for body in stub.asked[1:]) == [2, 3]


def spoil(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda choice: choice.update(changes)


def content_of(values: list[Any]) -> dict[str, Any]:
    return {"logprobs": {"content": values}}


def entries(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"token_id": token, "logprob": value} for token, value in pairs]


SPOILED = {
    "no ids": (spoil(token_ids=None), "no token ids"),
    "ids as text": (spoil(token_ids=["1", "2", "3"]), "no token ids"),
    "past the vocabulary": (spoil(token_ids=[25, VOCAB, 5]), "none of the 50"),
    "negative id": (spoil(token_ids=[25, -1, 5]), "none of the 50"),
    "a log-prob less": (spoil(**content_of(entries((25, -1.0), (33, -1.0)))), "2 log-probs for 3 tokens"),
    "no log-probs": (spoil(logprobs=None), "no log-probs"),
    "of another token": (
        spoil(**content_of(entries((25, -1.0), (9, -1.0), (5, -1.0)))),
        "no log-prob of the sampled token 33",
    ),
    "NaN": (spoil(**content_of(entries((25, -1.0), (33, float("nan")), (5, -1.0)))), "nan of token 33"),
    "null": (spoil(**content_of([{"token_id": t, "logprob": None} for t in (25, 33, 5)])), "None of token"),
    "the floor": (spoil(**content_of(entries((25, -1.0), (33, -9999.0), (5, -1.0)))), "-9999"),
    "above 0": (spoil(**content_of(entries((25, -1.0), (33, 1e-3), (5, -1.0)))), "0.001 of token 33"),
    "stop without a stop token": (spoil(finish_reason="stop"), "not among its ids"),
    "stop token named, not scored": (spoil(finish_reason="stop", stop_reason=STOP), "not among its ids"),
    "cut too early": (
        spoil(token_ids=[25, 33], **content_of(entries((25, -1.0), (33, -1.0)))),
        "cut after 2 tokens where the limit is 3",
    ),
    "goes on after the end": (
        spoil(token_ids=[25, STOP, 5], **content_of(entries((25, -1.0), (STOP, -1.0), (5, -1.0)))),
        "goes on after a stop token",
    ),
    "aborted": (spoil(finish_reason="abort"), "ended by 'abort'"),
    "other weights": (
        spoil(weight_versions=[{"version": "old", "start": 0, "end": 3}]),
        "from weights old, not from base or default",
    ),
    "weights switched": (
        spoil(
            weight_versions=[
                {"version": "default", "start": 0, "end": 1},
                {"version": "new", "start": 1, "end": 3},
            ]
        ),
        "from weights new",
    ),
    "spans too short": (
        spoil(weight_versions=[{"version": "default", "start": 0, "end": 2}]),
        "leave tokens out",
    ),
    "no spans": (spoil(weight_versions=None), "no versions of the weights"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_choice_is_asked_for_again_and_then_lost(engine: VllmEngine, stub: Stub, name: str) -> None:
    change, reason = SPOILED[name]
    stub.lie = changing(change, only_first=True)
    found = engine.sample([CALL], SAMPLING)
    assert found == [[honest(CALL, i) for i in range(4)]]
    stub.lie = changing(change)
    ((first, lost, *others),) = engine.sample([CALL], SAMPLING)
    assert [first, *others] == [honest(CALL, 0), honest(CALL, 2), honest(CALL, 3)]
    assert isinstance(lost, Fault)
    assert lost.kind == "protocol"
    assert reason in lost.text


def test_the_logprob_is_that_of_the_sampled_token_whatever_stands_first(
    engine: VllmEngine, stub: Stub
) -> None:
    candidates = [{"token_id": 5, "logprob": -0.1}, {"token_id": 7, "logprob": -2.3}]
    lie = spoil(
        token_ids=[7, 7, 7],
        **content_of([{"token_id": 5, "logprob": -0.1, "top_logprobs": candidates}] * 3),
    )
    stub.lie = changing(lie)
    ((_, found, *_),) = engine.sample([CALL], SAMPLING)
    assert found == Completion([7, 7, 7], [-2.3] * 3, False, "base")


def test_the_end_token_is_there_once_whether_or_not_the_server_drops_it(
    engine: VllmEngine, stub: Stub
) -> None:
    kept = spoil(
        token_ids=[25, STOP],
        finish_reason="stop",
        stop_reason=STOP,
        **content_of(entries((25, -1.0), (STOP, -0.5))),
    )
    dropped = spoil(
        token_ids=[25],
        finish_reason="stop",
        stop_reason=STOP,
        **content_of(entries((25, -1.0), (STOP, -0.5))),
    )
    for lie in (kept, dropped):
        stub.lie = changing(lie)
        ((_, found, other, _),) = engine.sample([CALL], SAMPLING)
        assert found == Completion([25, STOP], [-1.0, -0.5], True, "base")
        assert isinstance(other, Completion)
        assert (other.stopped, STOP in other.ids) == (False, False)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda body, answer: answer | {"model": "other"}, "asked model base, but other answered"),
        (lambda body, answer: answer | {"prompt_token_ids": [0, 7, 8]}, "prompt of the answer"),
        (lambda body, answer: {"detail": "x"}, "without choices"),
        (lambda body, answer: (200, b"<html>"), "no JSON"),
        (lambda body, answer: (404, {"error": "no such model"}), "refused with 404"),
    ],
)
def test_an_answer_to_something_else_loses_all_its_completions(
    engine: VllmEngine, stub: Stub, lie: Any, reason: str
) -> None:
    stub.lie = lie
    ((*faults,),) = engine.sample([CALL], SAMPLING)
    assert len(faults) == 4
    assert all(isinstance(f, Fault) and f.kind == "protocol" and reason in f.text for f in faults)


def test_a_failing_server_is_tried_once_more_and_then_its_completions_are_lost(
    engine: VllmEngine, stub: Stub
) -> None:
    answers = iter([(500, {}), None])
    stub.lie = lambda body, answer: next(answers) or answer
    assert engine.sample([CALL], SAMPLING) == [[honest(CALL, i) for i in range(4)]]
    stub.lie = lambda body, answer: (503, {"error": "dead"})
    found = engine.sample([CALL, Call([1], count=1)], SAMPLING)
    assert [[fault.kind for fault in group] for group in found] == [["server"] * 4, ["server"]]  # type: ignore[union-attr]


def test_a_server_that_is_gone_or_silent_loses_its_completions_alone(stub: Stub) -> None:
    other = Stub()
    with StubServer(other):
        engine = VllmEngine([stub.url, other.url], vocab_size=VOCAB, timeout_s=0.5)
        stub.lie = lambda body, answer: time.sleep(1.5) or answer
        calls = [Call([index + 1], seed=index) for index in range(4)]
        found = [outcome for (outcome,) in engine.sample(calls, SAMPLING)]
        assert [isinstance(each, Fault) for each in found] == [True, False, True, False]
        assert found[1::2] == [honest(call, 0) for call in calls[1::2]]
        assert "ReadTimeout" in found[0].text  # type: ignore[union-attr]
        engine.close()


def test_no_more_completions_are_asked_at_once_than_the_server_makes(engine: VllmEngine, stub: Stub) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def slow(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        nonlocal running, most
        count = body["sampling_params"]["n"]
        with lock:
            running += count
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= count
        return answer

    stub.lie = slow
    calls = [Call([index + 1], seed=index, count=3) for index in range(8)] + [Call([3], seed=5, count=19)]
    found = engine.sample(calls, SAMPLING)
    assert found == [[honest(call, i) for i in range(call.count)] for call in calls]
    assert 3 <= most <= 8
    assert max(body["sampling_params"]["n"] for body in stub.asked) == 8  # 19 are three requests


def test_a_large_request_is_not_overtaken_and_one_that_gave_up_holds_no_room() -> None:
    order: list[str] = []

    async def play() -> None:
        slots = Slots(4)
        await slots.take(3)

        async def come(name: str, count: int) -> None:
            await slots.take(count)
            order.append(name)
            slots.give(count)

        tasks = [asyncio.create_task(come(*what)) for what in (("all", 4), ("gone", 4), ("one", 1))]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert order == []  # "one" would fit, but "all" came first
        slots.give(3)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(slots.take(4), 1)

    asyncio.run(play())
    assert order == ["all", "one"]


def test_at_temperature_zero_one_request_answers_for_all(engine: VllmEngine, stub: Stub) -> None:
    found = engine.sample([CALL], Sampling(3, [STOP], 0.0))
    assert found == [[honest(CALL, 0)] * 4]
    assert [body["sampling_params"]["n"] for body in stub.asked] == [1]


def test_what_the_server_would_bend_or_cut_is_refused_before_anything_is_asked(
    engine: VllmEngine, stub: Stub
) -> None:
    for temperature in (0.005, 2.5):
        with pytest.raises(FinetuneError, match="temperature") as caught:
            engine.sample([CALL], Sampling(3, [STOP], temperature))
        assert caught.value.code == "bad_value"
    for prompt in ([], [1] * 62):  # 62 + 3 > 64
        with pytest.raises(FinetuneError, match="prompt 1") as caught:
            engine.sample([CALL, Call(prompt)], SAMPLING)
        assert caught.value.code == "too_long"
    assert not stub.asked
    assert engine.sample([Call([1] * 61)], SAMPLING)
