"""What clients may do to a connection: reuse it, send odd things, leave; and that it stays theirs alone."""

import json
import os
import socket
import stat
import threading
import time

import httpx
import pytest

from finetune.rollout import endpoint
from finetune.rollout.bridge import Bridge, BridgeSettings
from tests.rollout.scripted import CONTEXT, ScriptedEngine, client, post, tiny_chat

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def bridge():
    chat = tiny_chat()
    with Bridge(ScriptedEngine(chat, ["hello"]), chat, None, BridgeSettings(CONTEXT, 32)) as bridge:
        yield bridge


@pytest.fixture
def session(bridge):
    session = bridge.open("r", seed=1)
    yield session
    bridge.close(session)


def connected(session) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(session.socket))
    return connection


def everything(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def test_one_connection_serves_many_requests(session):
    with client(session) as asking:
        for _ in range(3):
            assert asking.post("/chat/completions", json={"messages": [USER]}).status_code == 200
            assert asking.get("/models").status_code == 200


@pytest.mark.parametrize("sent", [b"\x00\xff\x01 nonsense\r\n\r\n", b"x" * 100_000 + b"\r\n\r\n"])
def test_what_is_no_http_is_refused_and_the_next_client_is_served(session, sent):
    with connected(session) as connection:
        try:
            connection.sendall(sent)
            assert everything(connection).split(b" ")[1] in (b"400", b"431")
        except ConnectionError:
            pass
    assert post(session, [USER]).status_code == 200


def test_a_body_past_the_limit_is_refused(session, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_BODY", 1000)
    assert post(session, [{"role": "user", "content": "x" * 2000}]).status_code == 413
    assert post(session, [USER]).status_code == 200


def test_a_body_in_chunks_and_one_that_waits_for_leave_are_read(session):
    text = json.dumps({"messages": [USER]}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.token}\r\n".encode()
    )
    with connected(session) as connection:
        sizes = [text[:7], text[7:]]
        chunks = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in sizes) + b"0\r\n\r\n"
        connection.sendall(head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert everything(connection).startswith(b"HTTP/1.1 200")
    with connected(session) as connection:
        connection.sendall(
            head
            + f"Connection: close\r\nExpect: 100-continue\r\nContent-Length: {len(text)}\r\n\r\n".encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(text)
        assert everything(connection).startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_in_the_middle_of_its_request_is_forgotten(session):
    with connected(session) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    assert post(session, [USER]).status_code == 200


def test_two_requests_at_once_on_one_connection_are_answered_in_their_order(session):
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.token}\r\n"
    last = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connected(session) as connection:
        connection.sendall(f"{request}\r\n{last}".encode())
        data = everything(connection)
    assert data.count(b"HTTP/1.1 200") == 2
    assert data.index(b'"policy"') < data.index(b'"status"')


def test_a_client_that_reads_nothing_holds_up_no_other(bridge, session):
    deaf = connected(session)
    deaf.sendall(
        f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.token}\r\n\r\n".encode() * 50
    )
    done = threading.Thread(target=post, args=(session, [USER]))
    done.start()
    done.join(10)
    assert not done.is_alive()
    deaf.close()


def test_the_socket_can_be_used_by_the_user_of_a_box_and_not_be_listed(session):
    assert stat.S_IMODE(session.socket.stat().st_mode) == 0o666
    assert stat.S_IMODE(session.socket.parent.stat().st_mode) == 0o711
    assert len(str(session.socket)) < 108


def test_a_folder_of_too_long_a_path_is_replaced(tmp_path):
    chat = tiny_chat()
    deep = tmp_path / ("d" * 100)
    settings = BridgeSettings(CONTEXT, 32, folder=deep)
    with Bridge(ScriptedEngine(chat, ["hello"]), chat, None, settings) as bridge:
        session = bridge.open("r", seed=1)
        assert post(session, [USER]).status_code == 200
        folder = session.socket.parent
    assert not os.path.exists(folder)


def test_connections_past_the_most_are_closed_and_cost_no_descriptor(session, monkeypatch):
    assert session.endpoint._most_connections == endpoint.MOST_CONNECTIONS
    monkeypatch.setattr(session.endpoint, "_most_connections", 3)
    held = [connected(session) for _ in range(3)]
    with connected(session) as one_more:
        assert everything(one_more) == b""
    for connection in held:
        connection.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            assert post(session, [USER]).status_code == 200
            return
        except httpx.HTTPError:
            assert time.monotonic() < deadline
