"""The verbs as tools of a language model: definitions in the form of OpenAI, and the execution of a call.

A tool declares nothing twice: its arguments are the flags of the verb, its settings those of finetune/config.py. A call
becomes the argv of the console command and is carried out by the very same functions, so that both answer with the same
JSON. Nothing is kept between calls: runs and jobs are processes of their own, named by their ids.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jsonschema

from agent.cli import answer_to, make_parser
from agent.flags import Number
from agent.render import Answer, document, text_of
from agent.request import absolute
from agent.roots import Roots, refuse_outside, refuse_paths
from agent.runner import guarded
from agent.toolset import BY_NAME, TOOLS, Tool
from finetune.errors import EXIT_CODES, FinetuneError, Problems
from finetune.knobs import json_schema, knobs, unknown_name
from finetune.methods import METHODS

_OWN = ("help", "help_all", "json", "detach", "dry_run")  # flags of a person's, or that a tool sets itself
_MOST_CHARACTERS = 200_000  # of the arguments of one call
_SETTINGS = {item.name: item for method in METHODS.values() for item in knobs(method.config)}
_SWITCHES = {name for name, item in _SETTINGS.items() if item.kind is bool}
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")  # what no argv can hold


def definitions() -> list[dict[str, Any]]:
    """Return the tools, always in the same order, as the `tools` of a chat completion of OpenAI."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": copy.deepcopy(parameters(tool.name)),
            },
        }
        for tool in TOOLS
    ]


@cache
def parameters(name: str) -> dict[str, Any]:
    """Return the JSON Schema of the arguments of a tool: the flags of its verb, then method, config and settings."""
    tool = BY_NAME[name]
    actions = _actions(tool)
    properties = {action.dest: _argument(action, tool) for action in actions}
    required = [action.dest for action in actions if action.required]
    if tool.settings != ():
        properties["method"] = {"type": "string", "enum": list(METHODS), "description": "how to train"}
        text = "settings from a YAML file or a plan.json; settings given here go before"
        properties["config"] = {"type": "string", "description": text}
        properties["settings"] = _settings(tool)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _parser(tool: Tool) -> argparse.ArgumentParser:
    return make_parser(tool.verb, None)


def _actions(tool: Tool) -> list[argparse.Action]:
    return [action for action in _parser(tool)._actions if action.dest not in _OWN]


def _argument(action: argparse.Action, tool: Tool) -> dict[str, Any]:
    """Return the schema of what a flag takes."""
    value: dict[str, Any] = {"type": "string"}
    if isinstance(action.type, Number):
        kind, most = action.type.kind, tool.at_most.get(action.dest, action.type.at_most)
        value = {
            "type": "integer" if kind is int else "number",
            "minimum": action.type.at_least,
            "maximum": most,
        }
    elif action.nargs == 0:
        value = {"type": "boolean"}
    elif not action.option_strings:
        value["pattern"] = "^[^-]"  # else argparse would take it for a flag
    if action.choices is not None:
        value["enum"] = list(action.choices)
    if action.nargs == "+":
        value = {"type": "array", "items": value, "minItems": 1}
    if action.help:
        value["description"] = action.help.replace("%%", "%")
    default = tool.defaults.get(action.dest, action.default)
    if default is not None and default is not argparse.SUPPRESS:
        value["default"] = default
    return value


def _settings(tool: Tool) -> dict[str, Any]:
    """Return the schema of the settings: those of all methods, each once; where methods differ the wider bounds."""
    shown: dict[str, Any] = {}
    for method in METHODS.values():
        for name, value in json_schema(method.config, advanced=False)["properties"].items():
            if tool.settings is None or name in tool.settings:
                shown[name] = _merged(shown[name], value) if name in shown else value
                if value.get(
                    "default"
                ):  # to say none of a list is to say something: its default is not meant
                    shown[name] |= {"minItems": 1} if value["type"] == "array" else {}
    text = (
        "settings by name; advanced ones are taken too (`finetune run --method METHOD --help-all` lists them)"
    )
    more = {"type": ["string", "number", "boolean", "array", "null"]}
    return {"type": "object", "description": text, "properties": shown, "additionalProperties": more}


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what both schemas of a setting say: all choices, the wider bounds; a default only where it is the same."""
    merged = one | other
    for name, widest in (("minimum", min), ("exclusiveMinimum", min), ("maximum", max)):
        if name in one and name in other:
            merged[name] = widest(one[name], other[name])
        else:
            merged.pop(name, None)
    if "enum" in one:
        merged["enum"] = list(dict.fromkeys([*one["enum"], *other["enum"]]))
    if one.get("default") != other.get("default"):
        merged.pop("default", None)
    return merged


def call(name: str, arguments: Any, roots: Roots) -> dict[str, Any]:
    """Carry out one call and return the answer (agent/schemas/answer.json), whatever the arguments are.

    arguments: an object, or its JSON text as models write it.
    """
    verb = BY_NAME[name].verb if name in BY_NAME else "finetune"
    return document(guarded(verb, lambda: _answered(name, arguments, roots)))


def message(tool_call: Mapping[str, Any], roots: Roots) -> dict[str, Any]:
    """Return the message that answers one entry of the `tool_calls` of an assistant's message."""
    function = tool_call["function"]
    answer = call(function["name"], function["arguments"], roots)
    return {"role": "tool", "tool_call_id": tool_call["id"], "content": text_of(answer)}


def is_failure(answer: Mapping[str, Any]) -> bool:
    """Whether an answer is a failure; that a wait has ended before the run is none."""
    return not answer["ok"] and answer["errors"][0]["code"] != "still_running"


def _answered(name: str, arguments: Any, roots: Roots) -> Answer:
    if name not in BY_NAME:
        text = unknown_name(name, list(BY_NAME)).replace("setting", "tool")
        raise FinetuneError("usage", f"{text}; there are: {', '.join(BY_NAME)}")
    tool = BY_NAME[name]
    given = _checked(tool, arguments)
    if "config" in given:
        refuse_paths([("config", absolute(given["config"], roots.first))], roots)
    return answer_to(argv_of(tool, given), roots.first, lambda made: refuse_outside(made, roots))


def _checked(tool: Tool, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call, or raise Problems with all that the schema says against them."""
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        raise FinetuneError("usage", f"arguments: an object is expected, not {type(arguments).__name__}")
    given = dict(tool.defaults) | {name: value for name, value in arguments.items() if value is not None}
    try:
        problems = [*_misnamed(tool, given), *_unfit(tool, given)]
    except RecursionError as error:
        raise FinetuneError("bad_value", "arguments: nested too deeply") from error
    if problems:
        raise Problems(problems)
    return given


def _parsed(text: str) -> Any:
    if len(text) > _MOST_CHARACTERS:
        raise FinetuneError("usage", f"arguments: {len(text)} characters, {_MOST_CHARACTERS} at most")
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise FinetuneError("usage", f"arguments: no JSON: {str(error)[:200]}") from error


def _misnamed(tool: Tool, given: dict[str, Any]) -> Iterator[FinetuneError]:
    """Yield an error for each argument and each setting that no tool and no method has."""
    for known, names, where in _names(tool, given):
        for name in names:
            if name not in known:
                text = unknown_name(name[:100], known).replace("no such setting", f"no such {where}")
                yield FinetuneError("unknown_setting", text, setting=name[:100])


def _names(tool: Tool, given: dict[str, Any]) -> Iterator[tuple[list[str], list[str], str]]:
    yield list(parameters(tool.name)["properties"]), list(given), "argument"
    settings = given.get("settings")
    if tool.settings != () and isinstance(settings, dict):
        yield list(_SETTINGS), list(settings), "setting"


def _unfit(tool: Tool, given: dict[str, Any]) -> Iterator[FinetuneError]:
    """Yield what the schema says against the values, and what no argv can hold."""
    known = parameters(tool.name)["properties"]
    schema = parameters(tool.name) | {"additionalProperties": True}
    for error in jsonschema.Draft202012Validator(schema).iter_errors(given):
        place = ".".join(str(part) for part in error.absolute_path)
        if error.validator == "required":
            name = str(error.message).split("'")[1]
            yield FinetuneError("usage", f"{name}: required", setting=name)
        else:
            yield FinetuneError("bad_value", f"{place[:100]}: {error.message[:300]}", setting=place[:100])
    for name, value in given.items():
        if name in known and (reason := _unusable(value)):
            yield FinetuneError("bad_value", f"{name}: {reason}", setting=name)


def _unusable(value: Any) -> str | None:
    """Return why a value cannot be written as arguments of a command, or None."""
    if isinstance(value, str):
        return "holds a character that no command line can hold" if _UNUSABLE.search(value) else None
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < 2**63):
        return "is not finite, or too large"
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((reason for part in parts if (reason := _unusable(part))), None)


def argv_of(tool: Tool, given: Mapping[str, Any]) -> list[str]:
    """Return the console command that a call is, from the verb on."""
    actions = [action for action in _actions(tool) if action.dest in given]
    positional, flags = [], []
    for action in actions:
        values = given[action.dest] if isinstance(given[action.dest], list) else [given[action.dest]]
        if not action.option_strings:
            positional += [str(value) for value in values]
        elif action.nargs == 0:
            flags += [action.option_strings[0]] if values[0] else []
        else:
            flags += [f"{action.option_strings[0]}={_written(value)}" for value in values]
    flags += [f"--{name}={given[name]}" for name in ("method", "config") if name in given]
    for name, value in given.get("settings", {}).items():
        flags += _flags_of(name, value)
    return [tool.verb, *positional, *flags, *(["--detach"] if _is_detached(tool, given) else [])]


def _is_detached(tool: Tool, given: Mapping[str, Any]) -> bool:
    """Whether a call returns a handle: where its verb can be detached, but for a plan or a doctor that answers at once."""
    is_quick = {"plan": given.get("checks", "quick") == "quick", "doctor": bool(given.get("quick"))}
    return "--detach" in _parser(tool)._option_string_actions and not is_quick.get(tool.verb, False)


def _flags_of(name: str, value: Any) -> list[str]:
    """Return a setting as flags; of a switch, null is what it is without a flag."""
    if value is None and name in _SWITCHES:
        return []
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, list):
        return [f"{flag}={_written(item)}" for item in value]
    return [f"{flag}={'none' if value is None else _written(value)}"]


def _written(value: Any) -> Any:
    """Return a value as a flag takes it: 4.0, which is an integer for a JSON Schema, as 4."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def exit_code(answer: Mapping[str, Any]) -> int:
    """Return the exit code with which the console command ends that gives this answer."""
    return EXIT_CODES[answer["errors"][0]["code"]] if answer["errors"] else 0
