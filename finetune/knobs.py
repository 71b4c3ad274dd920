"""One declaration per setting: `knob()` gives a dataclass field its help text, its bounds and what it bears on.

Everything a user or an agent can see of a setting is read back from that field: the command-line flag, the JSON
Schema property, the row of a table. No heavy import, so that `--help` and tool listing never import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import types
import typing
from typing import Any

import jsonschema

from finetune.errors import FinetuneError, Problems

_VALIDATOR = jsonschema.Draft202012Validator
_JSON_TYPE = {str: "string", int: "integer", float: "number", bool: "boolean"}
# What other programs call a setting, where the spelling alone would suggest another one.
_USUAL_NAMES = {
    "lr": "learning_rate",
    "gpus": "num_gpus",
    "nproc_per_node": "num_gpus",
    "batch_size": "global_batch_size",
    "per_device_train_batch_size": "batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation",
    "num_train_epochs": "epochs",
    "max_seq_length": "max_length",
    "warmup_steps": "warmup_ratio",
    "lr_scheduler_type": "schedule",
    "bf16": "dtype",
    "adapter": "init_adapter",
}
_LARGEST = 2**53  # numbers beyond lose digits in JSON
_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")
_BOUNDS = {
    "at_least": "minimum",
    "above": "exclusiveMinimum",
    "at_most": "maximum",
    "below": "exclusiveMaximum",
}


def knob(
    default: Any = dataclasses.MISSING,
    help: str = "",
    advanced: bool = False,
    identity: bool = True,
    **bounds: float,
) -> Any:
    """Declare a setting; without a default it is required.

    advanced: left out of `--help` (`--help-all` shows it). identity: changes the mathematics, hence the plan_id.
    bounds: at_least, above, at_most, below.
    """
    if unknown := bounds.keys() - _BOUNDS.keys():
        raise TypeError(f"knob() got unknown bounds {sorted(unknown)}; use {sorted(_BOUNDS)}")
    facts = {"help": help, "bounds": bounds, "advanced": advanced, "identity": identity}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


@dataclasses.dataclass(frozen=True)
class Knob:
    """One setting as its readers see it."""

    name: str
    kind: type
    choices: tuple[Any, ...]
    optional: bool
    is_list: bool
    default: Any
    help: str
    bounds: dict[str, float]
    advanced: bool
    identity: bool

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def knobs(config_class: type) -> list[Knob]:
    """Return the settings of a config dataclass in the order in which they are written."""
    hints = typing.get_type_hints(config_class)
    return [_knob(field, hints[field.name]) for field in dataclasses.fields(config_class)]


def _knob(field: dataclasses.Field[Any], hint: Any) -> Knob:
    optional = is_list = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        optional, hint = True, inner[0]
    if typing.get_origin(hint) is list:
        is_list, hint = True, typing.get_args(hint)[0]
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    kind = type(choices[0]) if choices else hint
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    facts = field.metadata
    return Knob(
        field.name,
        kind,
        choices,
        optional,
        is_list,
        default,
        facts["help"],
        facts["bounds"],
        facts["advanced"],
        facts["identity"],
    )


def json_schema(config_class: type, advanced: bool = True) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a config dataclass, with or without its advanced settings."""
    items = [item for item in knobs(config_class) if advanced or not item.advanced]
    return {
        "type": "object",
        "properties": {item.name: _property(item) for item in items},
        "required": [item.name for item in items if item.required],
        "additionalProperties": False,
    }


def _property(item: Knob) -> dict[str, Any]:
    value: dict[str, Any] = {"type": _JSON_TYPE[item.kind]}
    if item.choices:
        value["enum"] = list(item.choices)
    value |= {_BOUNDS[name]: bound for name, bound in item.bounds.items()}
    if item.is_list:
        value = {"type": "array", "items": value}
    if item.optional:
        value["type"] = [value["type"], "null"]
        if item.choices:
            value["enum"] = [*item.choices, None]
    value["description"] = item.help
    if not item.required:
        value["default"] = item.default
    return value


class FlagParser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and raises instead of printing and leaving."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> typing.NoReturn:
        raise FinetuneError("usage", message)


def add_flags(parser: argparse._ActionsContainer, config_class: type, advanced: bool = False) -> None:
    """Add one flag per setting; a flag that is not given is left out of the namespace.

    Values stay strings here: `build` converts and checks them all, so that every problem is reported at once.
    With `advanced` false the advanced settings are taken but not shown.
    """
    for item in knobs(config_class):
        shown = "required" if item.required else f"default: {_shown(item)}"
        text = (
            argparse.SUPPRESS
            if item.advanced and not advanced
            else f"{item.help} ({shown})".replace("%", "%%")
        )
        options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
        if item.kind is bool:
            parser.add_argument(item.flag, action=argparse.BooleanOptionalAction, **options)
        elif item.is_list:
            parser.add_argument(item.flag, nargs="+", action="extend", metavar=_placeholder(item), **options)
        else:
            parser.add_argument(item.flag, metavar=_placeholder(item), **options)


def _shown(item: Knob) -> str:
    if item.default is None or item.default == []:
        return "none"
    return str(item.default).lower() if item.kind is bool else str(item.default)


def _placeholder(item: Knob) -> str:
    return "|".join(str(choice) for choice in item.choices) if item.choices else item.name.upper()


def from_text(item: Knob, value: Any) -> Any:
    """Return a command-line string as the setting's kind, or unchanged where it is not one (the schema then says so)."""
    if item.is_list:
        return [value] if isinstance(value, str) else value
    if not isinstance(value, str):
        return value
    if item.optional and value.lower() == "none" and value not in item.choices:
        return None
    if item.kind is str:
        return value
    if item.kind is bool:
        return {"true": True, "false": False}.get(value.lower(), value)
    try:
        return item.kind(value)
    except ValueError:
        return value


def build(config_class: type, values: dict[str, Any]) -> Any:
    """Return the config that `values` describe, or raise Problems naming every bad setting at once.

    JSON Schema alone is not enough: it takes 2.0 for an integer and lets NaN pass every bound.
    """
    items = {item.name: item for item in knobs(config_class)}
    unknown = [_unknown(name, list(items)) for name in values if name not in items]
    known = {name: from_text(items[name], value) for name, value in values.items() if name in items}
    errors = unknown + [
        _bad_value(error) for error in _VALIDATOR(json_schema(config_class)).iter_errors(known)
    ]
    for name, value in known.items():
        if reason := _unusable(value):
            errors.append(FinetuneError("bad_value", f"{name}: {reason}", setting=name))
    if errors:
        raise Problems(sorted(errors, key=lambda error: error.message))
    return config_class(**{name: _coerced(items[name], value) for name, value in known.items()})


def _unusable(value: Any) -> str | None:
    """Return why no setting can have this value, whatever its schema says; None where it is usual."""
    if isinstance(value, list):
        return next((reason for part in value if (reason := _unusable(part))), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not finite"
    if isinstance(value, int | float) and abs(value) > _LARGEST:
        return f"a number of {len(str(value))} characters is too large"
    if isinstance(value, str) and not value.isprintable() and _UNWRITABLE.search(value):
        return "holds bytes that are no UTF-8, which no file of ours can hold"
    return None


def _coerced(item: Knob, value: Any) -> Any:
    if value is None or item.is_list:
        return value
    return item.kind(value)


def unknown_name(name: str, known: list[str]) -> str:
    """Return a sentence that refuses `name` and suggests the nearest known one."""
    meant = _USUAL_NAMES.get(name.replace("-", "_"))
    close = [item for item in known if item.replace("-", "_") == meant] or difflib.get_close_matches(
        name, known, n=1, cutoff=0.6
    )
    return f"{name}: no such setting" + (f"; did you mean {close[0]}?" if close else "")


def _unknown(name: str, known: list[str]) -> FinetuneError:
    return FinetuneError("unknown_setting", unknown_name(name, known), setting=name)


def _bad_value(error: jsonschema.ValidationError) -> FinetuneError:
    name = error.json_path.removeprefix("$.").removeprefix("$")
    if error.validator == "required":
        name = error.message.split("'")[1]  # one error for each missing name, which only the message tells
        return FinetuneError("usage", f"{name}: required, give --{name.replace('_', '-')}", setting=name)
    return FinetuneError("bad_value", f"{name}: {error.message[:300]}", setting=name)
