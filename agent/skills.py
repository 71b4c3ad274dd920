"""The skills that ship with this program, and putting them where an agent program looks for them.

A skill folder is copied whole, without its evals, and works where it lies: scripts/run.py finds the command again, last of
all by what is noted beside it. Nothing that holds other content is replaced unless that is asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent.render import Answer
from agent.request import absolute
from agent.runner import Context
from agent.standing import our_command
from agent.system import SOURCE_ROOT
from finetune.errors import FinetuneError, Problems
from finetune.knobs import unknown_name

# In a checkout a link to skills/; in a wheel the folders themselves.
SKILLS = Path(__file__).with_name("skillset")
PLACES = {"agents": ".agents/skills", "claude": ".claude/skills"}
_NOT_COPIED = ("evals", "__pycache__")
_NOTE = "scripts/installed.json"  # where the command was when the skill was copied
_LISTED = 300  # characters of a description


@dataclass(frozen=True)
class Copy:
    """One skill on its way: state is installed, unchanged or replaced."""

    name: str
    source: Path
    target: Path
    state: str


def list_skills() -> Answer:
    """Name the skills that ship with this program, with what each is for."""
    rows = [
        {"name": name, "description": description_of(path)[:_LISTED], "path": str(path)}
        for name, path in shipped().items()
    ]
    install = [("copy them for your agent program", our_command("skills", "install"))]
    return Answer("skills", "done", f"{len(rows)} skills", data={"skills": rows}, next_actions=install)


def install(target: str, scope: str | None, names: list[str], force: bool, context: Context) -> Answer:
    """Copy skills to where an agent program looks for them; those that are there already are left as they are.

    Raises Problems(target_exists) naming every folder that holds something else, before anything is copied.
    """
    folder = folder_of(target, scope, context)
    copies = [_copy(name, source, folder / name) for name, source in chosen(names).items()]
    taken = [copy for copy in copies if copy.state == "replaced"]
    if taken and not force:
        text = "{} holds something else; --force replaces it"
        raise Problems(
            [
                FinetuneError("target_exists", text.format(copy.target), path=str(copy.target))
                for copy in taken
            ]
        )
    for copy in copies:
        if copy.state != "unchanged":
            _place(copy)
    return _installed(folder, copies)


def _installed(folder: Path, copies: list[Copy]) -> Answer:
    counts = {state: sum(copy.state == state for copy in copies) for state in dict.fromkeys(_states(copies))}
    found = ", ".join(f"{count} {state}" for state, count in counts.items())
    rows = [{"name": copy.name, "state": copy.state, "path": str(copy.target)} for copy in copies]
    files = [copy.target / "SKILL.md" for copy in copies]
    return Answer(
        "skills",
        "done",
        f"{len(copies)} skills in {folder}: {found}",
        data={"folder": str(folder), "skills": rows},
        next_actions=[("see what this machine offers", our_command("doctor"))],
        artifacts=[{"kind": "skill", "path": str(path), "sha256": _digest(path)} for path in files],
    )


def _states(copies: Iterable[Copy]) -> list[str]:
    return [copy.state for copy in copies]


def shipped() -> dict[str, Path]:
    """Return the folder of each skill by its name."""
    return {path.parent.name: path.parent for path in sorted(SKILLS.glob("*/SKILL.md"))}


def chosen(names: list[str]) -> dict[str, Path]:
    """Return the skills of these names, all where none is named; raise FinetuneError(bad_value) for one that is unknown."""
    known = shipped()
    for name in names:
        if name not in known:
            wrong = unknown_name(name, list(known)).replace("setting", "skill")
            raise FinetuneError("bad_value", f"name: {wrong}; there are: {', '.join(known)}", setting="name")
    return {name: known[name] for name in names or known}


def folder_of(target: str, scope: str | None, context: Context) -> Path:
    """Return the folder that a target means: that of an agent program in the project or of the user, or one given by its path.

    Raises FinetuneError(bad_value) for a word that is neither, and setting_without_effect for a scope beside a path.
    """
    if target in PLACES:
        root = "~" if scope == "user" else "."
        return Path(absolute(os.path.join(root, PLACES[target]), context.cwd))
    if os.sep not in target and not target.startswith(".") and not Path(context.cwd, target).is_dir():
        text = (
            f"target: {target!r} is none of {', '.join(PLACES)} and no path; a folder is given as ./{target}"
        )
        raise FinetuneError("bad_value", text, setting="target")
    if scope is not None:
        text = f"scope: {scope} means nothing beside a target that is a folder"
        raise FinetuneError("setting_without_effect", text, setting="scope")
    return Path(absolute(target, context.cwd))


def description_of(skill: Path) -> str:
    """Return the description in a skill's frontmatter."""
    front: Any = yaml.safe_load((skill / "SKILL.md").read_text(encoding="utf-8").split("\n---\n")[0])
    return str(front["description"])


def _copy(name: str, source: Path, target: Path) -> Copy:
    if not os.path.lexists(target):
        return Copy(name, source, target, "installed")
    is_same = target.is_dir() and (
        target.resolve() == source.resolve() or contents(target) == contents(source)
    )
    return Copy(name, source, target, "unchanged" if is_same else "replaced")


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a skill by its path, without what is not copied and what is noted at the copy."""
    found = {}
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if path.is_file() and not set(place.parts) & set(_NOT_COPIED) and place.as_posix() != _NOTE:
            found[place.as_posix()] = _digest(path)
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _place(copy: Copy) -> None:
    """Copy one skill beside its target, then give it its name; what stood there goes last."""
    copy.target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{copy.name}.", dir=copy.target.parent) as place:
        new, old = Path(place, "new"), Path(place, "old")
        shutil.copytree(copy.source, new, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        note = {"command": our_command(), "source": str(SOURCE_ROOT)}
        (new / _NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
        if os.path.lexists(copy.target):
            os.rename(copy.target, old)  # of a link the link alone, never what it points to
        os.rename(new, copy.target)
