"""The official client against the bridge, with the engine of this process on builtin:tiny: what it gets is what was sampled."""

import threading

import httpx
import pytest
import torch

from finetune.model.builtin import load_model
from finetune.model.source import resolve_source
from finetune.rollout.bridge import Bridge, BridgeSettings
from finetune.rollout.engine import Call, Sampling
from finetune.rollout.local import LocalEngine
from tests.rollout.scripted import BASH, ScriptedEngine, call_text, tiny_chat

openai = pytest.importorskip("openai", reason="the official client is not installed")
USER = {"role": "user", "content": "what is here?"}


@pytest.fixture(scope="module")
def chat():
    return tiny_chat(context=1024)


@pytest.fixture(scope="module")
def engine():
    model = load_model(resolve_source("builtin:tiny?context=1024"), torch.float32)
    model.get_output_embeddings().weight.data *= 20
    return LocalEngine(model, "step-3")


@pytest.fixture
def bridge(engine, chat):
    with Bridge(engine, chat, None, BridgeSettings(1024, 12, 1.0)) as bridge:
        yield bridge


def official(session, **options):
    transport = httpx.HTTPTransport(uds=str(session.socket))
    http_client = httpx.Client(transport=transport)
    return openai.OpenAI(base_url=session.url, api_key=session.token, http_client=http_client, **options)


def test_what_the_model_sampled_is_recorded_and_told(bridge, engine, chat):
    session = bridge.open("r", seed=4)
    asking = official(session)
    answer = asking.chat.completions.create(model="policy", messages=[USER], tools=[BASH])
    talk = [USER, answer.choices[0].message.model_dump(exclude_none=True), USER]
    again = asking.chat.completions.create(model="policy", messages=talk, tools=[BASH])
    first, second = bridge.close(session)
    for record, told in ((first, answer), (second, again)):
        sampling = Sampling(12, chat.stop_token_ids, 1.0)
        ((alone,),) = engine.sample([Call(record.prompt_ids, record.sampling["seed"])], sampling)
        assert (record.completion_ids, record.version) == (alone.ids, "step-3")
        assert record.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert told.usage.completion_tokens == len(alone.ids)
        ids = alone.ids[:-1] if alone.stopped else alone.ids
        assert (told.choices[0].message.content or "") == chat.tokens.decoded(ids)
    sampled = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(sampled)] == sampled


def test_the_official_client_reads_the_stream(chat):
    engine = ScriptedEngine(chat, ["Looking. " + call_text("ls -l")])
    with Bridge(engine, chat, None, BridgeSettings(1024, 64)) as bridge:
        session = bridge.open("r", seed=4)
        parts = list(
            official(session).chat.completions.create(
                model="policy",
                messages=[USER],
                tools=[BASH],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        deltas = [part.choices[0].delta for part in parts if part.choices]
        pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
        assert "".join(delta.content or "" for delta in deltas) == "Looking."
        assert "".join(piece.function.arguments for piece in pieces) == '{"command": "ls -l"}'
        assert (pieces[0].function.name, parts[-2].choices[0].finish_reason) == ("bash", "tool_calls")
        assert parts[-1].usage.completion_tokens == len(bridge.close(session)[0].completion_ids)


def test_it_retries_a_fault_of_the_engine_and_the_retry_is_the_one_used(chat):
    from finetune.rollout.engine import Fault

    engine = ScriptedEngine(chat, [Fault("server", "restarting"), "hello"])
    with Bridge(engine, chat, None, BridgeSettings(1024, 64)) as bridge:
        session = bridge.open("r", seed=4)
        answer = official(session, max_retries=2).chat.completions.create(model="policy", messages=[USER])
        assert answer.choices[0].message.content == "hello"
        assert [(record.status, record.attempt) for record in bridge.close(session)] == [
            ("server", 1),
            ("used", 2),
        ]


def test_it_gives_up_at_its_own_time_limit_and_its_call_is_aborted(chat):
    engine = ScriptedEngine(chat, ["slow"], hold=threading.Event())
    with Bridge(engine, chat, None, BridgeSettings(1024, 64)) as bridge:
        session = bridge.open("r", seed=4)
        asking = official(session, timeout=0.5, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            asking.chat.completions.create(model="policy", messages=[USER])
        engine.hold.set()
        assert [record.status for record in bridge.close(session)] == ["aborted"]


def test_it_does_not_repeat_what_was_refused(bridge):
    session = bridge.open("r", seed=4)
    with pytest.raises(openai.BadRequestError, match="one completion"):
        official(session).chat.completions.create(model="policy", messages=[USER], n=2)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(
            base_url=session.url,
            api_key="wrong",
            http_client=httpx.Client(transport=httpx.HTTPTransport(uds=str(session.socket))),
        ).models.list()
    assert [model.id for model in official(session).models.list()] == ["policy", "helper"]


def test_rollouts_of_the_engine_in_this_process_are_sampled_in_batches(engine, chat):
    sizes = []

    class Counting(LocalEngine):
        def sample(self, calls, sampling):
            sizes.append(len(calls))
            return super().sample(calls, sampling)

    with Bridge(Counting(engine.model, "v"), chat, None, BridgeSettings(1024, 12)) as bridge:
        sessions = [bridge.open(f"r-{number}", seed=number) for number in range(8)]

        def ask(session):
            official(session).chat.completions.create(model="policy", messages=[USER])

        threads = [threading.Thread(target=ask, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        records = [bridge.close(session)[0] for session in sessions]
    assert sum(sizes) == 8
    assert len(sizes) < 8
    for record in records:
        ((alone,),) = engine.sample(
            [Call(record.prompt_ids, record.sampling["seed"])], Sampling(12, chat.stop_token_ids, 1.0)
        )
        assert alone.ids == record.completion_ids
