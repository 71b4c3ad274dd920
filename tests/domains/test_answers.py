"""The built-in verifiers on answers as models write them."""

import json

import pytest

from finetune.domains.answers import BUILTINS, chosen_letter, right_letter
from finetune.errors import FinetuneError


def score(name, answer, completion, **options):
    return BUILTINS[name].make(options)({"answer": answer}, completion)


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("Paris", " Paris\n", 1.0),
        ("Paris", "paris", 0.0),
        ("Paris", "It is Paris", 0.0),
        (5, "5", 1.0),
        ("", "", 1.0),
    ],
)
def test_exact(answer, completion, expected):
    assert score("exact", answer, completion) == expected


@pytest.mark.parametrize(
    ("answer", "completion", "tolerance", "expected"),
    [
        ("5", "First 4, then 5.", "0", 1.0),
        ("5", "5 and then 4", "0", 0.0),
        ("1000.5", "It costs $1,000.50", "0", 1.0),
        ("0.75", "3/4", "0", 1.0),
        ("0.75", "so it is \\frac{3}{4}", "0", 1.0),
        ("4", "so it is \\frac{3}{4}", "0", 0.0),
        ("-0.5", "\\(-\\dfrac{1}{2}\\)", "0", 1.0),
        ("2.75", "2\\frac{3}{4}", "0", 1.0),
        ("0.75", "x = 2 \\frac{3}{4}", "0", 0.0),
        ("0.75", "x2\\frac{3}{4}", "0", 1.0),
        ("0.5", "\\frac{1.5}{3}", "0", 1.0),
        ("25%", "a quarter, 25", "0", 1.0),
        ("0.25", "25%", "0", 1.0),
        ("0.25", "2500", "0", 0.0),
        ("100000", "1e5", "0", 1.0),
        ("100000", "1.0E+5", "0", 1.0),
        ("5", "1e5", "0", 0.0),
        ("3.14159", "3.1416", "0", 0.0),
        ("3.14159", "3.1416", "1e-5", 1.0),
        ("1000", "1009", "0.01", 1.0),
        ("1000", "1011", "0.01", 0.0),
        ("0", "0.009", "0.01", 1.0),
        ("5", "no number", "0", 0.0),
        ("5", "", "0", 0.0),
        ("none", "5", "0", None),
    ],
)
def test_numeric(answer, completion, tolerance, expected):
    assert score("numeric", answer, completion, tolerance=tolerance) == expected


@pytest.mark.parametrize("tolerance", ["x", "-1", "1", "nan", "inf", "1/0"])
def test_a_tolerance_is_a_number_below_1(tolerance):
    with pytest.raises(FinetuneError) as caught:
        BUILTINS["numeric"].make({"tolerance": tolerance})
    assert caught.value.code == "bad_value"


@pytest.mark.parametrize(
    ("pattern", "completion", "expected"),
    [
        (r"(?s)<think>.*</think>", "<think>a\nb</think>c", 1.0),
        (r"<think>.*</think>", "<think>", 0.0),
        (r"^Answer: (?P<answer>.+)$", "Answer: 4\nno,\nAnswer:  5 ", 1.0),
        (r"^Answer: (?P<answer>\S+)$", "Answer: 5\nno,\nAnswer: 4", 0.0),
        (r"^Answer: (?P<answer>\S+)$", "5", 0.0),
    ],
)
def test_regex(pattern, completion, expected):
    assert score("regex", "5", completion, pattern=pattern) == expected
    assert BUILTINS["regex"].make({})({"answer": "5", "pattern": pattern}, completion) == expected


def test_a_pattern_that_is_none():
    with pytest.raises(FinetuneError) as caught:
        BUILTINS["regex"].make({"pattern": "("})
    assert caught.value.code == "bad_value"


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("C", "C"),
        ("(c)", None),
        ("The answer is C.", "C"),
        ("the answer is (b)", "B"),
        ("Answer: **D**", "D"),
        ("A is wrong, so the correct choice is B.", "B"),
        ("First I thought the answer is A. No: the answer is D.", "D"),
        ("\\boxed{B}", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("<answer>A</answer>", "A"),
        ("B) the second one", "B"),
        ("It follows that (A) fails and (D) holds", "D"),
        ("A dog barks", "A"),
        ("The dog barks", None),
        ("The answer is unclear", None),
        ("", None),
    ],
)
def test_the_letter_that_is_chosen(completion, letter):
    assert chosen_letter(completion) == letter


@pytest.mark.parametrize(
    ("values", "letter"),
    [
        ({"answer": "B"}, "B"),
        ({"answer": "(b)."}, "B"),
        ({"answer": 1, "choices": ["x", "y"]}, "B"),
        ({"answer": "y", "choices": ["x", "y"]}, "B"),
        ({"answer": "y", "choices": '["x", "y"]'}, "B"),
    ],
)
def test_the_letter_of_the_answer(values, letter):
    assert right_letter(values, {}) == letter
    assert BUILTINS["choice"].make({})(values, f"The answer is {letter}") == 1.0
    assert BUILTINS["choice"].make({})(values, "The answer is C") == 0.0


def test_an_answer_that_is_none_of_the_choices():
    with pytest.raises(FinetuneError) as caught:
        right_letter({"answer": "z", "choices": ["x", "y"]} | {"answer": "zz"}, {})
    assert caught.value.code == "bad_row"


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"a": 1}', 1.0),
        ('Here:\n```json\n{"a": 1}\n```\nDone.', 1.0),
        ('```\n{"a": 1}\n```\n```json\n{"a": "x"}\n```', 0.0),
        ('{"a": "x"}', 0.0),
        ('{"a": 1} and more', 0.0),
        ('{"a": NaN}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_schema(completion, expected, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    assert BUILTINS["json-schema"].make({"schema": str(path)})({}, completion) == expected
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert BUILTINS["json-schema"].make({})({"schema": schema}, completion) == expected


def test_a_schema_that_is_missing_or_none(tmp_path):
    for values, code in (({}, "unknown_columns"), ({"schema": {"type": 3}}, "bad_row")):
        with pytest.raises(FinetuneError) as caught:
            BUILTINS["json-schema"].make({})(values, "1")
        assert caught.value.code == code
    with pytest.raises(FinetuneError) as caught:
        BUILTINS["json-schema"].make({"schema": str(tmp_path / "none.json")})
    assert caught.value.code == "file_missing"


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("1/2", "so \\boxed{\\frac{1}{2}}", 1.0),
        ("\\frac{1}{2}", "so $0.5$", 1.0),
        ("$x^2+2x+1$", "\\boxed{(x+1)^2}", 1.0),
        ("\\boxed{12}", "12", 1.0),
        ("12", "\\boxed{13}", 0.0),
        ("12", "no idea", 0.0),
        ("12", "\\boxed{\\frac{", 0.0),
        ("12", "", 0.0),
        ("", "12", None),
    ],
)
def test_math(answer, completion, expected):
    assert score("math", answer, completion) == expected


@pytest.mark.parametrize("name", ["exact", "numeric", "choice", "math"])
def test_a_row_without_an_answer_is_an_error_and_another_column_may_hold_it(name):
    scorer = BUILTINS[name].make({})
    with pytest.raises(FinetuneError) as caught:
        scorer({"target": "5"}, "5")
    assert caught.value.code == "unknown_columns"
    right = "B" if name == "choice" else "5"
    assert BUILTINS[name].make({"column": "target"})({"target": right}, right) == 1.0
