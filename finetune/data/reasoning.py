"""The rows of builtin:reasoning-gym/TASK: puzzles that the package reasoning-gym makes, with what it needs to score answers.

Rule: the same name gives the same rows on every rank and every day, so the package runs in a process of its own with a
fixed hash seed (some of its tasks depend on it); no question stands twice, on one side or on both.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from finetune.boxes.launching import Limits
from finetune.boxes.process import ProcessBox, new_workspace, read_back
from finetune.errors import FinetuneError

PREFIX = "builtin:reasoning-gym/"
_EVAL = ":eval"
_SIZES = {"size": 500, "eval_size": 200}
_EVAL_SEED = (
    1_000_000  # puzzle i of seed s is drawn from s + i: the two sides must lie further apart than their sizes
)
_SECONDS = 300.0
_MAKER = """
import json, sys
told = json.loads(sys.argv[1])
def plain(value):
    if isinstance(value, dict):
        return {plain(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = set if isinstance(value, frozenset) else type(value) if type(value) in (list, tuple, set) else list
        return kind(map(plain, value))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value if value is None or type(value) in (bool, int, float, str) else str(value)
def made(size, seed, most, known):
    puzzles = reasoning_gym.create_dataset(told["task"], seed=seed, size=most, **told["config"])
    rows = []
    for place in range(most):
        entry = plain(puzzles[place])
        if len(rows) < size and entry["question"] not in known:
            known.add(entry["question"])
            answer = entry["answer"]
            rows.append([entry["question"], answer if answer is None else str(answer), repr(entry)])
        if len(rows) == size:
            break
    return rows
try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    if told["task"] not in DATASETS:
        result = {"tasks": sorted(DATASETS)}
    else:
        known = set()
        train = made(told["size"], told["seed"], told["size"], known)
        rows = made(told["eval_size"], told["eval_seed"], 4 * told["eval_size"], known) if told["eval"] else train
        result = {"rows": rows}
except Exception as error:
    result = {"error": f"{type(error).__name__}: {error}"}
with open("rows.json", "w") as file:
    json.dump(result, file)
"""


@dataclass(frozen=True)
class Puzzles:
    """What a name asks for: TASK[:eval][?size=N&eval_size=N&OPTION=VALUE], where an option is one of the task's config."""

    task: str
    is_eval: bool
    sizes: dict[str, int]
    config: dict[str, Any]


def is_reasoning(source: str) -> bool:
    """Return whether an entry of --data, without its weight, names puzzles of reasoning-gym."""
    return source.startswith(PREFIX)


def eval_side(source: str) -> str | None:
    """Return the name of the held-out side of a source; None where it is that side itself."""
    puzzles = puzzles_of(source)
    task, mark, query = source.removeprefix(PREFIX).partition("?")
    return None if puzzles.is_eval else f"{PREFIX}{task}{_EVAL}{mark}{query}"


def puzzles_of(source: str) -> Puzzles:
    """Read a name; raises bad_value."""
    task, _, query = source.removeprefix(PREFIX).partition("?")
    config: dict[str, Any] = {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}
    sizes = {name: config.pop(name, default) for name, default in _SIZES.items()}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _EVAL_SEED // 4:
            text = f"data: {source}: {name}={size} is no number from 1 to {_EVAL_SEED // 4}"
            raise FinetuneError("bad_value", text, setting="data")
    return Puzzles(task.removesuffix(_EVAL), task.endswith(_EVAL), sizes, config)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@functools.lru_cache(maxsize=8)  # a command reads its rows several times, and some puzzles take long to make
def _made(source: str) -> tuple[tuple[str, str | None, str], ...]:
    puzzles = puzzles_of(source)
    if importlib.util.find_spec("reasoning_gym") is None:
        text = f"data: {source} needs the package reasoning-gym: pip install 'finetune-skills[verifiers]'"
        raise FinetuneError("missing_package", text, package="reasoning-gym")
    told = puzzles.sizes | {"task": puzzles.task, "config": puzzles.config, "eval": puzzles.is_eval}
    told |= {"seed": 0, "eval_seed": _EVAL_SEED}
    command = [sys.executable, "-P", "-c", _MAKER, json.dumps(told)]
    limits = Limits(_SECONDS, memory_bytes=None, processes=None, file_bytes=None)
    with new_workspace({}) as workspace:
        ended = ProcessBox().run(command, workspace, limits, {"PYTHONHASHSEED": "0"})
        content = read_back(workspace, "rows.json", 1 << 30)
    if ended.timed_out:
        text = (
            f"data: {source}: not made within {_SECONDS:g} seconds; ask for fewer with ?size=100&eval_size=50"
        )
        raise FinetuneError("bad_value", text, setting="data")
    result: dict[str, Any] = json.loads(content) if content else {"error": ended.stderr[-500:]}
    if tasks := result.get("tasks"):
        close = difflib.get_close_matches(puzzles.task, tasks, n=1, cutoff=0.0)
        text = f"data: {source}: reasoning-gym has no such task; did you mean {close[0]}?"
        raise FinetuneError("bad_value", text, setting="data", tasks=tasks)
    if "error" in result:
        text = f"data: {source}: reasoning-gym cannot make these puzzles: {result['error']}"
        raise FinetuneError("bad_value", text, setting="data")
    return tuple((question, answer, entry) for question, answer, entry in result["rows"])


def reasoning_rows(source: str) -> list[dict[str, Any]]:
    """Return the rows of a name: prompt, answer (where the task has one), task, config and entry.

    500 rows to train on and 200 held out, unless the name says otherwise; fewer where the task has fewer questions.
    entry is the puzzle as Python text, for JSON would make lists of the tuples that some scorers compare with. Raises
    missing_package, and bad_value for an unknown task (with the nearest one) or option.
    """
    puzzles = puzzles_of(source)
    rows: list[dict[str, Any]] = []
    for question, answer, entry in _made(source):
        known = {} if answer is None else {"answer": answer}
        config = {"config": json.dumps(puzzles.config)} if puzzles.config else {}
        rows.append({"prompt": question, **known, "task": puzzles.task, **config, "entry": entry})
    return rows


def entry_of(text: str) -> dict[str, Any]:
    """Return the puzzle that a row's entry holds; raises ValueError."""
    entry = ast.literal_eval(text)
    if not isinstance(entry, dict):
        raise ValueError("an entry is a dict")
    return entry
