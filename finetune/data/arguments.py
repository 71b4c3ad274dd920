"""Settings that are written as name=value: columns to rename, arguments of the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from finetune.errors import FinetuneError

TEMPLATE_NAMES = ("chatml",)  # what --chat-template takes besides a file
_ARGUMENTS_OF_OURS = {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}


def column_names(column_map: Sequence[str]) -> dict[str, str]:
    """Return {name in the file: our name} of entries such as "prompt=question"."""
    names: dict[str, str] = {}
    for entry in column_map:
        ours, _, theirs = entry.partition("=")
        if not (ours and theirs) or theirs in names or ours in names.values():
            text = f"map: {entry!r} must read NAME=COLUMN_IN_THE_FILE, each name once, as prompt=question"
            raise FinetuneError("bad_value", text, setting="map")
        names[theirs] = ours
    return names


def template_arguments(entries: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of entries such as enable_thinking=false; a value that is JSON is read as JSON."""
    arguments: dict[str, Any] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name.isidentifier() or name in _ARGUMENTS_OF_OURS or name in arguments:
            text = f"chat_template_args: {entry!r} must read name=value, each name once and none of the template's own inputs"
            raise FinetuneError("bad_value", text, setting="chat_template_args")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments
