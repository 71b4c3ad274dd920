"""What agents are told and what is recorded: purposes, attempts, parameters, faults, departures."""

import json
import threading

import httpx
import pytest

from finetune.errors import FinetuneError
from finetune.rollout.bridge import Bridge, BridgeSettings
from finetune.rollout.engine import Fault
from tests.rollout.scripted import (
    BASH,
    CONTEXT,
    USER,
    ScriptedEngine,
    call_text,
    client,
    departed,
    post,
    streamed,
    tiny_chat,
    told,
    wait_for,
)

TITLE = [{"role": "system", "content": "You are a title generator."}, USER]


@pytest.fixture(scope="module")
def chat():
    return tiny_chat()


@pytest.fixture
def engine(chat):
    return ScriptedEngine(chat, ["hello"])


@pytest.fixture
def bridge(engine, chat):
    with Bridge(engine, chat, None, BridgeSettings(CONTEXT, 64, 0.7)) as bridge:
        yield bridge


@pytest.fixture
def session(bridge):
    return bridge.open("r-1", seed=5)


def test_an_answer_is_recorded_by_the_ids_that_were_sampled(bridge, session, engine, chat):
    answer = post(session, [USER]).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert (answer["choices"][0]["finish_reason"], answer["model"]) == ("stop", "policy")
    (record,) = bridge.close(session)
    assert (record.rollout, record.index, record.purpose, record.attempt) == ("r-1", 0, "policy", 1)
    assert record.prompt_ids == engine.calls[0].prompt_ids == chat.prompt([USER])
    assert record.completion_ids[-1] in chat.stop_token_ids
    assert chat.tokens.decoded(record.completion_ids[:-1]) == "hello"
    assert record.logprobs == [-0.5] * len(record.completion_ids)
    assert (record.version, record.stopped, record.status, record.history) == (
        "step-1",
        True,
        "used",
        "first",
    )
    assert answer["usage"] == {
        "prompt_tokens": len(record.prompt_ids),
        "completion_tokens": len(record.completion_ids),
        "total_tokens": len(record.prompt_ids) + len(record.completion_ids),
    }


def test_tool_calls_are_told_in_the_wire_format_and_their_results_are_taken(bridge, session, engine):
    engine.script = ["Looking. " + call_text("ls"), "done"]
    response = post(session, [USER], tools=[BASH])
    message = told(response)
    (call,) = message["tool_calls"]
    assert (message["content"], call["type"], call["function"]["name"]) == ("Looking.", "function", "bash")
    assert json.loads(call["function"]["arguments"]) == {"command": "ls"}
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    talk = [USER, message, {"role": "tool", "tool_call_id": call["id"], "content": "a.txt"}]
    assert told(post(session, talk, tools=[BASH]))["content"] == "done"
    first, second = bridge.close(session)
    assert (first.status, second.status, second.parent, second.extends) == ("used", "used", 0, 0)


def test_a_stream_tells_the_same_in_parts(bridge, session, engine):
    engine.script = ["x" * 150 + call_text("y" * 150) + call_text("z")]
    whole = told(post(session, [USER], tools=[BASH]))
    response = post(session, [USER], tools=[BASH], stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, usage = streamed(response)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    for place, call in enumerate(whole["tool_calls"]):
        own = [piece for piece in pieces if piece["index"] == place]
        assert own[0]["function"]["name"] == "bash"
        assert "".join(piece["function"]["arguments"] for piece in own) == call["function"]["arguments"]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [
        "tool_calls"
    ]
    assert (usage["choices"], usage["usage"]["completion_tokens"] > 0) == ([], True)
    assert len({part["id"] for part in [*parts, usage]}) == 1
    without = streamed(post(session, [USER], stream=True))
    assert all(part["choices"] for part in without)


def test_a_cut_answer_says_so(session, engine):
    engine.script = ["and so on..."]
    answer = post(session, [USER]).json()
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (
        "and so on",
        "length",
    )


def test_the_plan_decides_how_is_sampled_and_what_was_asked_otherwise_is_recorded(bridge, session, engine):
    asked = {
        "temperature": 0.1,
        "max_tokens": 9,
        "top_p": 1.0,
        "stop": ["x"],
        "n": 1,
        "seed": 3,
        "user": "me",
    }
    post(session, [USER], **asked, presence_penalty=0, response_format={"type": "json_object"})
    (record,) = bridge.close(session)
    assert (engine.samplings[0].temperature, engine.samplings[0].max_new_tokens) == (0.7, 64)
    assert record.sampling == {"temperature": 0.7, "max_new_tokens": 64, "seed": engine.calls[0].seed}
    assert record.asked == {
        "temperature": 0.1,
        "max_tokens": 9,
        "stop": ["x"],
        "seed": 3,
        "response_format": {"type": "json_object"},
    }


def test_parameters_that_ask_for_the_plan_are_no_difference(bridge, session):
    post(session, [USER], temperature=0.7, max_tokens=64, tool_choice="auto")
    assert bridge.close(session)[0].asked == {}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": [USER], "n": 2}, "unsupported_n"),
        ({"messages": [USER], "functions": [{}]}, "unsupported_functions"),
        ({"messages": []}, "no_messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "bad_roles"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "bad_row"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "bad_row"),
        ([], "bad_json"),
    ],
)
def test_a_request_that_is_not_understood_is_refused_and_no_call(bridge, session, body, code):
    with client(session) as asking:
        response = asking.post("/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)
    assert bridge.close(session) == []


def test_models_health_and_other_paths(session):
    with client(session) as asking:
        listed = asking.get("/models").json()["data"]
        assert [model["id"] for model in listed] == ["policy", "helper"]
        assert asking.get(
            f"{session.url.removesuffix('/v1')}/health", headers={"Authorization": ""}
        ).json() == {"status": "ok"}
        assert asking.get("/load_lora_adapter").status_code == 404
        assert asking.post("/completions", json={}).status_code == 404


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic {token}", "{token}"])
def test_without_its_token_nothing_is_answered(session, header):
    headers = {"Authorization": header.format(token=session.token)}
    with client(session) as asking:
        response = asking.post("/chat/completions", json={"messages": [USER]}, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "bad_token")


def test_the_token_of_one_rollout_opens_no_other(bridge, session):
    other = bridge.open("r-2", seed=6)
    with client(session) as asking:
        headers = {"Authorization": f"Bearer {other.token}"}
        assert asking.get("/models", headers=headers).status_code == 401


def test_a_port_of_the_loopback_serves_all_rollouts_by_their_tokens(engine, chat):
    with Bridge(engine, chat, None, BridgeSettings(CONTEXT, 64, has_port=True)) as bridge:
        sessions = [bridge.open(f"r-{number}", seed=number) for number in range(2)]
        for one in sessions:
            headers = {"Authorization": f"Bearer {one.token}"}
            url = f"{one.direct_url}/chat/completions"
            assert httpx.post(url, json={"messages": [USER]}, headers=headers).status_code == 200
        assert [len(bridge.close(one)) for one in sessions] == [1, 1]
        assert httpx.get(f"{one.direct_url}/models", headers=headers).status_code == 401
        assert httpx.get(one.direct_url.replace("/v1", "/health")).status_code == 200


def test_helper_calls_go_to_the_base_by_name_or_by_prompt(engine, chat):
    base = ScriptedEngine(chat, ["A title"], version="base")
    with Bridge(engine, chat, base, BridgeSettings(CONTEXT, 64)) as bridge:
        session = bridge.open("r", seed=1, helper_prompts=[r"^You are a title generator\b"])
        assert told(post(session, TITLE))["content"] == "A title"
        assert told(post(session, TITLE, tools=[BASH]))["content"] == "hello"
        with client(session) as asking:
            named = asking.post("/chat/completions", json={"model": "helper", "messages": [USER]})
        assert told(named)["content"] == "A title"
        told(post(session, [{"role": "system", "content": "Summarise the conversation so far."}, USER]))
        records = bridge.close(session)
    assert [record.purpose for record in records] == ["helper", "policy", "helper", "policy"]
    assert [record.version for record in records] == ["base", "step-1", "base", "step-1"]


def test_without_a_base_the_engine_answers_helper_calls_which_stay_apart(bridge):
    session = bridge.open("r", seed=1, helper_prompts=["title"])
    assert told(post(session, TITLE))["content"] == "hello"
    assert bridge.close(session)[0].purpose == "helper"
    assert session.num_calls == 0


def test_a_repeated_request_is_another_attempt_and_the_last_is_used(bridge, session):
    for _ in range(3):
        post(session, [USER])
    records = bridge.close(session)
    assert [(record.attempt, record.status) for record in records] == [
        (1, "unused"),
        (2, "unused"),
        (3, "used"),
    ]
    assert len({record.sampling["seed"] for record in records}) == 3
    assert len({record.digest for record in records}) == 1


def test_of_attempts_that_is_used_whose_answer_the_agent_went_on_with(bridge, session, engine):
    engine.script = ["one", "two", "three"]
    answers = [told(post(session, [USER])) for _ in range(2)]
    post(session, [USER, answers[0], {"role": "user", "content": "go on"}])
    records = bridge.close(session)
    assert [(record.attempt, record.status) for record in records] == [
        (1, "used"),
        (2, "unused"),
        (1, "used"),
    ]
    assert (records[2].parent, records[2].extends) == (0, 0)


def test_equal_answers_are_told_apart_by_the_ids_of_their_calls(bridge, session, engine):
    engine.script = [call_text("ls"), call_text("ls"), "done"]
    answers = [told(post(session, [USER], tools=[BASH])) for _ in range(2)]
    result = {"role": "tool", "tool_call_id": answers[0]["tool_calls"][0]["id"], "content": "a"}
    post(session, [USER, answers[0], result], tools=[BASH])
    assert [record.status for record in bridge.close(session)] == ["used", "unused", "used"]


def test_a_fault_is_an_error_that_clients_retry_and_the_next_attempt_counts(bridge, session, engine):
    engine.script = [Fault("server", "it broke"), Fault("protocol", "bad ids"), "hello"]
    first, second = post(session, [USER]), post(session, [USER])
    assert (first.status_code, first.json()["error"]["message"]) == (500, "it broke")
    assert second.json()["error"]["code"] == "protocol"
    assert session.fault == "bad ids"
    assert post(session, [USER]).status_code == 200
    assert session.fault is None
    assert [(one.status, one.attempt, one.error) for one in bridge.close(session)] == [
        ("server", 1, "it broke"),
        ("protocol", 2, "bad ids"),
        ("used", 3, None),
    ]


def test_what_the_engine_raises_is_told_to_the_agent_and_kept_for_the_run(bridge, session, engine):
    engine.script = [FinetuneError("engine_failed", "no engine"), ValueError("odd"), "hello"]
    assert "engine_failed: no engine" in post(session, [USER]).json()["error"]["message"]
    assert "ValueError" in post(session, [USER]).json()["error"]["message"]
    assert post(session, [USER]).status_code == 200
    assert [error.code for error in bridge.errors] == ["engine_failed", "engine_failed"]


def test_past_its_calls_a_rollout_is_refused_for_good(bridge):
    session = bridge.open("r", seed=1, max_calls=2)
    statuses = [post(session, [{"role": "user", "content": text}]).status_code for text in "abc"]
    assert (statuses, session.is_over_limit) == ([200, 200, 403], True)
    assert len(bridge.close(session)) == 2


def test_rollouts_sample_together(chat):
    engine = ScriptedEngine(chat, ["hello"], pause_s=0.3)
    with Bridge(engine, chat, None, BridgeSettings(CONTEXT, 64)) as bridge:
        sessions = [bridge.open(f"r-{number}", seed=number) for number in range(12)]
        asking = [threading.Thread(target=post, args=(one, [USER])) for one in sessions]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert [record.status for one in sessions for record in bridge.close(one)] == ["used"] * 12
    assert len(engine.batches) <= 4
    assert len({call.seed for call in engine.calls}) == 12


def test_the_same_seed_gives_the_same_seeds_and_ids_whatever_came_between(bridge, engine):
    engine.script = [call_text("ls")]
    found = []
    for rollout, others in (("r", 0), ("r", 2)):
        session = bridge.open(rollout, seed=9)
        for number in range(others):
            post(session, [{"role": "user", "content": f"other {number}"}])
        message = told(post(session, [USER], tools=[BASH]))
        found.append((message["tool_calls"][0]["id"], bridge.close(session)[-1].sampling["seed"]))
    assert found[0] == found[1]


def test_a_client_that_leaves_has_an_aborted_call_with_what_was_sampled_for_it(bridge, session, engine):
    engine.hold = threading.Event()
    connection = departed(session, {"messages": [USER]})
    wait_for(lambda: engine.batches)
    connection.close()
    wait_for(lambda: session.calls.counts().get("aborted"))
    engine.hold.set()
    engine.script = ["again"]
    post(session, [USER])
    first, second = bridge.close(session)
    assert (first.status, first.attempt, bool(first.completion_ids)) == ("aborted", 1, True)
    assert (second.status, second.attempt) == ("used", 2)


def test_a_call_that_waited_when_its_client_left_is_not_sampled(bridge, session, engine):
    engine.hold = threading.Event()
    held = departed(session, {"messages": [USER]})
    wait_for(lambda: engine.batches)
    waiting = departed(session, {"messages": [{"role": "user", "content": "second"}]})
    wait_for(lambda: session.calls.counts().get("pending") == 2)
    waiting.close()
    wait_for(lambda: session.calls.counts().get("aborted"))
    engine.hold.set()
    assert b"200 OK" in held.recv(100)
    assert [record.status for record in bridge.close(session)] == ["used", "aborted"]
    assert len(engine.calls) == 1


def test_a_rollout_that_is_closed_during_a_call_has_it_aborted_with_its_tokens(bridge, session, engine):
    engine.hold = threading.Event()
    connection = departed(session, {"messages": [USER]})
    wait_for(lambda: engine.batches)
    threading.Timer(0.3, engine.hold.set).start()
    (record,) = bridge.close(session)
    assert (record.status, bool(record.completion_ids)) == ("aborted", True)
    assert connection.recv(10) == b""
    connection.close()


def test_a_slow_stream_is_kept_alive_and_a_late_fault_is_told_in_it(engine, chat):
    engine.script, engine.hold = [Fault("server", "too late")], threading.Event()
    settings = BridgeSettings(CONTEXT, 64, keepalive_s=0.05)
    with Bridge(engine, chat, None, settings) as bridge:
        session = bridge.open("r", seed=1)
        threading.Timer(0.4, engine.hold.set).start()
        response = post(session, [USER], stream=True)
        assert response.text.startswith(": waiting\n\n")
        assert json.loads(response.text.split("data: ")[1])["error"]["message"] == "too late"
        assert bridge.close(session)[0].status == "server"


def test_after_its_end_a_rollout_has_no_socket(bridge, session):
    assert bridge.close(session) == []
    assert not session.socket.exists()
    with pytest.raises(httpx.TransportError):
        post(session, [USER])


def test_a_conversation_that_no_cut_makes_fit_is_refused(bridge, session):
    response = post(session, [{"role": "user", "content": "é" * CONTEXT}])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert session.is_out_of_context
    (record,) = bridge.close(session)
    assert (record.status, record.completion_ids) == ("refused", [])
