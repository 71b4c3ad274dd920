"""Which domains there are, the one that a run means, and how a user's own is loaded.

Rule: a domain from a file behaves like one of ours, or the error is bad_domain and names the function.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.data.conversation import Conversation
from finetune.data.reasoning import is_reasoning
from finetune.data.rows import ARITHMETIC_SIZES, source_name
from finetune.domains.base import Domain, limited_score
from finetune.domains.math import math_domain
from finetune.domains.reasoning import reasoning_domain
from finetune.domains.text import text_domain, tools_of, turns_of
from finetune.errors import FinetuneError, boundary
from finetune.records import Row

_NAMES = ("conversation", "split", "score", "metrics")


def load_domain(name: str, data: Sequence[str], data_format: str = "auto") -> Domain:
    """Return the domain that --domain names: text, math, reasoning-gym, a Python file, or auto.

    auto is math for builtin:arithmetic, reasoning-gym for builtin:reasoning-gym/TASK, and text for all else.
    data_format is read by the domain text alone; beside another it is an error.
    """
    if name == "auto":
        names = [source_name(source) for source in data]
        if names and all(source in ARITHMETIC_SIZES for source in names):
            name = "math"
        else:
            name = "reasoning-gym" if names and all(map(is_reasoning, names)) else "text"
    if name == "text":
        return text_domain(data_format)
    if data_format != "auto":
        text = f"data_format: has no effect with domain {name}, which reads rows in its own way; leave it out"
        raise FinetuneError("setting_without_effect", text, setting="data_format")
    if name == "math":
        return math_domain()
    if name == "reasoning-gym":
        return reasoning_domain()
    path = Path(name).expanduser().absolute()
    if path.suffix != ".py":
        text = f"domain: {name}: no such domain; there are auto, text, math, reasoning-gym, or give a Python file"
        raise FinetuneError("bad_value", text, setting="domain")
    return domain_from_file(path)


def domain_from_file(path: Path) -> Domain:
    """Load a user's domain: a Python file with conversation(row), split(rows, fraction, seed), score(row, completion)
    and metrics(scores), where a row is a dict of its columns.

    conversation returns a Conversation, a list of messages, or a dict of Conversation's fields. Raises bad_domain.
    """
    where = f"domain {path}"
    with boundary("file_missing", where):
        source = path.read_bytes()
    module = _imported(path, where)
    if missing := [name for name in _NAMES if not callable(getattr(module, name, None))]:
        raise FinetuneError(
            "bad_domain", f"{where}: it has no function {', '.join(missing)}", missing=missing
        )

    def conversation(row: Row) -> Conversation:
        with boundary("bad_domain", f"{where}: conversation() of {row.place}"):
            return _as_conversation(module.conversation(row.values))

    def split(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[int], list[int]]:
        with boundary("bad_domain", f"{where}: split()"):
            train, held = module.split([row.values for row in rows], fraction, seed)
            if sorted([*train, *held]) != list(range(len(rows))):
                raise ValueError("it must return two lists of places in which each row stands once")
            return sorted(train), sorted(held)

    def metrics(scores: Sequence[float | None]) -> dict[str, float]:
        with boundary("bad_domain", f"{where}: metrics()"):
            return {str(name): float(value) for name, value in module.metrics(list(scores)).items()}

    score = limited_score(module.score, where)
    digest = hashlib.sha256(source).hexdigest()
    return Domain(path.stem, conversation, split, score, metrics, digest, str(path))


def _imported(path: Path, where: str) -> ModuleType:
    with boundary("bad_domain", where):
        spec = importlib.util.spec_from_file_location(f"finetune_domain_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ImportError("not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _as_conversation(value: Any) -> Conversation:
    """Return what a user's conversation() gave, its turns in the shape that templates get."""
    if not isinstance(value, Conversation):
        value = Conversation(**value) if isinstance(value, dict) else Conversation(list(value))
    return replace(value, messages=turns_of(value.messages, "messages"), tools=tools_of(value.tools))
