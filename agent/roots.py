"""Folders that tools may touch. A path of a call lies in one of them, with every link followed, or the call is refused.

Names are no paths: builtin models and data, Hub ids, known verifiers and templates, ids of runs and jobs. A folder that a
call names is looked through for links that lead out of it. Who changes files between the look and the use is not kept out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.commands import Call
from agent.folder import RunFolder
from agent.handles import find_job
from agent.monitor import find_run
from agent.plan import home, read_plan
from agent.request import absolute, read_settings, where
from agent.verifying import verifier_file
from finetune.errors import FinetuneError, Problems
from finetune.rules import TASKS

_ALWAYS = ("init_adapter", "profile", "replay", "harness_program", "harness_config")
_NAME_OR_PATH = ("model", "domain", "chat_template")
_SOURCES = ("data", "eval_data", "tasks", "eval_tasks")
_WRITTEN = ("verifier_args", "vllm_args")  # name=value, where a value may be a path
_OPTIONS = ("to", "adapter", "prompts", "out")  # of verbs themselves
_BY_PLAN = ("resume", "evaluate", "generate", "export")  # verbs that work with the settings of a run's plan
_WEIGHT = re.compile(r":\d+(\.\d+)?$")
_MOST_ENTRIES = 100_000
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")  # what no path can hold
_LIKE_A_PATH = re.compile(r"(/|~|\.{1,2}(/|$)|.*/\.\.(/|$))\S*")


@dataclass(frozen=True)
class Roots:
    """The folders, as they are after every link; relative paths of a call begin at the first."""

    folders: tuple[Path, ...]

    @classmethod
    def of(cls, folders: Iterable[str | Path]) -> Roots:
        """Return the roots that folders make; raise FinetuneError(file_missing) where one is none."""
        found = [Path(os.path.realpath(os.path.expanduser(folder))) for folder in folders]
        for folder in found:
            if not folder.is_dir():
                raise FinetuneError("file_missing", f"root: {folder} is no folder", setting="root")
        return cls(tuple(dict.fromkeys(found)))

    @property
    def first(self) -> Path:
        return self.folders[0]

    def hold(self, path: str | Path) -> bool:
        """Whether a path, of a file that is there or is to be, lies in a root after every link."""
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(folder) for folder in self.folders)

    def problem(self, name: str, path: str | Path) -> FinetuneError | None:
        """Return why a path may not be touched: it leads out of the roots, something in that folder does, or it is a pipe."""
        if _UNUSABLE.search(str(path)):
            text = f"{name}: holds a character that no path can hold"
            return FinetuneError("bad_path", text, setting=name)
        out = path if not self.hold(path) else next(self._leading_out(path), None)
        if out is None:
            # Reading a pipe or a device may never end.
            is_usual = not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path)
            text = f"{name}: {path} is neither a file nor a folder"
            return None if is_usual else FinetuneError("bad_path", text, setting=name, path=str(path))
        inside = "" if out == path else f", in which {Path(out).name} leads elsewhere,"
        text = f"{name}: {path}{inside} is outside the folders that this server may touch"
        return FinetuneError(
            "path_outside_roots", text, setting=name, roots=[str(folder) for folder in self.folders]
        )

    def _leading_out(self, folder: str | Path) -> Iterator[str]:
        """Yield the links in a folder that lead out of the roots, also those behind links that stay inside; in a folder
        that is too full to look through it yields any entry.
        """
        seen, known = 0, set()
        for place, folders, files in os.walk(folder, followlinks=True):
            if (real := os.path.realpath(place)) in known:  # by a link that leads back
                folders.clear()
                continue
            known.add(real)
            for name in (*folders, *files):
                path = os.path.join(place, name)
                seen += 1
                if seen > _MOST_ENTRIES or (os.path.islink(path) and not self.hold(path)):
                    yield path


def refuse_outside(call: Call, roots: Roots) -> None:
    """Raise Problems with every path of a call that lies outside the roots; its config file was looked at before it was read."""
    options, cwd = call.options, call.context.cwd
    named = [(name, absolute(path, cwd)) for name, path in _of_options(call)]
    config = call.settings.get("config")
    named += _paths_of(call.settings, cwd)
    refuse_paths(named, roots)
    if isinstance(config, str):
        refuse_paths(_paths_of(read_settings(config, cwd, []), cwd), roots)
    for name in _runs_of(options):
        _check_run(name, call, roots)
    if isinstance(plan_id := getattr(options, "plan", None), str):
        name = f"{os.path.basename(plan_id)}.json"
        _check_plan(home(call.context.machine.environ) / "plans" / name, cwd, roots)
    if (text := getattr(options, "what", None)) is not None:
        if _is_path(text, cwd):
            refuse_paths([("what", absolute(text, cwd))], roots)
        elif "/" not in text:  # perhaps the id of a run
            _check_run(text, call, roots)


def _of_options(call: Call) -> list[tuple[str, str]]:
    """Return the paths that flags of the verb itself name; the settings lie in the same namespace."""
    found = [(name, getattr(call.options, name, None)) for name in _OPTIONS if name not in call.settings]
    return [(name, path) for name, path in found if isinstance(path, str)]


def _runs_of(options: Any) -> list[str]:
    """Return the runs that a verb names."""
    given = getattr(options, "run", None)
    return [given] if isinstance(given, str) else list(given or [])


def refuse_paths(named: Iterable[tuple[str, str]], roots: Roots) -> None:
    problems = [problem for name, path in named if (problem := roots.problem(name, path))]
    if problems:
        raise Problems(problems)


def _is_path(text: str, cwd: Path) -> bool:
    """Whether a text is a path or looks like one; whether it is there decides nothing outside the roots."""
    return bool(_LIKE_A_PATH.fullmatch(text)) or os.path.lexists(absolute(text, cwd))


def _check_run(name: str, call: Call, roots: Roots) -> None:
    """Refuse a run whose folder, or whose plan's paths where the verb follows them, lie outside; a job that began there."""
    cwd, environ = call.context.cwd, call.context.machine.environ
    if _is_path(name, cwd) or "/" in name:
        refuse_paths([("run", absolute(name, cwd))], roots)
    if (job := find_job(name, environ)) and not roots.hold(job.request.get("cwd") or "/"):
        text = f"run: the job {name} was started outside the folders that this server may touch"
        folders = [str(folder) for folder in roots.folders]
        raise FinetuneError("path_outside_roots", text, setting="run", roots=folders)
    try:
        folder = find_run(name, cwd, environ).path
    except FinetuneError:  # a job, or nothing: the verb says which
        return
    refuse_paths([("run", str(folder))], roots)
    if call.verb in _BY_PLAN:
        _check_plan(RunFolder(folder).plan, cwd, roots)


def _check_plan(file: Path, cwd: Path, roots: Roots) -> None:
    try:
        plan = read_plan(file)
    except FinetuneError:  # no plan of ours: the verb says so
        return
    if plan is not None:
        values = {name: setting["value"] for name, setting in plan["settings"].items()}
        refuse_paths(_paths_of(values, cwd), roots)


def _paths_of(settings: Mapping[str, Any], cwd: Path) -> list[tuple[str, str]]:
    """Return the paths in settings, absolute; values of a wrong kind are left to the check of the settings."""
    found = [(name, absolute(value, cwd)) for name in _ALWAYS for value in _texts(settings.get(name))]
    for name in (*_NAME_OR_PATH, *_SOURCES):
        found += [(name, path) for value in _texts(settings.get(name)) if (path := _path_in(value, cwd))]
    for name in _WRITTEN:
        values = [value.partition("=")[2] for value in _texts(settings.get(name))]
        found += [(name, path) for value in values if (path := _path_in(value, cwd))]
    files = [verifier_file(value) for value in _texts(settings.get("verifier"))]
    found += [("verifier", absolute(own.file, cwd)) for own in files if own]
    found += [
        ("vllm_python", absolute(value, cwd)) for value in _texts(settings.get("vllm_python")) if "/" in value
    ]
    out = settings.get("out", "auto")
    return [*found, ("out", absolute("runs" if out == "auto" else str(out), cwd))]


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, str) and item]


def _path_in(text: str, cwd: Path) -> str | None:
    """Return the path that a source names, without its weight; None for a name (builtin:..., a Hub id)."""
    text = text.removeprefix(TASKS)
    found = where(text, cwd)
    if not os.path.isabs(found):
        if ".." not in text.split("/"):
            return None
        found = absolute(text, cwd)
    return found if os.path.lexists(found) else _WEIGHT.sub("", found)
