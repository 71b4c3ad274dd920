"""Tool calls in the text of a completion: Hermes JSON and XML, read with the types that the tools declare, and written back.

Rule: what is not a whole, well-formed call stays text. A value that is not of its declared type stays what was written,
so that the agent's own check tells the policy what is wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT = "</think>"  # where reasoning ends
_BEGIN = re.compile(r"<tool_call>\s*(?:<function=)?|<function=")
_MARK = re.compile(f"{_BEGIN.pattern}|{_THOUGHT}")
MOST_DEPTH = 64  # of the arguments of a call: what is deeper could not be written everywhere again
_FUNCTION = re.compile(r"<function=([^<>\s]+)>\s*")
# A value ends where its end tag is followed by another parameter or by the end: it may hold such a tag itself.
_PARAMETER = re.compile(
    r"<parameter=([^<>\s]+)>(.*?)</parameter>\s*(?=<parameter=[^<>\s]+>|</function>)", re.DOTALL
)
_FUNCTION_END = "</function>"
_SPACE = re.compile(r"\s*")
_KINDS: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedText:
    """A completion as an agent gets it: the text around the calls, and the calls in order."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)


def parse_tool_calls(text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedText:
    """Return the calls of a completion and the text around them.

    tools: as a request declares them ({"type": "function", "function": {"name", "parameters"}}); without any, all is
    text. What stands before the end of reasoning (</think>, but in an argument) is never a call.
    """
    if not tools:
        return ParsedText(text)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    place = _reasoning_end(text, schemas)
    kept, calls = [text[:place]], []
    while match := _BEGIN.search(text, place):
        found = _call_at(text, match.start(), schemas)
        if found is None:
            kept.append(text[place : match.end()])
            place = match.end()
        else:
            call, end = found
            calls.append(call)
            kept.append(text[place : match.start()])
            place = end
    kept.append(text[place:])
    return ParsedText("".join(kept).strip(), calls) if calls else ParsedText(text)


def render_tool_calls(
    calls: Sequence[ToolCall], form: Literal["hermes", "xml"] = "hermes", content: str = ""
) -> str:
    """Return the text that parse_tool_calls reads as these calls with this content before them.

    Raises ValueError for what XML cannot hold: a value that ends its own parameter.
    """
    written = [_written_hermes(call) if form == "hermes" else _written_xml(call) for call in calls]
    return "\n".join([content, *written] if content else written)


def _reasoning_end(text: str, schemas: Mapping[str, Any]) -> int:
    """Return the place of the last </think> that stands in no argument of a whole call; 0 where there is none."""
    if _THOUGHT not in text:
        return 0
    end = place = 0
    while match := _MARK.search(text, place):
        place = match.end()
        if match[0] == _THOUGHT:
            end = match.start()
        elif (found := _call_at(text, match.start(), schemas)) is not None:
            inside = text[match.end() : found[1]]
            # An XML call that was begun in reasoning and one that comes after it are not one call with it all inside.
            begins_again = _THOUGHT in inside and _BEGIN.search(inside, inside.find(_THOUGHT)) is not None
            if inside.startswith("{") or not begins_again:
                place = found[1]
    return end


def _call_at(text: str, start: int, schemas: Mapping[str, Any]) -> tuple[ToolCall, int] | None:
    """Return the call that begins at `start` and the place behind it; None where none does."""
    is_wrapped = text.startswith(_OPEN, start)
    inside = _after_space(text, start + len(_OPEN)) if is_wrapped else start
    found = (_json_call if text.startswith("{", inside) else _xml_call)(text, inside, schemas)
    if found is None or not _is_text(found[0]):
        return None
    if not is_wrapped:
        return found
    end = _after_space(text, found[1])
    return (found[0], end + len(_CLOSE)) if text.startswith(_CLOSE, end) else None


def _is_text(call: ToolCall) -> bool:
    """Whether a call can be sent: JSON may spell half a character (\\ud800), which no encoding holds, or be very deep."""
    if is_deeper(call.arguments, MOST_DEPTH):
        return False
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than `most` deep."""
    level = [value]
    for _ in range(most):
        inner = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        level = [item for items in inner for item in items]
    return any(isinstance(one, dict | list) for one in level)


def _json_call(text: str, start: int, schemas: Mapping[str, Any]) -> tuple[ToolCall, int] | None:
    try:
        value, end = _DECODER.raw_decode(text, start)
        arguments = value.get("arguments", {})
        # Some models write the arguments as a text of JSON, the way the wire format has them.
        arguments = _DECODER.decode(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    schema = schemas.get(name)
    typed = {key: _typed_item(item, _declared(schema, key)) for key, item in arguments.items()}
    return ToolCall(name, typed), end


def _typed_item(item: Any, declared: Any) -> Any:
    """Return an item of JSON: what it says is what it is, but for a text where no text is wanted."""
    is_text = isinstance(item, str) and "string" not in schema_kinds(declared)
    return typed_value(item, declared) if is_text else item


def _xml_call(text: str, start: int, schemas: Mapping[str, Any]) -> tuple[ToolCall, int] | None:
    opening = _FUNCTION.match(text, start)
    if opening is None:
        return None
    name, place = opening[1], opening.end()
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(text, place):
        key, written = parameter[1], parameter[2]
        # One line break after the opening tag and one before the end tag belong to the form.
        written = written.removeprefix("\n").removesuffix("\n")
        arguments[key] = typed_value(written, _declared(schemas.get(name), key))
        place = parameter.end()
    if not text.startswith(_FUNCTION_END, place):
        return None
    return ToolCall(name, arguments), place + len(_FUNCTION_END)


def typed_value(written: str, declared: Any) -> Any:
    """Return what a text says where the schema `declared` wants no text; the text itself where it says no such thing.

    declared: a JSON schema, references resolved; anything else allows all types.
    """
    kinds = schema_kinds(declared)
    if "null" in kinds and written.strip() == "null":
        return None
    if "string" in kinds:
        return written
    try:
        value = _DECODER.decode(written.strip())
    except (ValueError, RecursionError):
        spelled = {"true": True, "false": False}.get(written.strip().lower())
        value = written if spelled is None else spelled
    if isinstance(value, float) and value.is_integer() and "number" not in kinds:
        value = int(value)
    return value if any(_KINDS[kind](value) for kind in kinds) else written


def schema_kinds(declared: Any) -> set[str]:
    """Return the JSON types that a schema allows; all of them where it does not say."""
    if not isinstance(declared, dict):
        return set(_KINDS)
    if "type" in declared:
        named = declared["type"]
        names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        return {name for name in names if isinstance(name, str)} & set(_KINDS) or set(_KINDS)
    choices = declared.get("anyOf") or declared.get("oneOf")
    if isinstance(choices, list) and choices:
        return set().union(*(schema_kinds(choice) for choice in choices))
    values = declared["enum"] if isinstance(declared.get("enum"), list) else None
    if "const" in declared:
        values = [declared["const"]]
    if values:
        return {kind for kind, holds in _KINDS.items() for value in values if holds(value)}
    return set(_KINDS)


def _declared(schema: Any, key: str) -> Any:
    """Return the schema of one parameter, a reference to the schema's own definitions resolved at any depth."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    declared = properties.get(key) if isinstance(properties, dict) else None
    return _resolved(declared, schema, 0)


def _resolved(declared: Any, root: Any, depth: int) -> Any:
    if not isinstance(declared, dict) or depth > 8:
        return None if depth > 8 else declared
    reference = declared.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return _resolved(target, root, depth + 1)
    choices = {
        name: [_resolved(choice, root, depth + 1) for choice in declared[name]]
        for name in ("anyOf", "oneOf")
        if isinstance(declared.get(name), list)
    }
    return declared | choices


def _written_hermes(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"{_OPEN}\n{body}\n{_CLOSE}"


def _written_xml(call: ToolCall) -> str:
    lines = [_OPEN, f"<function={call.name}>"]
    for key, value in call.arguments.items():
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if re.search(r"</parameter>\s*(<parameter=[^<>\s]+>|</function>)", written):
            raise ValueError(f"the value of {key} holds the end of a parameter, which XML cannot write")
        lines += [f"<parameter={key}>", written, "</parameter>"]
    return "\n".join([*lines, _FUNCTION_END, _CLOSE])


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError(f"{written} is no finite number")
    return value


# Equal keys keep the last value, as in XML.
_DECODER = json.JSONDecoder(parse_constant=_constant, parse_float=_finite)
