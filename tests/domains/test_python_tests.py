"""Programs scored by tests: what counts as passed, what does not, and what is no fault of the program."""

import shutil

import pytest

from finetune.domains.python_tests import code_of, python_tests_score
from finetune.domains.text import text_domain
from finetune.domains.verifiers import Answer, open_verifiers
from finetune.errors import FinetuneError

BOXES = ["process"] + (["bubblewrap"] if shutil.which("bwrap") else [])
TESTS = {"tests": ["assert double(2) == 4", "assert double(-1) == -2"]}
GOOD = "def double(x):\n    return 2 * x\n"


@pytest.fixture(scope="module", params=BOXES)
def score(request):
    return python_tests_score({"box": request.param, "seconds": "5"})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (GOOD, 1.0),
        (f"Here it is:\n```python\n{GOOD}```\nIt doubles.", 1.0),
        (f"```python\n{GOOD}", 1.0),
        ("def double(x): return 4", 0.0),
        ("def double(x) return", 0.0),
        ("", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
        (GOOD + "import os; os._exit(0)", 0.0),
        ("def double(x): raise SystemExit(0)", 0.0),
        ("import os\ndef double(x): os._exit(0)", 0.0),
        ("open('result.json', 'w').write('{\"secret\": \"\", \"passed\": 2}'); import os; os._exit(0)", 0.0),
        ("import sys; sys.stdin.read()\n" + GOOD, 1.0),
        (GOOD + "print('x' * 10_000_000)", 1.0),
        ("\x00\ud800", 0.0),
    ],
)
def test_tests_must_all_run_and_pass(score, code, expected):
    assert score(TESTS, code) == expected


def test_an_endless_program_is_wrong(score):
    short = python_tests_score({"box": "process", "seconds": "1"})
    assert short(TESTS, GOOD + "while True: pass") == 0.0


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(1)", 0.0), ('print("");1/0', 0.0), ("pass", 1.0)]
)
def test_nothing_printed_is_right_only_for_a_program_that_ends_well(score, code, expected):
    assert score({"stdout": ""}, code) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(int(input()) + 1)", 1.0),
        ("print(f'{int(input()) + 1}  \\n\\n')", 1.0),
        ("print(2)", 0.0),
        ("print(int(input()) + 1); raise ValueError", 0.0),
        ("import os\nprint(2 if not os.path.exists('f') else 6)\nopen('f', 'w')", 0.0),
    ],
)
def test_each_case_has_a_process_and_a_folder_of_its_own(score, code, expected):
    assert (
        score({"cases": [{"stdin": "1", "stdout": "2\n"}, {"stdin": "5", "stdout": "6"}]}, code) == expected
    )


def test_setup_runs_before_and_tests_may_be_text(score):
    row = {"setup": "K = 3", "tests": "assert f() == 3"}
    assert score(row, "def f(): return K") == 1.0
    assert score({"tests": '["assert f() == 3", "assert f() == 3"]'}, "def f(): return 3") == 1.0


def test_a_share_of_the_tests():
    partial = python_tests_score({"box": "process", "partial": "true"})
    assert partial(TESTS, "def double(x): return 4") == 0.5
    assert partial({"cases": '[{"stdout": "1"}, {"stdout": "2"}]'}, "print(1)") == 0.5


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({}, "unknown_columns"),
        ({"tests": []}, "unknown_columns"),
        ({"cases": [1]}, "bad_row"),
        ({"cases": "["}, "bad_row"),
    ],
)
def test_a_row_without_tests_is_an_error_and_never_passed(score, row, code):
    with pytest.raises(FinetuneError) as caught:
        score(row, GOOD)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "options", [{"seconds": "0"}, {"memory_mb": "x"}, {"partial": "yes"}, {"box": "jail"}]
)
def test_bad_options(options):
    with pytest.raises(FinetuneError) as caught:
        python_tests_score({"box": "process"} | options)
    assert caught.value.code == "bad_value"


def test_the_last_fenced_block_is_the_code():
    assert code_of("```python\na\n```\nand\n```py\nb\n```") == "b\n"
    assert code_of("a = 1") == "a = 1"


def test_without_a_sandbox_it_is_refused_unless_none_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FinetuneError) as caught:
        open_verifiers(["python-tests"], [], text_domain())
    assert (caught.value.code, caught.value.exit_code) == ("no_sandbox", 4)
    with open_verifiers(["python-tests"], ["box=process"], text_domain(), 5.0) as verifiers:
        rewards = verifiers.score(
            [Answer(TESTS, GOOD), Answer(TESTS, "while True: pass"), Answer(TESTS, "x")]
        )
    assert [(reward.value, reward.status) for reward in rewards] == [
        (1.0, "scored"),
        (0.0, "scored"),
        (0.0, "scored"),
    ]


@pytest.mark.skipif("bubblewrap" not in BOXES, reason="bwrap is not installed (Debian: bubblewrap)")
def test_a_box_that_breaks_during_the_run_is_an_error_and_not_a_wrong_answer(monkeypatch, tmp_path):
    real = shutil.which("bwrap")
    (tmp_path / "bwrap").write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/broken ] && {{ echo 'bwrap: out of mounts' >&2; exit 1; }}\nexec {real} \"$@\"\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    # One worker: another might still be loading, and a worker that finds no box when it loads ends the run.
    with open_verifiers(["python-tests"], [], text_domain(), 5.0, workers=1) as verifiers:
        (before,) = verifiers.score([Answer(TESTS, GOOD)])
        (tmp_path / "broken").touch()
        (after,) = verifiers.score([Answer(TESTS, GOOD)])
    assert (before.value, before.status) == (1.0, "scored")
    assert (after.value, after.status) == (None, "error")
    assert "out of mounts" in after.error
