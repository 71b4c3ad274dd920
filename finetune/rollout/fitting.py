"""Making a conversation fit the context: the oldest tool outputs are cut, nothing else.

Rule: what the system, the user and the policy said is never cut; each cut leaves a marker in its place and is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.data.conversation import Message

MARKER = "[... {left_out} characters of this output were left out ...]"


@dataclass(frozen=True)
class Fitted:
    """A conversation that was made to fit. cuts: of each message cut {message, tool_call_id, characters, kept}."""

    messages: list[Message]
    num_tokens: int
    cuts: list[dict[str, Any]] = field(default_factory=list)


def fit_messages(
    messages: Sequence[Message],
    count_tokens: Callable[[list[Message]], int],
    limit: int,
    headroom: int = 0,
) -> Fitted:
    """Cut tool outputs, oldest first, until the conversation has at most limit - headroom tokens.

    headroom: room for the turns to come, so that not every call of a growing conversation is cut anew; where the tool
    outputs do not give that much, as much as they do. What still has more than `limit` tokens is returned all the same.
    """
    kept = [dict(message) for message in messages]
    num_tokens = count_tokens(kept)
    if num_tokens <= limit:
        return Fitted(kept, num_tokens)
    goal = limit - headroom
    cuts = []
    for place, message in enumerate(messages):
        if num_tokens <= goal:
            break
        whole = message.get("content") or ""
        if message["role"] != "tool" or len(_shortened(whole, 0)) >= len(whole):
            continue
        kept[place]["content"] = _shortened(whole, 0)
        num_tokens, characters = count_tokens(kept), 0
        if num_tokens <= goal:
            characters, num_tokens = _most_kept(kept, place, whole, count_tokens, goal)
        cuts.append(
            {
                "message": place,
                "tool_call_id": message.get("tool_call_id"),
                "characters": len(whole),
                "kept": characters,
            }
        )
    return Fitted(kept, num_tokens, cuts)


def _most_kept(
    kept: list[Message], place: int, whole: str, count_tokens: Callable[[list[Message]], int], goal: int
) -> tuple[int, int]:
    """Put the longest part of the output that fits in its place; return its characters and the tokens of all."""
    low, high = 0, len(whole) - 1  # characters that fit, and at most
    while low < high:
        middle = (low + high + 1) // 2
        kept[place]["content"] = _shortened(whole, middle)
        if count_tokens(kept) <= goal:
            low = middle
        else:
            high = middle - 1
    kept[place]["content"] = _shortened(whole, low)
    return low, count_tokens(kept)


def _shortened(whole: str, characters: int) -> str:
    """Return the beginning and the end of an output, so many characters together, and the marker between them."""
    marker = MARKER.format(left_out=len(whole) - characters)
    first = characters - characters // 2
    parts = [whole[:first], marker, whole[len(whole) - characters // 2 :]]
    return "\n".join(part for part in parts if part)
