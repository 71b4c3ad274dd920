"""What a row says, and what becomes of it: a conversation and the examples that it gives.

Rule: every form in which people write rows ends as one of three: chat, pair or text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

Message = dict[str, Any]
Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """What a row says: messages (with tools), or prompt and completion as text, or text that is learned whole.

    A message has role and content, and may have tool_calls, reasoning_content, name, tool_call_id and, on an
    assistant turn, weight (1 unless given; 0: context only).
    """

    messages: list[Message] = field(default_factory=list)
    tools: Tools | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None

    @property
    def form(self) -> str:
        if self.text is not None:
            return "text"
        return "pair" if self.prompt is not None else "chat"

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) or any(
            turn.get("tool_calls") or turn["role"] == "tool" for turn in self.messages
        )


class Encoded(NamedTuple):
    """One example: weights[t] is the loss weight of ids[t] as a target. notes: facts to be counted."""

    ids: list[int]
    weights: list[float]
    notes: tuple[str, ...] = ()
