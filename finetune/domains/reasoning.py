"""The domain of puzzles of the package reasoning-gym, which scores the answers itself, some with part of a point.

Rule: the answer is what stands between the last <answer> and </answer>, or the whole completion where there are none.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from finetune.data.conversation import Conversation
from finetune.data.reasoning import entry_of
from finetune.domains.base import Domain, Values, mean_metrics, split_by_prompt
from finetune.domains.text import as_text
from finetune.errors import FinetuneError, boundary
from finetune.records import Row

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_domain() -> Domain:
    """Return the domain of rows of builtin:reasoning-gym/TASK."""
    return Domain(
        "reasoning-gym",
        conversation,
        split_by_prompt(conversation),
        reasoning_score,
        mean_metrics,
        "reasoning-gym:1",
    )


def conversation(row: Row) -> Conversation:
    """Return the puzzle and, where the task tells one, its answer as the turns of a conversation."""
    if row.values.get("prompt") is None:
        raise FinetuneError(
            "unknown_columns", "a row of domain reasoning-gym needs prompt", columns_found=list(row.values)
        )
    turns = [{"role": "user", "content": as_text(row.values["prompt"], "prompt")}]
    if row.values.get("answer") is not None:
        turns.append({"role": "assistant", "content": as_text(row.values["answer"], "answer")})
    return Conversation(turns)


def reasoning_score(values: Values, completion: str) -> float:
    """Return what the task's own scorer gives, 0 to 1.

    Some scorers raise on an answer of another form. Where the puzzle's own answer is scored, such an answer is wrong;
    where that raises too, so does this.
    """
    task, text = values.get("task"), values.get("entry")
    if not isinstance(task, str) or not isinstance(text, str):
        raise FinetuneError(
            "unknown_columns", "the rows are none of builtin:reasoning-gym/TASK", columns_found=list(values)
        )
    with boundary("bad_row", "entry"):
        entry = entry_of(text)
    scorer = _scorer(task, values.get("config") or "{}")
    tagged = _TAGGED.findall(completion)
    with boundary("bad_verifier", f"reasoning-gym/{task}"):
        return float(_scored(scorer, tagged[-1] if tagged else completion, entry))


def _scored(scorer: Any, answer: str, entry: dict[str, Any]) -> float:
    try:
        return scorer(answer=answer.strip(), entry=entry)
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        if entry["answer"] is None:
            raise
        scorer(answer=entry["answer"], entry=entry)
        return 0.0


@functools.lru_cache(maxsize=64)
def _scorer(task: str, config: str) -> Any:
    import reasoning_gym

    with boundary("bad_row", f"reasoning-gym/{task}"):
        return reasoning_gym.create_dataset(task, **json.loads(config)).score_answer
