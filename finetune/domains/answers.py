"""The verifiers that are built in: each makes, of its options, a function that scores one completion of one row.

Rule: 1 is right and 0 is wrong; None where the row's own answer cannot be compared with. What an answer says in a form
that cannot be read is a wrong answer, while a row that lacks what is needed is an error.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from finetune.data.formats import parsed_json
from finetune.domains.base import Score, Values
from finetune.domains.math import is_equal, last_number
from finetune.domains.python_tests import OPTIONS as PYTHON_OPTIONS
from finetune.domains.python_tests import python_tests_score
from finetune.domains.reasoning import reasoning_score
from finetune.domains.text import as_text
from finetune.errors import FinetuneError, boundary

Options = dict[str, str]
_FENCED = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)```", re.DOTALL)
_CHOICE_SAID = re.compile(
    r"(?:\\boxed\{\s*(?:\\text\{)?|<answer>|(?:answer|choice|option)(?:\s+is)?\s*:?)[\s*(\[\"']*([A-Z])(?![\w'])",
    re.IGNORECASE,
)
_CHOICE_SHOWN = re.compile(r"(?:^|\n)\s*[*(\[]*([A-Z])[*)\].:,]*(?=\s|$)|\(([A-Z])\)|\*\*([A-Z])[.:)]?\*\*")


@dataclass(frozen=True)
class Builtin:
    """A built-in verifier: how it is made, which options it reads, and what it takes to be a right answer of a row.

    right is None where no row tells: then its values alone can be checked. timed: it limits the time of what it runs
    itself, and is told the limit as the option `seconds`.
    """

    make: Callable[[Options], Score]
    options: tuple[str, ...] = ("column",)
    right: Callable[[Values, Options], str | None] | None = None
    package: str | None = None
    timed: bool = False


def answer_of(values: Values, options: Options) -> str:
    """Return the row's answer as text; raises unknown_columns where it has none and bad_row where it is no text."""
    column = options.get("column", "answer")
    if values.get(column) is None:
        text = f"the row has no {column} to compare with; its columns are {', '.join(values) or 'none'}"
        raise FinetuneError("unknown_columns", text, columns_found=list(values))
    return as_text(values[column], column)


def _known_answer(values: Values, options: Options) -> str | None:
    return None if values.get(options.get("column", "answer")) is None else answer_of(values, options)


def _exact(options: Options) -> Score:
    """The whole completion is the answer, white space at both ends aside."""
    return lambda values, completion: float(completion.strip() == answer_of(values, options).strip())


def _numeric(options: Options) -> Score:
    """The last number is the answer's, exactly or within a relative tolerance."""
    tolerance = _tolerance(options.get("tolerance", "0"))

    def score(values: Values, completion: str) -> float | None:
        expected, given = last_number(answer_of(values, options)), last_number(completion)
        if expected is None:
            return None
        return float(given is not None and is_equal(expected, given, tolerance))

    return score


def _tolerance(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if not 0 <= value < 1:
        raise _bad_option("tolerance", text, "a number from 0 to 1, as 1e-6")
    return value


def _regex(options: Options) -> Score:
    """The pattern is found; where it has a group `answer`, what this group matched last is the row's answer.

    ^ and $ are the ends of lines; a dot that shall match line ends too needs (?s) in front.
    """
    given = options.get("pattern")
    if given is not None:
        _compiled(given)

    def score(values: Values, completion: str) -> float:
        pattern = _compiled(given if given is not None else answer_of(values, {"column": "pattern"}))
        found = list(pattern.finditer(completion))
        if "answer" not in pattern.groupindex:
            return float(bool(found))
        expected = answer_of(values, options).strip()
        return float(bool(found) and (found[-1]["answer"] or "").strip() == expected)

    return score


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise _bad_option("pattern", pattern, f"a regular expression ({error})") from error


def _choice(options: Options) -> Score:
    """The letter chosen is that of the answer, which is a letter, or a place in or a text of the row's `choices`."""

    def score(values: Values, completion: str) -> float:
        return float(chosen_letter(completion) == right_letter(values, options))

    return score


def chosen_letter(completion: str) -> str | None:
    """Return the letter that a completion settles on: the last one said to be the answer, else the last one shown apart."""
    said = _CHOICE_SAID.findall(completion)
    shown = [next(filter(None, groups)) for groups in _CHOICE_SHOWN.findall(completion)]
    letters = said or shown
    return letters[-1].upper() if letters else None


def right_letter(values: Values, options: Options) -> str:
    """Return the letter of the row's answer; raises bad_row where its answer is none of the choices."""
    choices: Any = values.get("choices")
    answer = values.get(options.get("column", "answer"))
    if isinstance(choices, str):
        with boundary("bad_row", "choices"):
            choices = parsed_json(choices)
    if isinstance(choices, list):
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
            return chr(ord("A") + answer)
        if answer in choices:
            return chr(ord("A") + choices.index(answer))
    text = answer_of(values, options).strip().strip("().").upper()
    if not re.fullmatch("[A-Z]", text):
        raise FinetuneError("bad_row", f"the answer {text[:50]!r} is no letter and none of the row's choices")
    return text


def _json_schema(options: Options) -> Score:
    """The completion, or its last fenced block, is JSON that the schema allows; the schema is a file's or the row's."""
    import jsonschema
    import referencing

    fixed: Any = None
    if path := options.get("schema"):
        with boundary("file_missing", f"schema {path}"):
            text = Path(path).expanduser().read_text(encoding="utf-8")
        fixed = _schema(text, path)

    def score(values: Values, completion: str) -> float:
        schema = fixed if fixed is not None else _schema(values.get("schema"), "the row's schema")
        blocks = _FENCED.findall(completion)
        try:
            value = parsed_json(blocks[-1] if blocks else completion)
        except ValueError:
            return 0.0
        # An empty registry: a $ref to somewhere else is never fetched.
        validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
        return float(validator.is_valid(value))

    return score


def _schema(value: Any, where: str) -> Any:
    if value is None:
        text = f"{where} is missing: give --verifier-args schema=FILE, or rows a column schema"
        raise FinetuneError("unknown_columns", text)
    import jsonschema

    with boundary("bad_row", where):
        schema = parsed_json(value) if isinstance(value, str) else value
        jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def _math(options: Options) -> Score:
    """The mathematical expression that the completion ends in equals the answer's, by math-verify.

    Its own time limits are off, for they make a wrong answer of one that could not be judged; ours lose the answer.
    An answer that is not understood is wrong; an exception of the comparison is an error.
    """
    from math_verify import parse, verify

    def score(values: Values, completion: str) -> float | None:
        text = answer_of(values, options)
        is_marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        expected = parse(text if is_marked else f"${text}$", parsing_timeout=None)
        if not expected:
            return None
        given = parse(completion, parsing_timeout=None)
        return float(bool(given) and verify(expected, given, timeout_seconds=None, raise_on_error=True))

    return score


def _math_right(values: Values, options: Options) -> str | None:
    text = _known_answer(values, options)
    return text if text is None or "\\boxed" in text else f"\\boxed{{{text.strip('$')}}}"


def _solution(values: Values, options: Options) -> str | None:
    return None if values.get("solution") is None else as_text(values["solution"], "solution")


def _tagged(values: Values, options: Options) -> str | None:
    text = _known_answer(values, options)
    return None if text is None else f"<answer>{text}</answer>"


BUILTINS: dict[str, Builtin] = {
    "exact": Builtin(_exact, right=_known_answer),
    "numeric": Builtin(_numeric, ("column", "tolerance"), _known_answer),
    "regex": Builtin(_regex, ("column", "pattern")),
    "choice": Builtin(
        _choice, right=lambda values, options: f"The answer is ({right_letter(values, options)})."
    ),
    "json-schema": Builtin(_json_schema, ("schema",)),
    "math": Builtin(_math, right=_math_right, package="math_verify"),
    "python-tests": Builtin(python_tests_score, PYTHON_OPTIONS, _solution, timed=True),
    "reasoning-gym": Builtin(lambda options: reasoning_score, (), _tagged, package="reasoning_gym"),
}


def checked_package(name: str) -> None:
    """Raise missing_package where a built-in verifier stands on a package that is not installed."""
    package = BUILTINS[name].package
    if package is not None and importlib.util.find_spec(package) is None:
        distribution = package.replace("_", "-")
        text = (
            f"the verifier {name} needs the package {distribution}: pip install 'finetune-skills[verifiers]'"
        )
        raise FinetuneError("missing_package", text, package=distribution)


def _bad_option(name: str, value: str, wanted: str) -> FinetuneError:
    return FinetuneError(
        "bad_value", f"verifier_args: {name}: {value!r} is not {wanted}", setting="verifier_args"
    )
