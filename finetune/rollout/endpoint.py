"""HTTP on a unix socket or a loopback port: one request at a time on a connection, and to know when the client has left.

Rule: whatever a client sends, it gets an answer or its connection is closed; it ends no other connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import h11

MAX_BODY = 32 << 20
MOST_CONNECTIONS = 256  # at once on the socket of a rollout: each costs this process a descriptor
MOST_BODIES = 4  # that are read at once on the socket of a rollout
_CHUNK = 1 << 16
_CHUNKS_AHEAD = 4  # that are taken of a connection before they are asked for


@dataclass(frozen=True)
class HttpRequest:
    """path: without its query; headers: names in lower case. body: reads it, once; who asks for none is sent none.

    body raises ClientLeft where it is too large, which the client is told.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Callable[[], Awaitable[bytes]]


class ClientLeft(Exception):
    """The client closed its connection before it had the whole answer."""


class Reply:
    """The way back to a client. `left` is set once it has closed the connection."""

    def __init__(self, connection: h11.Connection, writer: asyncio.StreamWriter) -> None:
        self.left = asyncio.Event()
        self.is_begun = False
        self._connection, self._writer = connection, writer

    async def send(self, status: int, body: dict[str, Any]) -> None:
        """Send a whole answer; raises ClientLeft."""
        content = json.dumps(body, ensure_ascii=False).encode()
        await self.begin(status, "application/json", len(content))
        await self.write(content)
        await self.end()

    async def begin(self, status: int, kind: str, length: int | None = None) -> None:
        """Send the head of an answer; without a length it is sent in chunks until end()."""
        headers = [("content-type", kind), ("cache-control", "no-store")]
        if length is not None:
            headers.append(("content-length", str(length)))
        self.is_begun = True
        reason = HTTPStatus(status).phrase
        await self._send(h11.Response(status_code=status, headers=headers, reason=reason))

    async def write(self, content: bytes) -> None:
        await self._send(h11.Data(data=content))

    async def end(self) -> None:
        await self._send(h11.EndOfMessage())

    async def _send(self, event: Any) -> None:
        if self.left.is_set():
            raise ClientLeft
        try:
            self._writer.write(self._connection.send(event) or b"")
            await self._writer.drain()
        except OSError as error:
            raise ClientLeft from error


Handler = Callable[[HttpRequest, Reply], Awaitable[None]]


class Endpoint:
    """One listening socket; `handle` answers its requests and may raise ClientLeft."""

    def __init__(
        self, handle: Handler, most_connections: int | None = None, most_bodies: int | None = None
    ) -> None:
        self._handle, self._most_connections = handle, most_connections
        self._bodies = asyncio.Semaphore(most_bodies) if most_bodies else contextlib.nullcontext()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    async def listen_at(self, socket: Path) -> None:
        """Listen on a unix socket that every user of this machine may connect to; its folder and a token guard it."""
        self._server = await asyncio.start_unix_server(self._serve, str(socket))
        os.chmod(socket, 0o666)

    async def listen_on_loopback(self) -> int:
        """Listen on a free port of 127.0.0.1 and return it."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Take no new connections and end those that there are."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._most_connections is not None and len(self._connections) >= self._most_connections:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = _Connection(reader, writer, self._bodies)
        try:
            while (reply := await connection.request()) is not None:
                request, answer = reply
                await self._handle(request, answer)
                if not await connection.is_reusable():
                    break
        except (ClientLeft, h11.RemoteProtocolError, OSError):
            pass  # nobody is left to be answered, or what was said is no HTTP and was answered so
        except asyncio.CancelledError:
            pass  # close() ends its connections: the task is at its end, and asyncio would log the cancellation
        finally:
            self._connections.discard(task)
            connection.close()


class _Connection:
    """One connection. A task reads ahead all the time, or the client's end would be seen only with the next request."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        bodies: contextlib.AbstractAsyncContextManager[None],
    ) -> None:
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 16)
        self._bodies = bodies
        self._reader, self._writer = reader, writer
        self._reply: Reply | None = None
        self._has_ended = False
        self._incoming: asyncio.Queue[bytes] = asyncio.Queue(_CHUNKS_AHEAD)
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        data = b"."
        while data:
            try:
                data = await self._reader.read(_CHUNK)
            except OSError:
                data = b""
            if not data:
                self._has_ended = True
                if self._reply is not None:
                    self._reply.left.set()
            await self._incoming.put(data)

    async def request(self) -> tuple[HttpRequest, Reply] | None:
        """Return the next request and the way to answer it; None where the client has none."""
        try:
            head = await self._event()
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint)
            raise
        if not isinstance(head, h11.Request):
            return None
        self._reply = Reply(self._h11, self._writer)
        if self._has_ended:
            self._reply.left.set()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        path = head.target.decode("latin-1").partition("?")[0]
        return HttpRequest(head.method.decode("latin-1"), path, headers, self._body), self._reply

    async def _body(self) -> bytes:
        async with self._bodies:
            if self._h11.they_are_waiting_for_100_continue:
                self._writer.write(
                    self._h11.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
                )
            body = bytearray()
            try:
                while isinstance(event := await self._event(), h11.Data):
                    body += event.data
                    if len(body) > MAX_BODY:
                        await self._refuse(413)
                        raise ClientLeft
            except h11.RemoteProtocolError as error:
                await self._refuse(error.error_status_hint)
                raise
            return bytes(body)

    async def _event(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self._incoming.get())
        return event

    async def _refuse(self, status: int) -> None:
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            with contextlib.suppress(ClientLeft):
                text = "the request is no HTTP that is read here, or is too large"
                await Reply(self._h11, self._writer).send(status, {"error": {"message": text}})

    async def is_reusable(self) -> bool:
        """Whether another request may follow; prepares for it, and throws away a body that nobody asked for."""
        if self._h11.our_state is not h11.DONE or self._h11.they_are_waiting_for_100_continue:
            return False
        while self._h11.their_state is h11.SEND_BODY:
            await self._event()
        if self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        self._reply = None
        return True

    def close(self) -> None:
        self._reading.cancel()
        self._writer.close()
