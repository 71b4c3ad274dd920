"""Whether a verifier can be trusted with a run: it is asked about answers whose worth is known; and the file to start from.

Rule: a verifier that does not tell a right answer from a wrong, an empty and a broken one would teach nothing, or the
wrong thing, for hours; it is refused before the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.domains.answers import BUILTINS
from finetune.domains.verifiers import Answer, Reward, VerifierSet
from finetune.errors import FinetuneError

KINDS = ("right", "wrong", "empty", "malformed")
_MALFORMED = 'NaN }{[(\\frac{<answer>\n```python\ndef ("\x00\ufffd'
_ELSE = ("no answer at all", "1234567.25", "raise SystemExit(1)")
# How an answer may have to be written for a user's function to see it, where only the bare answer is known.
_WRITTEN = (
    "{}",
    "The answer is {}.",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "#### {}",
    "```python\n{}\n```",
)


@dataclass(frozen=True)
class SelfCheck:
    """What verifiers gave on answers whose worth is known.

    scores: verifier -> kind of answer (KINDS) -> mean over the rows asked, None where none was scorable. unchecked:
    verifiers of which no right answer is known, so that only the form of their values was checked: what the warning
    verifier_not_checked is about.
    """

    scores: dict[str, dict[str, float | None]]
    unchecked: list[str] = field(default_factory=list)


def self_check(verifiers: VerifierSet, rows: Sequence[Answer], limit: int = 4) -> SelfCheck:
    """Score right, wrong, empty and malformed answers to the first `limit` rows (their completions are not read).

    The right answer is what right(row) of the user's file returns, else the row's answer (solution for python-tests);
    a wrong one is another row's right answer. Raises blind_verifier where a right answer is worth no more than another
    on average, or a value is not finite, and bad_verifier where a verifier raises, dies or does not end.
    """
    asked = list(rows)[:limit]
    if not asked:
        raise FinetuneError("no_rows", "verifier: there is no row to check it with")
    checks = [_Check(verifiers, place, asked) for place in range(len(verifiers.names))]
    result = SelfCheck({check.name: check.scores() for check in checks})
    seeing = [check for check in checks if check.is_known and not check.blind_to(result.scores[check.name])]
    for check in checks:
        # A function that looks at something else than the answer may stand beside a verifier of the answer.
        if not check.is_known or (check.is_guessed and seeing and check not in seeing):
            result.unchecked.append(check.name)
        elif check not in seeing:
            raise check.refusal(result.scores[check.name])
    return result


class _Check:
    """The check of one verifier of a set."""

    def __init__(self, verifiers: VerifierSet, place: int, rows: Sequence[Answer]) -> None:
        self._verifiers, self._place, self._rows = verifiers, place, rows
        self.name = verifiers.names[place]
        self._sign = math.copysign(
            1.0, verifiers.weights[self.name]
        )  # a penalty is high where answers are bad
        self.is_guessed = False
        self._right = self._known()
        self.is_known = any(text is not None for text in self._right)

    def _known(self) -> list[str | None]:
        """Return a right answer of each row, or None; one that the row's answer gives is tried in several spellings."""
        source = self._verifiers.verifiers[self._place].source
        if self._verifiers.pool.kinds[self._place].has_right:
            return self._verifiers.right_answers(self._place, self._rows)
        if self.name not in BUILTINS:
            self.is_guessed = True
            return self._spelt("answer") or [_text(row.values.get("answer")) for row in self._rows]
        if (right := BUILTINS[self.name].right) is not None:
            return [right(row.values, source.options) for row in self._rows]
        return self._spelt(source.options.get("column", "answer")) or [None] * len(self._rows)

    def _spelt(self, column: str) -> list[str | None] | None:
        """Return the rows' answers in the spelling that the verifier thinks most of; None where it makes no difference."""
        bare = [_text(row.values.get(column)) for row in self._rows]
        most = self._mean([""] * len(bare)) or 0.0
        best: list[str | None] | None = None
        for form in _WRITTEN:
            spelt = [None if text is None else form.format(text) for text in bare]
            if (mean := self._mean(spelt)) is not None and mean > most:
                best, most = spelt, mean
        return best

    def scores(self) -> dict[str, float | None]:
        """Return the mean reward of each kind of answer; what is the right answer itself is asked as that alone."""
        texts: dict[str, Sequence[str | None]] = {
            "right": self._right,
            "wrong": [_other(text, self._right) for text in self._right],
            "empty": ["" if text != "" else None for text in self._right],
            "malformed": [_MALFORMED] * len(self._rows),
        }
        return {kind: self._mean(texts[kind]) for kind in KINDS}

    def _mean(self, texts: Sequence[str | None]) -> float | None:
        known = [reward.value for reward in self._asked(texts) if reward.value is not None]
        return self._sign * math.fsum(known) / len(known) if known else None

    def _asked(self, texts: Sequence[str | None]) -> list[Reward]:
        """Return the rewards of these answers by this verifier alone; raises where it gives none that counts."""
        answers = [
            replace(row, completion=text)
            for row, text in zip(self._rows, texts, strict=True)
            if text is not None
        ]
        rewards = self._verifiers.score_with(self._place, answers)
        for answer, reward in zip(answers, rewards, strict=True):
            shown = f"on the answer {answer.completion[:60]!r} to {answer.place or 'a row'}"
            if reward.status == "invalid":
                text = f"verifier {self.name} gave a reward that is not finite {shown}: {reward.error}"
                raise FinetuneError("blind_verifier", text, verifier=self.name)
            if reward.status in ("error", "timeout"):
                text = f"verifier {self.name} failed {shown}: {reward.error}"
                raise FinetuneError("bad_verifier", text, verifier=self.name)
        return rewards

    def blind_to(self, scores: dict[str, float | None]) -> list[str]:
        """Return the kinds of answers that are worth as much as right ones; all where no right one was scorable."""
        right = scores["right"]
        others = [kind for kind in KINDS if kind != "right"]
        if right is None:
            return others
        return [kind for kind in others if (score := scores[kind]) is not None and score >= right]

    def refusal(self, scores: dict[str, float | None]) -> FinetuneError:
        blind = self.blind_to(scores)
        shown = ", ".join(f"{kind} {score}" for kind, score in scores.items())
        example = next(text for text in self._right if text is not None)
        text = f"verifier {self.name} does not tell right from {', '.join(blind)} answers: it gave {shown}"
        return FinetuneError(
            "blind_verifier",
            f"{text} (taken as right: {example[:80]!r})",
            verifier=self.name,
            scores=scores,
            right=example[:500],
        )


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int | float) else None


def _other(right: str | None, all_right: Sequence[str | None]) -> str | None:
    """Return an answer that is wrong where `right` is right: another row's, else one that is right nowhere."""
    return next(text for text in (*all_right, *_ELSE) if text is not None and text != right)


SKELETON = '''"""A verifier: how good is a completion? Use it as --verifier THIS_FILE.py:score."""


def score(completion, row):
    """Return 1.0 for a right completion and 0.0 for a wrong one.

    It may also return any other finite number, a dict of named rewards, which are summed ({"answer": 1.0, "format":
    0.5}), or None where the completion cannot be judged: it is then left out of the training.

    Parameters are given by their names, take those that you need: completion (text), row (a dict of its columns),
    prompt (text, or a list of messages), stopped (False where the limit of tokens cut it), and any column of the row. A
    function with a parameter named completions is called once for all: completions, rows, prompts, stopped and columns
    are lists then, and it returns a list. It may be `async def`.

    It runs in a process of its own with a time limit and without most environment variables (let some through with
    --verifier-args env=NAME). What it starts and leaves running is ended after the call; start at import what is to stay.
    """
    words = completion.split()
    return float(bool(words) and words[-1].strip(".") == str(row["answer"]).strip())


def right(row):
    """Return a completion that deserves the full reward, or None; only used to check score() before a run."""
    return f"The answer is {row['answer']}."
'''


def skeleton() -> str:
    """Return the text of a user's verifier file, which works as it stands on rows with an answer."""
    return SKELETON
