"""Which number an answer gives, and which numbers are equal."""

from fractions import Fraction

import pytest

from finetune.domains.math import Number, last_number, math_domain
from finetune.errors import FinetuneError
from finetune.records import Row


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("first 3, then 4", 4),
        ("1,234,567.50 dollars", Fraction("1234567.5")),
        ("$1,000", 1000),
        ("-$5", -5),
        ("it is -3", -3),
        ("\u22127", -7),
        ("5-3", 3),
        ("2024-01-02", 2),
        ("3/4", Fraction(3, 4)),
        ("1 / 2", Fraction(1, 2)),
        ("1/0", 1),
        (".5", Fraction(1, 2)),
        ("in 1,2", 2),
        ("steps: 1 + 1 = 2\n#### 18", 18),
        ("#### 1,200 (that is 3 times)", 1200),
        ("#### 5\n#### 6", 6),
        ("**7**", 7),
        ("(a)7", 7),
    ],
)
def test_the_last_number(text, value):
    assert last_number(text) == Number(Fraction(value))


@pytest.mark.parametrize("text", ["", "none", "####", "minus", "1 #### no", "x2"])
def test_no_number(text):
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("work\n#### 18", "so 9 * 2 = 18", 1.0),
        ("18", "18.0", 1.0),
        ("18", "-18", 0.0),
        ("18", "I do not know", 0.0),
        ("0.5", "1/2", 1.0),
        ("0.5", "50%", 1.0),
        ("50", "50 %", 1.0),
        ("50%", "0.5", 1.0),
        ("50%", "0.5%", 0.0),
        ("1000", "1,000", 1.0),
        ("no number", "1", None),
    ],
)
def test_scores(answer, completion, expected):
    assert math_domain().score({"prompt": "q", "answer": answer}, completion) == expected


def test_rows_have_prompt_or_question_and_answer():
    domain = math_domain()
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "3"}]
    for values in ({"prompt": "q", "answer": 3}, {"question": "q", "answer": "3"}):
        assert domain.conversation(Row(values, "f", 1)).messages == turns
    with pytest.raises(FinetuneError) as caught:
        domain.conversation(Row({"prompt": "q"}, "f", 1))
    assert (caught.value.code, caught.value.evidence["columns_found"]) == ("unknown_columns", ["prompt"])


def test_metrics():
    assert math_domain().metrics([1.0, 0.0, None, 1.0]) == {
        "accuracy": 2 / 3,
        "num_scored": 3,
        "num_unscorable": 1,
    }
    assert math_domain().metrics([None]) == {"num_scored": 0, "num_unscorable": 1}
