"""The check of verifiers before a run, on verifiers that see and on ones that are blind in some way."""

import pytest

from finetune.domains.checking import self_check, skeleton
from finetune.domains.math import math_domain
from finetune.domains.text import text_domain
from finetune.domains.verifiers import Answer, open_verifiers
from finetune.errors import FinetuneError

ROWS = [
    Answer({"answer": answer, "prompt": "p"}, "", "p", place=f"rows:{answer}") for answer in ("5", "6", "7")
]
RIGHT = "def right(row): return '<answer>' + row['answer'] + '</answer>'\n"


@pytest.fixture
def check(tmp_path):
    def check(code="", rows=ROWS, specs=("{}:score",), args=(), domain=None):
        path = tmp_path / "mine.py"
        path.write_text(code)
        named = [spec.format(path) for spec in specs]
        with open_verifiers(named, list(args), domain or text_domain(), 2.0, 1) as verifiers:
            return self_check(verifiers, rows)

    return check


def refusal(check, *args, **options):
    with pytest.raises(FinetuneError) as caught:
        check(*args, **options)
    return caught.value


def test_the_verifier_of_the_skeleton_sees(check):
    result = check(skeleton())
    assert result.scores == {"mine:score": {"right": 1.0, "wrong": 0.0, "empty": 0.0, "malformed": 0.0}}
    assert result.unchecked == []


@pytest.mark.parametrize(
    ("name", "args", "row"),
    [
        ("exact", [], {"answer": "5"}),
        ("numeric", ["tolerance=0.001"], {"answer": "5"}),
        ("choice", [], {"answer": "B"}),
        ("math", [], {"answer": "\\frac{1}{2}"}),
        ("regex", ["pattern=<answer>(?P<answer>.*)</answer>"], {"answer": "5"}),
        ("python-tests", ["box=process"], {"tests": "assert f() == 1", "solution": "def f(): return 1"}),
    ],
)
def test_built_in_verifiers_see(check, name, args, row):
    result = check(specs=[name], args=args, rows=[Answer(row, "")])
    assert result.scores[name] == {"right": 1.0, "wrong": 0.0, "empty": 0.0, "malformed": 0.0}
    assert result.unchecked == []


@pytest.mark.parametrize(
    "code",
    [
        "def score(completion): return 1.0\n",
        "def score(completion): return 0.0\n",
        "def score(completion): return float('7' in completion or completion == '')\n",
        "def score(completion, answer): return float(answer not in completion)\n",
        "def score(completion): return float(len(completion) > 0)\n",
        "def score(completion): return None\n",
        RIGHT + "def score(completion, answer): return float(completion == answer)\n",
    ],
)
def test_a_verifier_that_does_not_tell_right_from_the_rest_is_refused(check, code):
    error = refusal(check, code)
    assert error.code == "blind_verifier"
    assert error.evidence["verifier"] == "mine:score"
    assert error.evidence["scores"]


@pytest.mark.parametrize(
    "code",
    [
        "def score(completion): return float('nan')\n",
        "def score(completion, answer): return float(answer in completion) if completion else float('inf')\n",
    ],
)
def test_a_value_that_is_not_finite_is_refused(check, code):
    error = refusal(check, code)
    assert error.code == "blind_verifier"
    assert "not finite" in error.message


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def score(completion, answer): return float(completion) == float(answer)\n", "ValueError"),
        ("def score(completion, answer): return float(completion.split()[-1] == answer)\n", "IndexError"),
        ("import os\ndef score(completion): os._exit(1)\n", "verifier_died"),
        ("def score(completion):\n    while True: pass\n", "verifier_timeout"),
        ("def score(completion): return 'good'\n", "str"),
        ("def right(row): return 5\ndef score(completion): return 1.0\n", "right(): "),
        ("def right(row): return row['x']\ndef score(completion): return 1.0\n", "KeyError"),
    ],
)
def test_a_verifier_that_fails_on_such_answers_is_refused(check, code, told):
    error = refusal(check, code)
    assert error.code == "bad_verifier"
    assert told in error.message


@pytest.mark.parametrize("form", ["<answer>{}</answer>", "\\boxed{{{}}}", "#### {}", "The answer is {}."])
def test_usual_spellings_of_an_answer_are_found_without_right(check, form):
    code = f"def score(completion, answer): return float(completion == {form!r}.format(answer))\n"
    assert check(code).scores["mine:score"]["right"] == 1.0


def test_right_of_the_file_is_asked(check):
    code = (
        RIGHT
        + "def score(completion, answer): return {'tag': '<answer>' in completion, 'said': answer in completion}\n"
    )
    assert check(code).scores["mine:score"]["right"] == 2.0


def test_a_penalty_is_high_where_answers_are_bad(check):
    code = "def score(completion, answer): return float(completion != answer)\n"
    assert check(code, specs=["{}:score:-1"]).scores["mine:score"]["right"] == 0.0
    assert refusal(check, code).code == "blind_verifier"


def test_without_a_known_answer_the_form_of_the_values_is_all_that_is_checked(check):
    rows = [Answer({"prompt": "write"}, "", "write")]
    result = check("def score(completion): return -float(len(completion))\n", rows=rows)
    assert result.unchecked == ["mine:score"]
    assert result.scores["mine:score"]["empty"] == 0.0
    assert check(specs=["json-schema"], rows=[Answer({"schema": {}}, "")]).unchecked == ["json-schema"]


def test_a_function_of_something_else_may_stand_beside_a_verifier_of_the_answer(check):
    code = "def score(completion): return -float(len(completion))\n"
    assert refusal(check, code).code == "blind_verifier"
    result = check(code, specs=["auto", "{}:score:0.01"], domain=math_domain())
    assert result.unchecked == ["mine:score"]


def test_the_first_rows_are_asked(check):
    code = "def score(completion, answer): return float(answer in completion)\n"
    many = [Answer({"answer": str(number)}, "") for number in range(1000, 2000)]
    assert check(code, rows=many).scores["mine:score"]["right"] == 1.0


def test_no_rows(check):
    assert refusal(check, skeleton(), rows=[]).code == "no_rows"
