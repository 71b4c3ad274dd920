"""What holds when requests overlap: the budget of calls, which of several attempts counts, and that no token is lost."""

import socket
import threading
import time

import httpx
import pytest

from finetune.rollout import bridge as bridging
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
    tiny_chat,
    told,
    wait_for,
)


@pytest.fixture(scope="module")
def chat():
    return tiny_chat()


@pytest.fixture
def engine(chat):
    return ScriptedEngine(chat, ["hello"])


@pytest.fixture
def bridge(engine, chat):
    with Bridge(engine, chat, None, BridgeSettings(CONTEXT, 64, threads=4)) as bridge:
        yield bridge


def asked(number: int) -> dict:
    return {"role": "user", "content": f"question {number}"}


def test_requests_at_once_get_no_more_answers_than_the_budget(bridge, engine, monkeypatch):
    session = bridge.open("r", seed=1, max_calls=2)
    real = session.calls._set_prompt

    def slow(call) -> None:
        time.sleep(0.2)
        real(call)

    monkeypatch.setattr(session.calls, "_set_prompt", slow)
    codes: list[int] = []
    asking = [
        threading.Thread(
            target=lambda number=number: codes.append(post(session, [asked(number)]).status_code)
        )
        for number in range(6)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert (sorted(codes), len(engine.calls)) == ([200, 200, 403, 403, 403, 403], 2)
    assert len(bridge.close(session)) == 2


def test_what_is_sampled_for_a_client_that_left_is_of_the_budget(bridge, engine):
    session = bridge.open("r", seed=1, max_calls=2)
    engine.hold = threading.Event()
    for number in range(2):
        connection = departed(session, {"messages": [asked(number)]})
        wait_for(lambda number=number: len(engine.batches) == number + 1)
        connection.close()
    wait_for(lambda: session.calls.counts().get("aborted") == 2)
    assert post(session, [USER]).status_code == 403
    engine.hold.set()
    assert [bool(call.completion_ids) for call in bridge.close(session)] == [True, True]


def test_what_was_not_sampled_is_not_of_the_budget(engine, chat):
    engine.script = [Fault("server", "it broke"), "hello"]
    with Bridge(engine, chat, None, BridgeSettings(CONTEXT, 64)) as bridge:
        session = bridge.open("r", seed=1, max_calls=2)
        assert post(session, [USER]).status_code == 500
        engine.hold = threading.Event()
        held = departed(session, {"messages": [asked(1)]})
        wait_for(lambda: len(engine.batches) == 2)
        waiting = departed(session, {"messages": [asked(2)]})
        wait_for(lambda: session.calls.counts().get("pending") == 2)
        waiting.close()
        wait_for(lambda: session.calls.counts().get("aborted"))
        engine.hold.set()
        assert b"200 OK" in held.recv(100)
        assert post(session, [asked(3)]).status_code == 200
        assert post(session, [asked(4)]).status_code == 403


def test_of_attempts_at_once_the_last_that_was_answered_is_used(bridge, engine):
    session = bridge.open("r", seed=1)
    first = threading.Thread(target=post, args=(session, [USER]))
    engine.pause_s = 0.3
    first.start()
    wait_for(lambda: len(engine.batches) == 1)
    engine.hold = threading.Event()
    second = departed(session, {"messages": [USER]})
    wait_for(lambda: len(engine.batches) == 2)
    first.join()
    second.close()
    wait_for(lambda: session.calls.counts().get("aborted"))
    engine.hold.set()
    found = [(call.attempt, call.status, bool(call.completion_ids)) for call in bridge.close(session)]
    assert found == [(1, "used", True), (2, "aborted", True)]


def test_a_rollout_ends_once_what_was_sampled_is_recorded_and_not_before(bridge, engine, monkeypatch):
    real = bridging._settled

    def late(*told) -> None:
        time.sleep(0.3)
        real(*told)

    monkeypatch.setattr(bridging, "_settled", late)
    session = bridge.open("r", seed=1)
    engine.hold = threading.Event()
    connection = departed(session, {"messages": [USER]})
    wait_for(lambda: engine.batches)
    threading.Timer(0.1, engine.hold.set).start()
    (record,) = bridge.close(session)
    assert (record.status, bool(record.completion_ids)) == ("aborted", True)
    connection.close()


def test_a_long_conversation_of_one_rollout_holds_up_no_other(bridge, monkeypatch):
    busy, other = bridge.open("r", seed=1, max_calls=5), bridge.open("s", seed=2)
    begun, go_on = threading.Event(), threading.Event()
    real = busy.calls._set_prompt

    def slow(call) -> None:
        begun.set()
        assert go_on.wait(20)
        real(call)

    monkeypatch.setattr(busy.calls, "_set_prompt", slow)
    asking = [threading.Thread(target=post, args=(busy, [asked(number)])) for number in range(2)]
    for thread in asking:
        thread.start()
        assert begun.wait(10)
    wait_for(lambda: busy.num_calls == 2)
    with client(other, timeout=5.0) as asks:
        assert asks.get("/models").status_code == 200
    go_on.set()
    for thread in asking:
        thread.join()


DEEP = '{"a":' * 900 + "1" + "}" * 900
NESTED = '<tool_call>{"name": "bash", "arguments": {"command": ' + "[" * 900 + "]" * 900 + "}}</tool_call>"


def test_arguments_that_are_nested_too_deeply_stay_text(bridge, engine):
    session = bridge.open("r", seed=1)
    engine.script = [NESTED]
    answer = told(post(session, [USER], tools=[BASH]))
    assert (answer.get("tool_calls"), answer["content"]) == (None, NESTED)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "[]"},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "b", "arguments": DEEP}}]}]},
        {"messages": [USER], "tools": f"[{DEEP}]"},
        {"messages": [USER], "tools": f'[{{"name": "b", "parameters": {DEEP}}}]'},
    ],
    ids=["empty", "arguments", "tool", "parameters"],
)  # fmt: skip
def test_a_body_that_leads_nowhere_is_refused_and_its_connection_stays(bridge, body):
    session = bridge.open("r", seed=1)
    with client(session) as asking:
        assert asking.post("/chat/completions", json=body).status_code == 400
    assert bridge.close(session) == []


def test_a_schema_that_is_none_is_taken_as_no_schema(bridge, engine):
    session = bridge.open("r", seed=1)
    engine.script = [call_text("ls")]
    odd = {"name": "bash", "parameters": {"properties": {"command": {"type": [["x"]]}}}}
    answer = told(post(session, [USER], tools=[{"type": "function", "function": odd}]))
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'


def test_the_token_is_looked_at_before_the_body_is_read(bridge):
    session = bridge.open("r", seed=1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(session.socket))
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Length: 9\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 401")
        head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.token}\r\n\r\n"
        connection.sendall(b"x" * 9 + head.encode())
        time.sleep(0.1)
        assert b"HTTP/1.1 200" in connection.recv(1 << 16)


def test_few_bodies_are_read_at_once(bridge):
    session = bridge.open("r", seed=1)
    most = bridging.MOST_BODIES
    text = b'{"messages": [{"role": "user", "content": "hi"}]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.token}\r\n"
    held = []
    for _ in range(most):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(session.socket))
        connection.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text[:5])
        held.append(connection)
    time.sleep(0.2)
    with pytest.raises(httpx.ReadTimeout), client(session, timeout=0.5) as asking:
        asking.post("/chat/completions", json={"messages": [USER]})
    held[0].sendall(text[5:])
    assert post(session, [USER]).status_code == 200
    for connection in held:
        connection.close()
