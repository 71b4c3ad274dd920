"""What was asked for: settings from flags, a config file, a profile and a checkpoint, each value with its source.

Later sources give way to earlier ones: user, file, profile, checkpoint, default. Paths become absolute here, once.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from agent.verifying import verifier_file
from finetune.config import RunConfig
from finetune.errors import FinetuneError, Problems
from finetune.knobs import Knob, build, from_text, knobs
from finetune.methods import METHODS, Method, method_named
from finetune.parallel.profile import Profile, read_profile
from finetune.rules import TASKS, task_sources

_PATH_LIKE = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jinja", ".py", ".yaml", ".yml", ".txt")
_WEIGHT = re.compile(r":\d+(\.\d+)?$")


class _RepeatedKey(ValueError):
    """A config file sets one setting twice; `-` and `_` in names are the same."""


class _Loader(yaml.SafeLoader):
    """YAML as usual, but a key that stands twice is an error: which value was meant nobody knows."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [(key.value, key.start_mark.line + 1) for key, _ in node.value if isinstance(key.value, str)]
        _refuse_repeated(keys)
        return super().construct_mapping(node, deep)


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated([(name, None) for name, _ in pairs])
    return dict(pairs)


def _refuse_repeated(keys: list[tuple[str, int | None]]) -> None:
    seen: set[str] = set()
    for key, line in keys:
        name = key.replace("-", "_")
        if name in seen:
            raise _RepeatedKey(f"{key} stands there twice" + (f", again in line {line}" if line else ""))
        seen.add(name)


@dataclass
class Request:
    """A request as it was understood. config is None where it could not be; problems holds every reason."""

    method: Method
    config: RunConfig | None
    sources: dict[str, str]  # of each setting that is no default
    profile: Profile | None = None
    problems: list[FinetuneError] = field(default_factory=list)

    @property
    def set_by_user(self) -> set[str]:
        return {name for name, source in self.sources.items() if source in ("user", "file")}


def understand(flags: dict[str, Any], cwd: Path) -> Request:
    """Return the request that command-line flags and the files they name make.

    flags holds settings as given, and beside them method and config (a file). Raises FinetuneError where not even the
    method is known.
    """
    flags = dict(flags)
    problems: list[FinetuneError] = []
    file_values = read_settings(flags.pop("config", None), cwd, problems)
    name = flags.pop("method", None) or file_values.pop("method", None)
    file_values.pop("method", None)
    if name is None:
        raise FinetuneError(
            "usage", f"method: required, give --method {' or '.join(METHODS)}", setting="method"
        )
    method = method_named(name)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    profile = None
    for source, layer in (("user", flags), ("file", file_values)):
        _add(values, sources, source, _located(method, layer, cwd))
    _add(values, sources, "tasks", _task_rows(values))
    if values.get("profile"):
        profile = _read_profile(values["profile"], problems)
        _add(values, sources, "profile", _profile_values(profile, values, problems))
    if isinstance(values.get("init_adapter"), str):
        _add(values, sources, "checkpoint", _adapter_values(Path(values["init_adapter"]), problems))
    config = _built(method, values, problems)
    return Request(method, config, sources, profile, problems)


def method_in(path: str, cwd: Path) -> str | None:
    """Return the method that a config file names, None where it names none or cannot be read."""
    name = read_settings(path, cwd, []).get("method")
    return name if isinstance(name, str) else None


def _add(values: dict[str, Any], sources: dict[str, str], source: str, layer: dict[str, Any]) -> None:
    for name, value in layer.items():
        if name not in values:
            values[name] = value
            sources[name] = source


def _built(method: Method, values: dict[str, Any], problems: list[FinetuneError]) -> RunConfig | None:
    """Return the config; where some settings are bad the config of the others, so that they are checked too."""
    try:
        return build(method.config, values)
    except Problems as found:
        problems += found.errors
        bad = {str(error.evidence.get("setting")).split("[")[0] for error in found.errors}
    try:
        return build(method.config, {name: value for name, value in values.items() if name not in bad})
    except Problems:
        return None


def read_settings(path: str | None, cwd: Path, problems: list[FinetuneError]) -> dict[str, Any]:
    """Return the settings of a config file: YAML, or a plan.json, of which what its user had set is taken."""
    if path is None:
        return {}
    file = absolute(path, cwd)
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        value = (
            json.loads(text, object_pairs_hook=_unrepeated)
            if file.endswith(".json")
            else yaml.load(text, _Loader)
        )
        if not isinstance(value, dict):
            raise ValueError("expected names and values")
    except OSError as error:
        problems.append(FinetuneError("file_missing", f"config: {error}", setting="config", file=file))
        return {}
    except (ValueError, yaml.YAMLError) as error:
        code = "duplicate_key" if isinstance(error, _RepeatedKey) else "bad_value"
        reason = " ".join(str(error).split())[:300]
        problems.append(FinetuneError(code, f"config {file}: {reason}", setting="config", file=file))
        return {}
    if "plan_id" in value:
        return chosen_values(value) | {"method": value["method"]}
    return {str(name).replace("-", "_"): item for name, item in value.items()}


def chosen_values(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a plan that its user chose; the rest is found or decided again."""
    return {
        name: setting["value"]
        for name, setting in plan["settings"].items()
        if setting["source"] in ("user", "file")
    }


def again(plan: dict[str, Any], changes: dict[str, Any], cwd: Path) -> Request:
    """Return the request that made a plan, with changes.

    What the plan decided about the mathematics (compute type, length limit, batch) stays, also on another machine;
    devices, threads and the like are decided anew.
    """
    settings = plan["settings"]
    method = method_named(plan["method"])
    kept = {
        item.name
        for item in knobs(method.config)
        if item.identity and settings[item.name]["source"] == "plan"
    }
    values = chosen_values(plan) | {name: settings[name]["value"] for name in kept}
    if changes.get("max_steps") is not None:
        values.pop("epochs", None)
    if changes.get("eval_data"):  # then no share of the training rows is held out
        for name in ("eval_fraction", "split_seed"):
            values.pop(name, None)
    request = understand(values | changes | {"method": plan["method"]}, cwd)
    for name in request.sources.keys() - changes.keys():
        if request.sources[name] == "user":
            request.sources[name] = settings[name]["source"]
    return request


def _task_rows(values: dict[str, Any]) -> dict[str, Any]:
    """Return the rows that tasks are; a list that is none is refused later."""
    found = {}
    for tasks, data in (("tasks", "data"), ("eval_tasks", "eval_data")):
        specs = values.get(tasks)
        if isinstance(specs, list) and specs and all(isinstance(spec, str) for spec in specs):
            found[data] = task_sources(specs)
    return found


def _read_profile(path: str, problems: list[FinetuneError]) -> Profile | None:
    try:
        return read_profile(path)
    except FinetuneError as error:
        problems.append(error)
    except Problems as found:
        problems += found.errors
    return None


def _profile_values(
    profile: Profile | None, values: dict[str, Any], problems: list[FinetuneError]
) -> dict[str, Any]:
    """Return the settings that a profile brings; what the user said differently is a conflict, never bent."""
    if profile is None:
        return {}
    found: dict[str, Any] = {"num_gpus": profile.num_processes}
    if profile.kind != "none":
        found["parallel"] = profile.kind
    if profile.mixed_precision is not None:
        found["dtype"] = "bf16" if profile.mixed_precision == "bf16" else "fp32"
    for name in ("num_gpus", "dtype"):
        said = str(values.get(name, found.get(name)))
        if name in found and said not in (str(found[name]), "auto"):
            text = f"{name}: {said}, but the profile says {found[name]}; they must be equal"
            problems.append(FinetuneError("settings_conflict", text, setting=name, profile=found[name]))
    return found


def _adapter_values(folder: Path, problems: list[FinetuneError]) -> dict[str, Any]:
    """Return the settings that an adapter to start from brings with it."""
    file = folder / "adapter_config.json"
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        targets = facts["target_modules"]
        names = targets if isinstance(targets, str) else ",".join(sorted(targets))
        return {"lora_rank": facts["r"], "lora_alpha": facts["lora_alpha"], "lora_targets": names}
    except OSError:
        problems.append(
            FinetuneError(
                "file_missing", f"init_adapter: {file} is not there", setting="init_adapter", file=str(file)
            )
        )
    except (ValueError, KeyError, TypeError) as error:
        problems.append(
            FinetuneError(
                "bad_adapter",
                f"init_adapter: {file} is no PEFT adapter config ({error})",
                setting="init_adapter",
            )
        )
    return {}


def _located(method: Method, values: dict[str, Any], cwd: Path) -> dict[str, Any]:
    """Return the values with every path in them made absolute."""
    items = {item.name: item for item in knobs(method.config)}
    located = dict(values)
    for name in ("model", "domain", "chat_template"):
        if isinstance(values.get(name), str):
            located[name] = where(values[name], cwd)
    for name in ("init_adapter", "profile", "replay", "harness_program", "harness_config"):
        if isinstance(values.get(name), str):
            located[name] = absolute(values[name], cwd)
    if isinstance(values.get("out"), str) and values["out"] != "auto":
        located["out"] = absolute(values["out"], cwd)
    for name in ("data", "eval_data", "tasks", "eval_tasks"):
        sources = from_text(items[name], values[name]) if name in values and name in items else None
        if isinstance(sources, list):
            located[name] = [where(source, cwd) if isinstance(source, str) else source for source in sources]
    if isinstance(python := values.get("vllm_python"), str) and "/" in python:  # else a program on PATH
        located["vllm_python"] = absolute(python, cwd)
    return located | (
        _verifiers(items.get("verifier"), values["verifier"], cwd) if "verifier" in values else {}
    )


def _verifiers(item: Knob | None, given: Any, cwd: Path) -> dict[str, Any]:
    """Return the verifiers with the path of each file made absolute; what is no list of texts is refused later."""
    specs = from_text(item, given) if item else None
    if not isinstance(specs, list):
        return {}
    files = [verifier_file(spec) if isinstance(spec, str) else None for spec in specs]
    return {
        "verifier": [
            str(replace(own, file=absolute(own.file, cwd))) if own else spec
            for own, spec in zip(files, specs, strict=True)
        ]
    }


def absolute(path: str, cwd: Path) -> str:
    """Return an absolute path, ~ expanded and links left as they are."""
    return os.path.abspath(cwd / os.path.expanduser(path))


def where(text: str, cwd: Path) -> str:
    """Return a source with its path made absolute; a name (a builtin, a Hub id, auto) stays as it is.

    A path is what exists, what begins like one, or what ends like a file; a weight (rows.jsonl:0.7) may follow it.
    """
    if text.startswith("builtin:"):
        return text
    if text.startswith(TASKS):
        return TASKS + where(text.removeprefix(TASKS), cwd)
    path, weight = text, ""
    if (found := _WEIGHT.search(text)) and not os.path.exists(absolute(text, cwd)):
        path, weight = text[: found.start()], found.group()
    is_path = path.startswith(("/", "./", "../", "~")) or path.endswith(_PATH_LIKE) or path in (".", "..")
    return absolute(path, cwd) + weight if is_path or os.path.exists(absolute(path, cwd)) else text
