"""The bridge between agents and the engine: OpenAI's chat completions on one socket and one token for each rollout.

Rule: what an agent is told is text; what is recorded is what was sampled, by token ids, under the plan's sampling.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import json
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from finetune.data.chat import ChatFormat
from finetune.data.conversation import Message
from finetune.errors import FinetuneError
from finetune.rollout.calls import CallLimits, ModelCall, RolloutCalls, UsedUp, call_id
from finetune.rollout.endpoint import MOST_BODIES, MOST_CONNECTIONS, ClientLeft, Endpoint, HttpRequest, Reply
from finetune.rollout.engine import Completion, Engine, Fault
from finetune.rollout.ledger import REFUSED, CallRecord, Purpose
from finetune.rollout.sampling_pool import SamplingPool
from finetune.rollout.toolcalls import parse_tool_calls
from finetune.rollout.transcript import Transcript
from finetune.rollout.wire import ChatAnswer, ChatRequest, Refusal, event, models_body, read_request

BOX_URL = "http://127.0.0.1:8000/v1"  # what a box makes of the socket that it is given
POLICY, HELPER = "policy", "helper"
_SOCKET_PATH = 100  # characters; the kernel takes 108
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BridgeSettings:
    """What every call is made with.

    context, max_new_tokens, temperature: the plan's. headroom_share: of the context, left free where tool outputs are cut.
    threads: that ask the engine (1 for an engine in this process). keepalive_s: how long a stream is silent before it is
    told that it lives.
    """

    context: int
    max_new_tokens: int
    temperature: float = 1.0
    headroom_share: float = 0.125
    threads: int = 1
    keepalive_s: float = 15.0
    has_port: bool = False  # also on a port of 127.0.0.1, for programs outside of boxes
    folder: Path | None = None  # of the sockets; a new one under the temporary folder

    @property
    def limits(self) -> CallLimits:
        headroom = int(self.context * self.headroom_share)
        return CallLimits(self.context, self.max_new_tokens, self.temperature, headroom)


@dataclass(eq=False)
class Session:
    """The endpoint of one rollout. url: as a box that is given `socket` has it; direct_url: outside of boxes."""

    rollout: str
    token: str
    socket: Path
    calls: RolloutCalls
    url: str = BOX_URL
    direct_url: str | None = None
    helper_prompts: tuple[re.Pattern[str], ...] = ()
    is_over_limit: bool = False  # a call past max_calls was refused
    endpoint: Endpoint | None = None
    answering: set[asyncio.Task[Any]] = field(default_factory=set)
    running: set[concurrent.futures.Future[Any]] = field(default_factory=set)
    settled: threading.Condition = field(default_factory=threading.Condition)  # of running

    @property
    def num_calls(self) -> int:
        """How many policy calls have been answered so far, or are about to be."""
        counts = self.calls.counts()
        return sum(counts.get(status, 0) for status in ("pending", "answered", "used", "unused"))

    @property
    def fault(self) -> str | None:
        """What the engine failed with, where the last policy call got no answer."""
        last = self.calls.last_policy_call()
        return last.error if last is not None and last.status in ("server", "protocol") else None

    @property
    def is_out_of_context(self) -> bool:
        """Whether the last policy call was refused because its conversation was too long."""
        last = self.calls.last_policy_call()
        return last is not None and last.status == REFUSED and (last.error or "").startswith("too_long")


class Bridge:
    """Serves any number of rollouts at once, from a thread of its own.

    engine samples the policy. base samples what agents ask for show (titles, summaries that are displayed); without it
    the engine does. chat: made for tools; raises its problem. `errors` are those that an engine raised.
    """

    def __init__(
        self, engine: Engine, chat: ChatFormat, base: Engine | None, settings: BridgeSettings
    ) -> None:
        self._transcript = Transcript(chat)
        self._settings = settings
        self._folder = _socket_folder(settings.folder)
        self._pools = {POLICY: SamplingPool(engine, settings.threads)}
        if base is not None:
            self._pools[HELPER] = SamplingPool(base, settings.threads, name=HELPER)
        self._sessions: dict[str, Session] = {}  # by token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bridge", daemon=True)
        self._thread.start()
        self._port: int | None = None
        self._shared: Endpoint | None = None
        if settings.has_port:
            self._shared = Endpoint(lambda request, reply: self._handle(None, request, reply))
            self._port = self._run(self._shared.listen_on_loopback())

    @property
    def errors(self) -> list[FinetuneError]:
        return [error for pool in self._pools.values() for error in pool.errors]

    def open(
        self, rollout_id: str, seed: int, max_calls: int | None = None, helper_prompts: Sequence[str] = ()
    ) -> Session:
        """Return the endpoint of a new rollout.

        max_calls: policy calls that are sampled; helper_prompts: a call without tools whose system prompt one of these
        patterns finds is a helper call, as is every call of the model "helper".
        """
        token = secrets.token_hex(24)
        socket = self._folder / f"{secrets.token_hex(8)}.sock"
        calls = RolloutCalls(rollout_id, seed, self._transcript, self._settings.limits, max_calls)
        session = Session(rollout_id, token, socket, calls)
        session.helper_prompts = tuple(re.compile(pattern) for pattern in helper_prompts)
        session.direct_url = f"http://127.0.0.1:{self._port}/v1" if self._port else None
        session.endpoint = Endpoint(
            lambda request, reply: self._handle(session, request, reply), MOST_CONNECTIONS, MOST_BODIES
        )
        self._sessions[token] = session
        self._run(session.endpoint.listen_at(socket))
        return session

    def close(self, session: Session) -> list[CallRecord]:
        """End a rollout's endpoint and return its calls in order of arrival, each with what became of it.

        It waits for what is still being sampled, for whom ever: what the engine served is in the records.
        """
        self._sessions.pop(session.token, None)
        self._run(_ended(session))
        session.socket.unlink(missing_ok=True)
        with session.settled:  # not on the futures: they are done before what they hold is recorded
            session.settled.wait_for(lambda: not session.running)
        return session.calls.records()

    def shutdown(self) -> None:
        """Close what is open and end all threads; the engines stay open."""
        for session in list(self._sessions.values()):
            self.close(session)
        if self._shared is not None:
            self._run(self._shared.close())
        for pool in self._pools.values():
            pool.close()
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._folder != self._settings.folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        if self._loop.is_closed():  # by a training that was told to stop, and waits for no agent
            work.close()
            raise FinetuneError("stopped", "the bridge was closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # Requests, in the bridge's thread

    async def _handle(self, session: Session | None, request: HttpRequest, reply: Reply) -> None:
        """Answer a request; session: whose socket it came by, None for the port that all share."""
        try:
            if request.path in ("/health", "/v1/health"):
                await reply.send(200, {"status": "ok"})
                return
            named = self._named(session, request)
            if (request.method, request.path) == ("GET", "/v1/models"):
                await reply.send(200, models_body([POLICY, HELPER], self._settings.context))
            elif (request.method, request.path) == ("POST", "/v1/chat/completions"):
                with _answering(named):
                    await self._complete(named, read_request(await request.body()), reply)
            else:
                raise Refusal(404, f"{request.method} {request.path}: there is no such thing", "not_found")
        except Refusal as refusal:
            await _refused(refusal, reply)

    def _named(self, session: Session | None, request: HttpRequest) -> Session:
        """Return the session whose token the request bears."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        known = session or self._sessions.get(token.strip())
        is_right = known is not None and hmac.compare_digest(token.strip().encode(), known.token.encode())
        if known is None or kind.lower() != "bearer" or not is_right:
            raise Refusal(
                401, "the token of a rollout is missing, wrong, or of one that has ended", "bad_token"
            )
        return known

    async def _complete(self, session: Session, request: ChatRequest, reply: Reply) -> None:
        call = await self._begun(session, request)
        try:
            outcome = await self._outcome(session, call, request, reply)
            if isinstance(outcome, Fault):
                raise Refusal(500, outcome.text, outcome.kind)
            answer = await asyncio.to_thread(self._answer, call, request, outcome)
            session.calls.answered(call, answer.message)
            await _tell(answer, request, reply)
        except ClientLeft:
            session.calls.aborted(call, "the client left before it had the answer")
            raise
        except asyncio.CancelledError:
            session.calls.aborted(call, "the rollout ended before the answer")
            raise
        # The client has all of the answer, and may leave before the end of its transfer.
        await reply.end()

    async def _begun(self, session: Session, request: ChatRequest) -> ModelCall:
        purpose = self._purpose(session, request)
        try:
            call = await asyncio.to_thread(session.calls.begin, request.messages, request.tools, purpose)
        except UsedUp as error:
            session.is_over_limit = True
            raise Refusal(403, "all calls of this rollout are used up", "step_limit") from error
        except FinetuneError as error:
            code = "context_length_exceeded" if error.code == "too_long" else error.code
            raise Refusal(400, error.message, code) from error
        sampling = call.record.sampling
        call.record.asked = request.unfollowed(sampling["temperature"], sampling["max_new_tokens"])
        return call

    def _purpose(self, session: Session, request: ChatRequest) -> Purpose:
        if request.model == HELPER:
            return "helper"
        first = request.messages[0]
        may_be_shown = not request.tools and first["role"] == "system"
        is_shown = may_be_shown and any(found.search(first["content"]) for found in session.helper_prompts)
        return "helper" if is_shown else "policy"

    async def _outcome(
        self, session: Session, call: ModelCall, request: ChatRequest, reply: Reply
    ) -> Completion | Fault:
        """Return what was sampled; raises ClientLeft where the client does not wait for it. It is recorded in any case."""
        assert call.sampling is not None, "a call that was begun has its sampling"
        pool = self._pools.get(call.record.purpose, self._pools[POLICY])
        future = pool.submit(call.call, call.sampling)
        with session.settled:
            session.running.add(future)
        future.add_done_callback(lambda done: _settled(session, call, done))
        waiting = asyncio.wrap_future(future)
        left = asyncio.ensure_future(reply.left.wait())
        either: set[asyncio.Future[Any]] = {waiting, left}
        try:
            while True:
                timeout = self._settings.keepalive_s if request.stream else None
                done, _ = await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if waiting in done:
                    return waiting.result()
                if left in done:
                    raise ClientLeft
                if not reply.is_begun:
                    await reply.begin(200, "text/event-stream")
                await reply.write(b": waiting\n\n")
        finally:
            left.cancel()
            waiting.cancel()  # takes a call that has not begun out of the queue

    def _answer(self, call: ModelCall, request: ChatRequest, outcome: Completion) -> ChatAnswer:
        text = self._transcript.text_of(outcome.ids, outcome.stopped)
        parsed = parse_tool_calls(text, request.tools)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call_id(call.record, place),
                    "function": {"name": one.name, "arguments": one.arguments},
                }
                for place, one in enumerate(parsed.calls)
            ]
        finish = "tool_calls" if parsed.calls else "stop" if outcome.stopped else "length"
        return ChatAnswer(
            f"chatcmpl-{call.record.digest[:16]}-{call.record.attempt}",
            int(time.time()),
            request.model or POLICY,
            message,
            finish,
            len(call.record.prompt_ids),
            len(outcome.ids),
        )


def _settled(
    session: Session, call: ModelCall, future: concurrent.futures.Future[Completion | Fault]
) -> None:
    """Record what was sampled, for whom it was, and that it is no longer waited for."""
    if future.cancelled():
        session.calls.dropped(call)
    else:
        session.calls.sampled(call, future.result())
    with session.settled:
        session.running.discard(future)
        session.settled.notify_all()


@contextlib.contextmanager
def _answering(session: Session) -> Iterator[None]:
    """Have the task of a request end with the rollout."""
    task = asyncio.current_task()
    assert task is not None
    session.answering.add(task)
    try:
        yield
    finally:
        session.answering.discard(task)


async def _ended(session: Session) -> None:
    """Close the socket of a rollout and end what is being answered, also on the port that all share."""
    if session.endpoint is not None:
        await session.endpoint.close()
        session.endpoint = None
    for task in list(session.answering):
        task.cancel()
    await asyncio.gather(*session.answering, return_exceptions=True)


async def _tell(answer: ChatAnswer, request: ChatRequest, reply: Reply) -> None:
    """Send an answer, all but the end of its transfer; raises ClientLeft where the client has not all of it."""
    if not request.stream:
        content = json.dumps(answer.body, ensure_ascii=False).encode()
        await reply.begin(200, "application/json", len(content))
        await reply.write(content)
        return
    if not reply.is_begun:
        await reply.begin(200, "text/event-stream")
    *chunks, last = answer.chunks(request.include_usage)
    for chunk in chunks:
        await reply.write(event(chunk))
    # Some clients leave once they know how the answer ended: what is last is written in one piece.
    await reply.write(event(last) + event("[DONE]"))


async def _refused(refusal: Refusal, reply: Reply) -> None:
    """Send a refusal; in a stream that has begun as an event."""
    if not reply.is_begun:
        await reply.send(refusal.status, refusal.body)
        return
    await reply.write(event(refusal.body))
    await reply.end()


def _socket_folder(folder: Path | None) -> Path:
    """Return a folder whose sockets have paths that the kernel takes, and that others may go through but not list."""
    made = folder or Path(tempfile.mkdtemp(prefix="finetune-bridge-"))
    if len(str(made)) + 25 > _SOCKET_PATH:
        if folder is None:
            made.rmdir()
        made = Path(tempfile.mkdtemp(prefix="finetune-bridge-", dir="/tmp"))
    made.mkdir(parents=True, exist_ok=True)
    made.chmod(0o711)
    return made
