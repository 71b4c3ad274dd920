"""The domain of questions with a number as the answer.

Rule: the last number of a text is its answer, and it is compared exactly: 1,000.50 is 2001/2; 50% is 0.5, or the 50
of a question that asks for percent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from finetune.data.conversation import Conversation
from finetune.domains.base import Domain, Values, mean_metrics, split_by_prompt
from finetune.domains.text import as_text
from finetune.errors import FinetuneError
from finetune.records import Row

# A sign counts only where nothing stands before it that it could be subtracted from: "5-3" ends in 3, "is -3" in -3.
_START = r"(?:(?<![\w.)])[-+\u2212]|(?<![\w.]))\$?"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_EXPONENT = r"(?:[eE][-+]?\d{1,3}(?![\w.]))?"
_NUMBER = re.compile(
    rf"(?P<number>{_START}(?:{_DIGITS}){_EXPONENT})(?:\s?/\s?(?P<below>\d+(?:\.\d+)?))?(?P<percent>\s?\\?%)?"
)
# \frac{3}{4} is 3/4, and 2\frac{3}{4} is 11/4.
_FRACTION = re.compile(
    r"(?:(?<![\w.,/])(?P<whole>\d{1,15})\s*)?\\[dt]?frac\s*\{\s*(?P<above>-?\d[\d.]*)\s*\}\s*\{\s*(?P<below>\d[\d.]*)\s*\}"
)
_MARKED = "####"


def math_domain() -> Domain:
    """Return the domain of rows with prompt (or question) and answer; the whole answer is learned, its number scores."""
    return Domain("math", conversation, split_by_prompt(conversation), score, mean_metrics, "math:1")


def conversation(row: Row) -> Conversation:
    """Return the question and the answer as the two turns of a conversation; raises unknown_columns and bad_row."""
    asked, answer = _columns(row.values)
    return Conversation([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}])


def score(row: Values, completion: str) -> float | None:
    """Return 1 where the completion's number is the answer's, else 0; None where the row's answer has no number."""
    expected, given = last_number(_columns(row)[1]), last_number(completion)
    if expected is None:
        return None
    return float(given is not None and is_equal(expected, given))


@dataclass(frozen=True)
class Number:
    """A number as it is written: 50 % is value 50 with is_percent."""

    value: Fraction
    is_percent: bool = False


def last_number(text: str) -> Number | None:
    """Return the number behind the last #### of the text, or the last number in it; None where there is none."""
    _, marked, tail = text.rpartition(_MARKED)
    numbers = list(_NUMBER.finditer(_FRACTION.sub(_written_plainly, tail)))
    if not numbers:
        return None
    match = numbers[0] if marked else numbers[-1]
    value = Fraction(match["number"].replace(",", "").replace("$", "").replace("\u2212", "-"))
    if match["below"] and Fraction(match["below"]):
        value /= Fraction(match["below"])
    return Number(value, bool(match["percent"]))


def _written_plainly(match: re.Match[str]) -> str:
    whole, above, below = match["whole"], match["above"], match["below"]
    if whole is not None:
        is_mixed = above.isdigit() and below.isdigit()
        return f"{int(whole) * int(below) + int(above)}/{below} " if is_mixed else f"{whole} {above}/{below} "
    before = match.string[: match.start()][-1:]
    return f"{' ' if before.isalnum() else ''}{above}/{below} "


def is_equal(expected: Number, given: Number, tolerance: Fraction = Fraction(0)) -> bool:
    """Return whether |given - expected| <= tolerance * max(1, |expected|); no tolerance compares exactly.

    Where only one side has a percent sign, it may be the unit that the question asks for, or a hundredth.
    """
    if expected.is_percent == given.is_percent:
        return _is_close(expected.value, given.value, tolerance)
    if expected.is_percent:
        meant = (expected.value, expected.value / 100)
        return any(_is_close(value, given.value, tolerance) for value in meant)
    return any(_is_close(expected.value, value, tolerance) for value in (given.value, given.value / 100))


def _is_close(expected: Fraction, given: Fraction, tolerance: Fraction) -> bool:
    return abs(given - expected) <= tolerance * max(Fraction(1), abs(expected))


def _columns(values: Values) -> tuple[str, str]:
    asked: Any = next((values[name] for name in ("prompt", "question") if values.get(name) is not None), None)
    answer = values.get("answer")
    if asked is None or answer is None:
        text = f"a row of domain math needs prompt (or question) and answer; its columns are {', '.join(values) or 'none'}"
        raise FinetuneError("unknown_columns", text, columns_found=list(values))
    return as_text(asked, "prompt"), as_text(answer, "answer")
