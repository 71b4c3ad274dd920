"""The wire format of OpenAI's chat completions: what a request says, and how an answer is told, whole or in parts.

Rule: what is not understood is refused in the format of that interface; what is understood and not followed is listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finetune.data.conversation import Message, Tools
from finetune.data.formats import parsed_json
from finetune.domains.text import tools_of, turns_of
from finetune.errors import FinetuneError
from finetune.rollout.toolcalls import MOST_DEPTH, is_deeper

_PIECE = 64  # characters of one part of a streamed answer
_MOST_DEPTH = MOST_DEPTH + 8  # of a body: the turns around the arguments of a call
# Parameters that ask for nothing: with these values they change no sampling.
_NEUTRAL: dict[str, Any] = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "n": 1,
    "logprobs": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "stop": [],
    "logit_bias": {},
    "response_format": {"type": "text"},
}
# What says nothing of the sampling; read elsewhere, or of no meaning here.
_APART = {
    "model",
    "messages",
    "tools",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
}


class Refusal(Exception):
    """Why a request is not answered; a client that repeats it as it is gets the same refusal, but for status 500 and above."""

    def __init__(self, status: int, text: str, code: str) -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.text, "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request for one completion. parameters: all that it says besides, as it says it."""

    model: str
    messages: list[Message]
    tools: Tools | None
    stream: bool
    include_usage: bool
    parameters: dict[str, Any]

    def unfollowed(self, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """Return the parameters that ask for another sampling than the plan's."""
        planned = _NEUTRAL | {
            "temperature": temperature,
            "max_tokens": max_new_tokens,
            "max_completion_tokens": max_new_tokens,
        }
        return {
            name: _shown(value)
            for name, value in self.parameters.items()
            if value is not None and not (name in planned and value == planned[name])
        }


def read_request(body: bytes) -> ChatRequest:
    """Return what the body of a request says; raises Refusal."""
    try:
        value = parsed_json(body.decode())
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}", "bad_json") from error
    if not isinstance(value, dict):
        raise Refusal(400, "the body is no JSON object", "bad_json")
    if value.get("n") not in (None, 1):
        raise Refusal(400, f"n: {value['n']!r}: one completion is made for each request", "unsupported_n")
    if value.get("functions"):
        raise Refusal(400, "functions: this form is not read; declare tools", "unsupported_functions")
    options = value.get("stream_options")
    try:
        messages, tools = turns_of(value.get("messages") or [], "messages"), tools_of(value.get("tools"))
    except FinetuneError as error:
        raise Refusal(400, error.message, error.code) from error
    if not messages:
        raise Refusal(400, "messages: there are none", "no_messages")
    if is_deeper([value, messages, tools], _MOST_DEPTH):  # what the texts among them hold is parsed by now
        raise Refusal(400, f"the body is nested more than {_MOST_DEPTH} deep", "bad_json")
    return ChatRequest(
        str(value.get("model") or ""),
        messages,
        tools,
        value.get("stream") is True,
        isinstance(options, dict) and options.get("include_usage") is True,
        {name: item for name, item in value.items() if name not in _APART},
    )


@dataclass(frozen=True)
class ChatAnswer:
    """What is told to the agent. message: as templates get it, arguments as objects; finish: stop, tool_calls or length."""

    id: str
    created: int
    model: str
    message: Message
    finish: str
    num_prompt_tokens: int
    num_completion_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        total = self.num_prompt_tokens + self.num_completion_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": total,
        }

    @property
    def body(self) -> dict[str, Any]:
        """The answer as one JSON object."""
        calls = _told_calls(self.message)
        message: dict[str, Any] = {"role": "assistant", "content": self.message["content"] or None}
        if calls:
            message["tool_calls"] = calls
        else:
            message["content"] = self.message["content"]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}

    def chunks(self, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the answer in parts, as a stream tells it."""
        yield self._chunk({"role": "assistant", "content": ""})
        for piece in _pieces(self.message["content"]):
            yield self._chunk({"content": piece})
        for place, call in enumerate(_told_calls(self.message)):
            function = call["function"]
            opening = call | {"index": place, "function": {"name": function["name"], "arguments": ""}}
            yield self._chunk({"tool_calls": [opening]})
            for piece in _pieces(function["arguments"]):
                yield self._chunk({"tool_calls": [{"index": place, "function": {"arguments": piece}}]})
        yield self._chunk({}, self.finish)
        if include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(value: dict[str, Any] | str) -> bytes:
    """Return a server-sent event with a JSON value, or with a word such as [DONE]."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def models_body(names: list[str], context: int) -> dict[str, Any]:
    """Return the list of models that may be asked for."""
    listed = [
        {"id": name, "object": "model", "created": 0, "owned_by": "finetune", "max_model_len": context}
        for name in names
    ]
    return {"object": "list", "data": listed}


def _told_calls(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls as the wire has them: arguments as a text of JSON."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls") or []
    ]


def _shown(value: Any) -> Any:
    """Return a value as it is recorded: a long one as the beginning of its text."""
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= 300 else f"{text[:300]}..."


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
