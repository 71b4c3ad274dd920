"""An engine that answers from a script, by the tokens of its texts, and a client that speaks to a session's socket."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from finetune.data.chat import ChatFormat
from finetune.model.builtin import load_tokenizer
from finetune.model.source import resolve_source
from finetune.rollout.bridge import Session
from finetune.rollout.engine import Call, Completion, Fault, Sampling

CONTEXT = 4096
USER = {"role": "user", "content": "what is here?"}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}},
        },
    },
}


def tiny_chat(**options: Any) -> ChatFormat:
    """Return the chat format of builtin:tiny, with the template that writes tools."""
    query = "&".join(f"{name}={value}" for name, value in ({"context": CONTEXT} | options).items())
    return ChatFormat(load_tokenizer(resolve_source(f"builtin:tiny?{query}")), tools=True)


def call_text(command: str) -> str:
    return f'<tool_call>{{"name": "bash", "arguments": {{"command": {json.dumps(command)}}}}}</tool_call>'


def spelled(chat: ChatFormat, text: str) -> list[int]:
    """Return ids of a text as a sampler may choose them and no tokenizer does: one token for each byte of it."""
    return [
        token for letter in text for token in chat.tokenizer(letter, add_special_tokens=False)["input_ids"]
    ]


@dataclass
class ScriptedEngine:
    """Answers calls with the texts of the script, in order of arrival, or with what a function makes of a prompt's text.

    A text that ends in "..." was cut by the limit; a Fault is returned as it is, an exception is raised. hold: what a
    batch waits for before it is answered.
    """

    chat: ChatFormat
    script: Sequence[str | Fault | Exception] | Callable[[str], str] = ()
    version: str = "step-1"
    batches: list[list[Call]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    hold: threading.Event | None = None
    pause_s: float = 0.0
    given: int = 0

    @property
    def calls(self) -> list[Call]:
        return [call for batch in self.batches for call in batch]

    def sample(self, calls: Sequence[Call], sampling: Sampling) -> list[list[Completion | Fault]]:
        self.batches.append(list(calls))
        self.samplings.append(sampling)
        if self.hold is not None:
            assert self.hold.wait(20)
        time.sleep(self.pause_s)
        return [[self._one(call)] for call in calls]

    def _one(self, call: Call) -> Completion | Fault:
        if callable(self.script):
            said: str | Fault | Exception = self.script(self.chat.tokens.decoded(call.prompt_ids))
        else:
            said = self.script[min(self.given, len(self.script) - 1)]
        self.given += 1
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Fault):
            return said
        is_cut = said.endswith("...")
        ids = spelled(self.chat, said.removesuffix("..."))
        ids = ids if is_cut else [*ids, self.chat.stop_token_ids[0]]
        return Completion(ids, [-0.5] * len(ids), not is_cut, self.version)

    def close(self) -> None:
        """Nothing to leave behind."""


def client(session: Session, timeout: float = 20.0) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(session.socket)),
        base_url=session.url,
        headers={"Authorization": f"Bearer {session.token}"},
        timeout=timeout,
    )


def post(session: Session, messages: list[dict[str, Any]], **body: Any) -> httpx.Response:
    with client(session) as asking:
        return asking.post("/chat/completions", json={"model": "policy", "messages": messages, **body})


def told(response: httpx.Response) -> dict[str, Any]:
    """Return the message of an answer."""
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, which must end as streams do."""
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def departed(session: Session, body: dict[str, Any]) -> socket.socket:
    """Send a request on a connection of its own and return the connection."""
    text = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.token}\r\n"
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(session.socket))
    connection.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
    return connection


def wait_for(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
