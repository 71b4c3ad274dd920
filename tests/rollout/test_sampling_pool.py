"""Calls that wait together are sampled together, and each gets its own outcome."""

import threading

import pytest

from finetune.rollout.engine import Call, Completion, Fault, Sampling
from finetune.rollout.sampling_pool import SamplingPool

WARM, COLD = Sampling(8, [2], 1.0), Sampling(8, [2], 0.0)


class Echo:
    """Answers a call with its own prompt; a prompt [0] makes it fail, [1] answers too little."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[list[int]], Sampling]] = []
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()

    def sample(self, calls, sampling):
        self.batches.append(([call.prompt_ids for call in calls], sampling))
        self.entered.set()
        assert self.go.wait(20)
        if [0] in [call.prompt_ids for call in calls]:
            raise RuntimeError("broken")
        found = [[Completion(list(call.prompt_ids), [0.0], True, "v")] for call in calls]
        return found[1:] if calls[0].prompt_ids == [1] else found

    def close(self):
        pass


@pytest.fixture
def engine():
    return Echo()


@pytest.fixture
def pool(engine):
    pool = SamplingPool(engine)
    yield pool
    engine.go.set()
    pool.close()


def held(engine, pool):
    """Make the engine busy with one call."""
    engine.go.clear()
    future = pool.submit(Call([9]), WARM)
    assert engine.entered.wait(10)
    return future


def test_what_comes_while_the_engine_is_busy_is_the_next_batch(engine, pool):
    first = held(engine, pool)
    others = [pool.submit(Call([number]), WARM) for number in range(10, 15)]
    engine.go.set()
    assert first.result(10).ids == [9]
    assert [future.result(10).ids for future in others] == [[number] for number in range(10, 15)]
    assert [prompts for prompts, _ in engine.batches] == [[[9]], [[10], [11], [12], [13], [14]]]


def test_only_calls_that_are_drawn_alike_share_a_batch(engine, pool):
    held(engine, pool)
    futures = [pool.submit(Call([10 + number]), COLD if number % 2 else WARM) for number in range(4)]
    engine.go.set()
    assert [future.result(10).ids for future in futures] == [[10], [11], [12], [13]]
    assert engine.batches[1:] == [([[10], [12]], WARM), ([[11], [13]], COLD)]


def test_a_call_that_was_cancelled_is_not_sampled(engine, pool):
    held(engine, pool)
    gone, stays = pool.submit(Call([10]), WARM), pool.submit(Call([11]), WARM)
    assert gone.cancel()
    engine.go.set()
    assert stays.result(10).ids == [11]
    assert engine.batches[-1][0] == [[11]]


@pytest.mark.parametrize(("prompt", "text"), [([0], "RuntimeError: broken"), ([1], "ValueError")])
def test_a_failure_is_told_to_its_batch_alone(engine, pool, prompt, text):
    outcome = pool.submit(Call(prompt), WARM).result(10)
    assert isinstance(outcome, Fault)
    assert (outcome.kind, text in outcome.text) == ("server", True)
    assert pool.submit(Call([5]), WARM).result(10).ids == [5]
    assert [error.code for error in pool.errors] == ["engine_failed"]


def test_with_many_threads_no_call_waits_for_another(engine):
    pool = SamplingPool(engine, threads=3)
    engine.go.clear()
    futures = [pool.submit(Call([10 + number]), WARM) for number in range(3)]
    for _ in range(1000):
        if len(engine.batches) == 3:
            break
        threading.Event().wait(0.01)
    assert sorted(prompts for prompts, _ in engine.batches) == [[[10]], [[11]], [[12]]]
    engine.go.set()
    assert [future.result(10).ids for future in futures] == [[10], [11], [12]]
    pool.close()


def test_what_waits_at_the_end_and_what_comes_after_is_told_that_nothing_comes(engine):
    pool = SamplingPool(engine)
    first = held(engine, pool)
    waiting = pool.submit(Call([10]), WARM)
    closing = threading.Thread(target=pool.close)
    closing.start()
    assert waiting.result(10).text == "the bridge was closed"
    engine.go.set()
    closing.join(10)
    assert first.result(10).ids == [9]
    assert pool.submit(Call([11]), WARM).result(10).kind == "server"
