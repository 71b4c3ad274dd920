"""What a domain says of its rows.

Rule: a domain is four functions (row -> conversation, how rows split, how an answer scores, which metrics are
reported) and its code is foreign: whatever it raises, returns or fails to finish has a type here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Domain:
    """score is None where no verifier exists; it returns a finite number, or None for an answer it cannot score.

    digest changes when the meaning of the domain does: it is part of what prepared data are keyed by. file is where a
    user's own domain stands, so that another process can load it too.
    """

    name: str
    conversation: Callable[[Row], Conversation]
    split: Split
    score: Score | None
    metrics: Callable[[Sequence[float | None]], dict[str, float]]
    digest: str
    file: str | None = None

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
