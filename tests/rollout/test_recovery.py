"""What becomes of completions while a server of our own is restarted: they wait for its weights, one restart serves them all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from finetune.errors import FinetuneError
from finetune.rollout.engine import Call, Fault, Sampling
from finetune.rollout.server import ManagedServer, ServerSettings
from finetune.rollout.vllm import RESTARTS, VllmEngine
from tests.rollout.stub_server import VOCAB, Stub, StubServer

SAMPLING = Sampling(max_new_tokens=3, stop_ids=[4], temperature=1.0)
CALLS = [Call([index + 1], seed=index, count=2) for index in range(6)]


class Restartable(ManagedServer):
    """A stand-in for the process: each start is another stub at another port, and the one before is gone."""

    def __init__(self, settings: ServerSettings, stubs: list[Stub]) -> None:
        super().__init__(settings)
        self.stubs, self.running = iter(stubs), None
        self.starts = 0
        self.restart()

    def restart(self, beat: Callable[[], None] = lambda: None) -> float:
        self.stop()
        stub = next(self.stubs, None)
        if stub is None:
            raise FinetuneError("engine_out_of_memory", "no more memory")
        self.running = StubServer(stub)
        self.running.__enter__()
        self.url, self.starts = stub.url, self.starts + 1
        return 0.0

    def stop(self, grace_s: float = 0.0) -> None:
        if self.running:
            self.running.__exit__()
            self.running = None


def dying(after: int) -> Stub:
    """Return a stub that answers so many requests and is dead from then on, as its health says too."""
    stub = Stub()
    left = iter(range(after))

    def lie(body: dict[str, Any], answer: dict[str, Any]) -> Any:
        if next(left, None) is not None:
            return answer
        stub.lacking.add("/health")
        return 500, {"error": "dead"}

    stub.lie = lie
    return stub


@pytest.fixture
def make_engine(settings: ServerSettings) -> Iterator[Callable[[list[Stub]], tuple[VllmEngine, Restartable]]]:
    made: list[VllmEngine] = []

    def make(stubs: list[Stub]) -> tuple[VllmEngine, Restartable]:
        server = Restartable(settings, stubs)
        made.append(VllmEngine([server], vocab_size=VOCAB, timeout_s=20, concurrency=8))
        return made[-1], server

    yield make
    for engine in made:
        engine.close()


def test_one_restart_serves_all_and_nothing_is_sampled_before_the_weights_are_there(make_engine: Any) -> None:
    second = Stub()
    engine, server = make_engine([dying(after=3), second])
    engine.load_adapter(0, "step-000001", "/a/1")
    engine.activate("step-000001")
    sampled_early: list[int] = []

    def redeliver(index: int) -> None:
        time.sleep(0.3)
        engine.load_adapter(index, "step-000001", "/a/1")
        engine.score(index, [[1, 2], [3, 4]], "step-000001")
        sampled_early.extend(1 for body in second.asked if body["sampling_params"]["prompt_logprobs"] is None)

    engine.on_restart = redeliver
    found = engine.sample(CALLS, SAMPLING)
    assert not [outcome for group in found for outcome in group if isinstance(outcome, Fault)]
    assert {outcome.version for group in found for outcome in group} == {"step-000001"}
    assert server.starts == 2
    assert not sampled_early
    assert engine.sample(CALLS, SAMPLING) == found


def test_a_dead_server_is_started_again_before_a_delivery_and_a_living_one_is_left_alone(
    make_engine: Any,
) -> None:
    first = Stub()
    engine, server = make_engine([first, Stub()])
    restarted: list[int] = []
    engine.on_restart = restarted.append
    assert not engine.revive()
    assert (server.starts, restarted) == (1, [])
    first.lacking.add("/health")
    assert engine.revive()
    assert (server.starts, restarted) == (2, [0])
    assert not engine.revive()


def test_an_engine_that_is_closed_leaves_nobody_waiting_for_its_completions(make_engine: Any) -> None:
    stub, is_asked, may_end = Stub(), threading.Event(), threading.Event()

    def hold(body: dict[str, Any], answer: dict[str, Any]) -> Any:
        is_asked.set()
        may_end.wait(30)
        return answer

    stub.lie = hold
    engine, _ = make_engine([stub])
    ended = threading.Event()

    def sample() -> None:
        with contextlib.suppress(concurrent.futures.CancelledError):
            engine.sample(CALLS[:1], SAMPLING)
        ended.set()

    threading.Thread(target=sample, daemon=True).start()
    assert is_asked.wait(10)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    assert ended.wait(10)
    may_end.set()
    closing.join(30)
    assert not closing.is_alive()


def test_a_server_that_dies_of_every_request_is_given_up_and_what_is_lost_says_why(make_engine: Any) -> None:
    engine, server = make_engine([dying(after=0) for _ in range(10)])
    found = engine.sample(CALLS, SAMPLING)
    outcomes = [outcome for group in found for outcome in group]
    assert len(outcomes) == 12
    assert all(
        isinstance(fault, Fault) and fault.kind == "server" and "dead" in fault.text for fault in outcomes
    )
    for _ in range(RESTARTS):
        engine.sample(CALLS, SAMPLING)
    assert server.starts == 1 + RESTARTS


@pytest.mark.parametrize("what", ["restart", "redelivery"])
def test_a_restart_that_fails_ends_the_sampling_with_its_error_and_blocks_nobody(
    make_engine: Any, what: str
) -> None:
    engine, _ = make_engine([dying(after=1), Stub()] if what == "redelivery" else [dying(after=1)])

    def refuse(index: int) -> None:
        raise FinetuneError("engine_failed", "not proved")

    engine.on_restart = refuse
    with pytest.raises(FinetuneError, match="no more memory" if what == "restart" else "not proved"):
        engine.sample(CALLS, SAMPLING)

    def sample_again() -> None:
        with contextlib.suppress(FinetuneError):
            engine.sample(CALLS, SAMPLING)

    again = threading.Thread(target=sample_again)
    again.start()
    again.join(10)
    assert not again.is_alive()


def test_a_restarted_server_without_its_reloaded_weights_samples_nothing_for_their_version(
    make_engine: Any,
) -> None:
    engine, _ = make_engine([dying(after=0), Stub()])
    engine.stamp_version(0, "step-000001")
    engine.activate("step-000001", "base")
    outcomes = [outcome for group in engine.sample(CALLS, SAMPLING) for outcome in group]
    assert all(
        isinstance(fault, Fault) and fault.text == "sampled from weights default, not from step-000001"
        for fault in outcomes
    )
