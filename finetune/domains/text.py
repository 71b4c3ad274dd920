"""The domain of plain text: the five forms in which people write rows for supervised finetuning.

Rule: a form is recognised by its columns or named by --data-format, never guessed among several. Where text belongs,
a number, true or false becomes its JSON text ("1"), null is absent, and anything else is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from finetune.data.conversation import Conversation, Message
from finetune.data.formats import parsed_json
from finetune.domains.base import Domain, Values, mean_metrics, split_by_prompt
from finetune.errors import FinetuneError
from finetune.records import Row

# What each form needs, and what else it reads.
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("tools",)),
    "sharegpt": (("conversations",), ("tools", "system")),
    "alpaca": (("instruction", "output"), ("input", "system", "history")),
    "prompt-completion": (("prompt", "completion"), ("tools",)),
    "text": (("text",), ()),
}
_TELLING = {name for needed, _ in FORMS.values() for name in needed}
_ROLES = {"system", "user", "assistant", "tool"}
_ROLE_NAMES = {"developer": "system", "function": "tool"}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def text_domain(data_format: str = "auto") -> Domain:
    """Return the domain of rows in one of FORMS. It has no verifier: what is measured is the held-out loss."""

    def conversation(row: Row) -> Conversation:
        return _MAKERS[form_of(row.values, data_format)](row.values)

    return Domain(
        "text", conversation, split_by_prompt(conversation), None, mean_metrics, f"text:{data_format}:1"
    )


def form_of(values: Values, data_format: str = "auto") -> str:
    """Return the form of a row; raises unknown_columns where no form fits its columns, or more than one may be meant."""
    present = {name for name, value in values.items() if value is not None}
    if data_format != "auto":
        needed, _ = FORMS[data_format]
        if missing := [name for name in needed if name not in present]:
            raise _unknown(
                values,
                f"a row of form {data_format} needs {', '.join(needed)}; it has no {', '.join(missing)}",
            )
        return data_format
    fitting = [form for form, (needed, _) in FORMS.items() if present.issuperset(needed)]
    if not fitting:
        raise _unknown(
            values,
            "no form of rows has these columns; rename them, as --map prompt=question completion=answer",
        )
    if unread := sorted(present & _TELLING - set(FORMS[fitting[0]][0])):
        text = f"the form {fitting[0]} fits, but it would not read {', '.join(unread)}; say which is meant with --data-format"
        raise _unknown(values, text)
    return fitting[0]


def _unknown(values: Values, text: str) -> FinetuneError:
    found = list(values)
    accepted = {form: list(needed) for form, (needed, _) in FORMS.items()}
    forms = ", ".join("+".join(needed) for needed, _ in FORMS.values())
    message = f"{text} (columns found: {', '.join(found) or 'none'}; forms: {forms})"
    return FinetuneError("unknown_columns", message, columns_found=found, forms=accepted)


def as_text(value: Any, what: str) -> str:
    """Return a cell as text by the rule of this module; raises bad_row for a list, an object or a number that is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return json.dumps(value)
    raise FinetuneError("bad_row", f"{what} is {type(value).__name__}, where text belongs")


def _messages_row(values: Values) -> Conversation:
    return Conversation(turns_of(values["messages"], "messages"), tools_of(values.get("tools")))


def _sharegpt_row(values: Values) -> Conversation:
    said = _listed(values["conversations"], "conversations")
    turns = [_sharegpt_turn(item, f"conversations[{place}]") for place, item in enumerate(said)]
    return Conversation(_with_system(values, turns), tools_of(values.get("tools")))


def _sharegpt_turn(item: Any, what: str) -> Message:
    if not isinstance(item, dict):
        raise FinetuneError("bad_row", f"{what} is {type(item).__name__} and no object")
    if "role" in item:
        return turn_of(item, what)
    name = item.get("from")
    role = _SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise _bad_role(name, what, sorted(_SHAREGPT_ROLES))
    turn = {"role": role, "content": item.get("value")}
    if name == "function_call":
        calls = _json_cell(item.get("value"), f"{what}.value")
        turn |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    return turn_of(turn | ({"weight": item["weight"]} if "weight" in item else {}), what)


def _alpaca_row(values: Values) -> Conversation:
    asked = as_text(values["instruction"], "instruction")
    if values.get("input") is not None and (given := as_text(values["input"], "input")).strip():
        asked = f"{asked}\n\n{given}"
    turns: list[Message] = []
    for place, pair in enumerate(_listed(values.get("history") or [], "history")):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise FinetuneError("bad_row", f"history[{place}] is no pair of a question and an answer")
        turns += _asked_and_answered(
            as_text(pair[0], f"history[{place}]"), as_text(pair[1], f"history[{place}]")
        )
    turns += _asked_and_answered(asked, as_text(values["output"], "output"))
    return Conversation(_with_system(values, turns))


def _asked_and_answered(asked: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _with_system(values: Values, turns: list[Message]) -> list[Message]:
    system = values.get("system")
    if system is None or not (text := as_text(system, "system")).strip():
        return turns
    return [{"role": "system", "content": text}, *turns]


def _pair_row(values: Values) -> Conversation:
    """Return a pair of texts, or a conversation of which only the turns of the completion are learned."""
    prompt, completion = values["prompt"], values["completion"]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return Conversation(prompt=as_text(prompt, "prompt"), completion=as_text(completion, "completion"))
    before = (
        turns_of(prompt, "prompt")
        if isinstance(prompt, list)
        else [{"role": "user", "content": as_text(prompt, "prompt")}]
    )
    if not isinstance(completion, list):
        completion = [{"role": "assistant", "content": as_text(completion, "completion")}]
    context = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in before]
    return Conversation([*context, *turns_of(completion, "completion")], tools_of(values.get("tools")))


def _text_row(values: Values) -> Conversation:
    text = as_text(values["text"], "text")
    if not text.strip():
        raise FinetuneError("no_supervised_token", "the text is empty")
    return Conversation(text=text)


_MAKERS: dict[str, Callable[[Values], Conversation]] = {
    "messages": _messages_row,
    "sharegpt": _sharegpt_row,
    "alpaca": _alpaca_row,
    "prompt-completion": _pair_row,
    "text": _text_row,
}


def turns_of(value: Any, what: str) -> list[Message]:
    """Return the turns of a conversation in the one shape that templates get; raises bad_roles and bad_row."""
    return [turn_of(item, f"{what}[{place}]") for place, item in enumerate(_listed(value, what))]


def turn_of(item: Any, what: str) -> Message:
    """Return one turn: a known role, content as text (a null is empty text), tool calls with their arguments as objects."""
    if not isinstance(item, dict):
        raise FinetuneError("bad_row", f"{what} is {type(item).__name__} and no object with role and content")
    name = item.get("role")
    role = _ROLE_NAMES.get(name, name) if isinstance(name, str) else None
    if role not in _ROLES:
        raise _bad_role(name, what, sorted(_ROLES | set(_ROLE_NAMES)))
    turn: Message = {"role": role, "content": _content(item.get("content"), f"{what}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if item.get(name) is not None:
            turn[name] = as_text(item[name], f"{what}.{name}")
    calls = item.get("tool_calls") or ([item["function_call"]] if item.get("function_call") else [])
    if calls:
        turn["tool_calls"] = [
            _call(call, f"{what}.tool_calls[{place}]") for place, call in enumerate(_listed(calls, what))
        ]
    if item.get("weight") is not None:
        turn["weight"] = _weight(item["weight"], turn["role"], what)
    return turn


def _bad_role(role: Any, what: str, known: list[str]) -> FinetuneError:
    return FinetuneError(
        "bad_roles", f"{what}: the role is {role!r}; there are {', '.join(known)}", role=str(role)
    )


def _content(value: Any, what: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, list):
        return as_text(value, what)
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or "text" not in part:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise FinetuneError("bad_row", f"{what} has a part of kind {kind}; only text is learned")
        parts.append(as_text(part["text"], what))
    return "".join(parts)


def _weight(value: Any, role: str, what: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and value >= 0)
    ):
        raise FinetuneError("bad_row", f"{what}: the weight {value!r} is no number from 0 on")
    if value and role != "assistant":
        raise FinetuneError(
            "bad_row",
            f"{what}: a weight on a {role} turn, which is never learned; only assistant turns have one",
        )
    return value


def _call(value: Any, what: str) -> Message:
    if not isinstance(value, dict):
        raise FinetuneError("bad_row", f"{what} is {type(value).__name__} and no object")
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FinetuneError("bad_row", f"{what}: a tool call needs the name of a function")
    arguments = _json_cell(function.get("arguments") or {}, f"{what}.arguments")
    if not isinstance(arguments, dict):
        raise FinetuneError("bad_row", f"{what}: the arguments are {type(arguments).__name__} and no object")
    call: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return call | ({"id": as_text(value["id"], f"{what}.id")} if value.get("id") is not None else {})


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools on offer as a list of {type, function}; a JSON string and bare functions are taken too."""
    if value is None or value == "":
        return None
    tools = []
    for place, tool in enumerate(_listed(value, "tools")):
        bare = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(bare, dict) or not isinstance(bare.get("name"), str):
            raise FinetuneError("bad_row", f"tools[{place}] has no function with a name")
        tools.append(tool if "function" in tool else {"type": "function", "function": bare})
    return tools or None


def _listed(value: Any, what: str) -> list[Any]:
    value = _json_cell(value, what)
    if not isinstance(value, list):
        raise FinetuneError("bad_row", f"{what} is {type(value).__name__}, where a list belongs")
    return value


def _json_cell(value: Any, what: str) -> Any:
    """Return the value that a cell holds as JSON text, as tables and some APIs write it; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return parsed_json(value)
    except ValueError as error:
        raise FinetuneError("bad_row", f"{what} is text that is no JSON: {error}") from error
