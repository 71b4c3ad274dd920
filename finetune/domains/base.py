"""What a domain says of its rows, and how a user's own domain is loaded.

Rule: a domain is four functions (row -> conversation, how rows split, how an answer scores, which metrics are
reported) and its code is foreign: whatever it raises, returns or fails to finish has a type here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.data.conversation import Conversation
from finetune.data.split import held_out
from finetune.data.template import time_limit
from finetune.errors import FinetuneError, boundary
from finetune.records import Row

Values = dict[str, Any]
Score = Callable[[Values, str], float | None]
Split = Callable[[Sequence[Row], float, int], tuple[list[int], list[int]]]
VERIFIER_SECONDS = 10.0
_NAMES = ("conversation", "split", "score", "metrics")


@dataclass(frozen=True)
class Domain:
    """score is None where no verifier exists; it returns a finite number, or None for an answer it cannot score.

    digest changes when the meaning of the domain does: it is part of what prepared data are keyed by.
    """

    name: str
    conversation: Callable[[Row], Conversation]
    split: Split
    score: Score | None
    metrics: Callable[[Sequence[float | None]], dict[str, float]]
    digest: str

    @property
    def has_verifier(self) -> bool:
        return self.score is not None


def prompt_key(conversation: Conversation) -> str:
    """Return what a conversation asks, spaces evened out: all turns before the first answer, or the prompt, or the text."""
    if conversation.form == "chat":
        roles = [turn["role"] for turn in conversation.messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        asked = [[turn["role"], turn.get("content") or ""] for turn in conversation.messages[:first]]
        return " ".join(json.dumps(asked, ensure_ascii=False).split())
    asked_text = conversation.text if conversation.text is not None else conversation.prompt
    return " ".join((asked_text or "").split())


def split_by_prompt(conversation: Callable[[Row], Conversation]) -> Split:
    """Return a split that keeps rows with an equal prompt on one side."""
    return lambda rows, fraction, seed: held_out(
        rows, fraction, seed, lambda row: prompt_key(conversation(row))
    )


def mean_metrics(scores: Sequence[float | None]) -> dict[str, float]:
    """Return accuracy (the mean over scorable answers), num_scored and num_unscorable."""
    known = [score for score in scores if score is not None]
    counts = {"num_scored": float(len(known)), "num_unscorable": float(len(scores) - len(known))}
    return {"accuracy": math.fsum(known) / len(known)} | counts if known else counts


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
    return Domain(path.stem, conversation, split, score, metrics, hashlib.sha256(source).hexdigest())


def limited_score(score: Score, where: str, seconds: float = VERIFIER_SECONDS) -> Score:
    """Return a verifier that must finish in time and give a finite number or None.

    An answer on which it does not finish is unscorable (None), not wrong; an exception or another value is bad_domain.
    """

    def checked(row: Values, completion: str) -> float | None:
        try:
            with (
                time_limit(seconds, "bad_domain", f"{where}: score()"),
                boundary("bad_domain", f"{where}: score()"),
            ):
                value = score(row, completion)
        except FinetuneError as error:
            if "seconds" in error.evidence:
                return None
            raise
        if value is None:
            return None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise FinetuneError(
                "bad_domain", f"{where}: score() gave {value!r}, neither a finite number nor None"
            )
        return float(value)

    return checked


def _imported(path: Path, where: str) -> ModuleType:
    with boundary("bad_domain", where):
        spec = importlib.util.spec_from_file_location(f"finetune_domain_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ImportError("not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _as_conversation(value: Any) -> Conversation:
    if isinstance(value, Conversation):
        return value
    return Conversation(**value) if isinstance(value, dict) else Conversation(list(value))
