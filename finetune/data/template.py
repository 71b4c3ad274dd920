"""Chat templates: where their text comes from, how they are rendered, and the ChatML template that writes tools.

Rule: a template is foreign code. It comes from the model or from --chat-template, never from a row; it runs in
transformers' sandbox and under a time limit, and whatever it raises has a code.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2

from finetune.data.arguments import TEMPLATE_NAMES
from finetune.data.conversation import Message
from finetune.errors import FinetuneError, boundary

RENDER_SECONDS = 5.0
_SYSTEM_TURN = re.compile(r"<\|im_start\|>system\n(.*)<\|im_end\|>\n", re.DOTALL)

_CHATML = """\
{{- BEFORE }}
{%- set has_system = messages and messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] if has_system else DEFAULT_SYSTEM %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') }}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
{{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif has_system or system %}
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if has_system else messages) %}
{%- if message['role'] == 'tool' %}
{{- '<|im_start|>user\\n' if loop.first or loop.previtem['role'] != 'tool' else '\\n' }}
{{- '<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem['role'] != 'tool' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n' if message['content'] or not loop.first }}
{{- '<tool_call>\\n{"name": ' + (call['function']['name'] | tojson) }}
{{- ', "arguments": ' + (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where."}},
        },
    },
}
_CALL = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": "probe_call", "arguments": {"place": "here"}},
}


def chatml_template(before: str = "", default_system: str = "") -> str:
    """Return a ChatML template that writes tools and tool calls in the Hermes manner.

    before: text ahead of every conversation (a BOS token); default_system: system turn of conversations without one.
    """
    literal = {"BEFORE": before, "DEFAULT_SYSTEM": default_system}
    return re.sub(
        "BEFORE|DEFAULT_SYSTEM", lambda match: json.dumps(literal[match[0]], ensure_ascii=False), _CHATML
    )


def read_template(setting: str | None) -> str | None:
    """Return the text that --chat-template names: the name chatml, or a file; None where it is not given."""
    if setting is None or setting in TEMPLATE_NAMES:
        return setting and chatml_template()
    path = Path(setting).expanduser()
    if not path.is_file():
        text = (
            f"chat_template: {path.absolute()}: no such file, and no template has this name; there is: chatml"
        )
        raise FinetuneError("file_missing", text, setting="chat_template", file=str(path.absolute()))
    with boundary("bad_template", str(path)):
        return path.read_text(encoding="utf-8")


@contextlib.contextmanager
def time_limit(seconds: float, code: str, what: str) -> Iterator[None]:
    """Raise FinetuneError(code) inside the block once `seconds` have passed; no limit outside the main thread.

    Python delivers signals to the main thread only, and only between its own instructions.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise FinetuneError(code, f"{what}: not done after {seconds:g} seconds", seconds=seconds)

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text with the tokenizer that renders it and the arguments that the user gave."""

    tokenizer: Any
    text: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, opening: bool = False
    ) -> str:
        """Return the text of a conversation; with `opening`, followed by the start of the next assistant turn.

        Raises FinetuneError: bad_roles where the template itself refuses the conversation, bad_template otherwise.
        """
        with (
            time_limit(RENDER_SECONDS, "bad_template", "chat template"),
            boundary("bad_template", "chat template"),
        ):
            try:
                text = self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self.text,
                    tokenize=False,
                    add_generation_prompt=opening,
                    **self.arguments,
                )
            except jinja2.TemplateError as error:
                if type(error) is not jinja2.TemplateError:
                    raise
                # The plain base class is what a template's own raise_exception() raises.
                raise FinetuneError(
                    "bad_roles", f"the chat template refuses this conversation: {error}"
                ) from error
        if not isinstance(text, str):
            raise FinetuneError(
                "bad_template", f"chat template: rendering gave {type(text).__name__} and no text"
            )
        return text

    def unread_arguments(self) -> list[str]:
        """Return the arguments of the user that the template never mentions."""
        return [name for name in self.arguments if not re.search(rf"\b{name}\b", self.text)]

    def writes_tools(self) -> bool:
        """Whether both the tools on offer and the calls of the assistant appear in the text."""
        messages: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "b", "name": "probe_call", "tool_call_id": _CALL["id"]},
        ]
        try:
            text = self.render(messages, [_TOOL])
        except FinetuneError:
            return False
        return "probe_tool" in text and "probe_call" in text

    def with_tools(self) -> ChatTemplate:
        """Return a template that gives this one's texts and writes tools too: itself, or our ChatML.

        Raises FinetuneError(bad_template) where neither can be: tools are never lost in silence.
        """
        if self.writes_tools():
            return self
        chatml = self._as_chatml()
        if chatml is None:
            text = "the chat template writes no tools or tool calls, which rows have; give one that does: --chat-template chatml"
            raise FinetuneError("bad_template", text, setting="chat_template")
        return replace(self, text=chatml)

    def _as_chatml(self) -> str | None:
        """Return our ChatML text with this template's beginning and default system turn, if it is ChatML at all."""
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        with_system = [{"role": "system", "content": "s"}, *turns]
        ours = replace(self, text=chatml_template())
        try:
            bare, full = (self.render(messages, opening=True) for messages in (turns, with_system))
        except FinetuneError:
            return None
        before = full.removesuffix(ours.render(with_system, opening=True))
        default = bare.removesuffix(ours.render(turns, opening=True)).removeprefix(before)
        turn = _SYSTEM_TURN.fullmatch(default)
        candidate = chatml_template(before, turn[1] if turn else "")
        made = replace(self, text=candidate)
        is_same = (bare, full) == (made.render(turns, opening=True), made.render(with_system, opening=True))
        return candidate if is_same else None
