"""What --verifier and --verifier-args mean, and files that do not load."""

import pytest

from finetune.domains.text import text_domain
from finetune.domains.verifiers import Answer, open_verifiers, planned
from finetune.errors import FinetuneError, Problems


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def other(): pass", "has no function score"),
        ("raise OSError('no luck')", "OSError: no luck"),
        ("syntax error", "SyntaxError"),
        ("import os; os._exit(4)", "died while it loaded"),
    ],
)
def test_a_file_that_does_not_load(tmp_path, text, told):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(FinetuneError) as caught:
        open_verifiers([f"{path}:score"], [], text_domain())
    assert caught.value.code == "bad_verifier"
    assert told in caught.value.message


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("WORTH = 0.25")
    (tmp_path / "mine.py").write_text("import neighbour\ndef score(completion): return neighbour.WORTH")
    with open_verifiers([f"{tmp_path}/mine.py:score"], [], text_domain()) as verifiers:
        assert verifiers.score([Answer({}, "a")])[0].value == 0.25


@pytest.mark.parametrize(
    ("specs", "args", "codes", "told"),
    [
        (["numerik"], [], ["bad_value"], "did you mean numeric?"),
        (["numeric:x"], [], ["bad_value"], "'x' is no finite number"),
        (["numeric:0", "exact:inf"], [], ["bad_value", "bad_value"], "other than 0"),
        (["numeric", "numeric:2"], [], ["bad_value"], "numeric is given twice"),
        ([], [], ["bad_value"], "none is given"),
        (["auto"], [], ["bad_value"], "have no verifier of their own"),
        (["/nowhere/mine.py:score"], [], ["file_missing"], "/nowhere/mine.py"),
        (["numeric"], ["tolerance"], ["bad_value"], "KEY=VALUE"),
        (["numeric"], ["tolerence=1"], ["bad_value"], "no such argument"),
        (["exact"], ["tolerance=1"], ["setting_without_effect"], "none of exact reads it"),
        (["numeric"], ["exact.column=b"], ["setting_without_effect"], "exact.column"),
        (["python-tests"], ["seconds=soon"], ["bad_value"], "'soon'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(specs, args, codes, told):
    with pytest.raises(Problems) as caught:
        planned(specs, args, text_domain())
    assert [error.code for error in caught.value.errors] == codes
    assert told in str(caught.value)


def test_arguments_reach_the_verifiers_that_read_them():
    specs = ["numeric", "exact:2", "python-tests"]
    args = ["column=a", "exact.column=b", "tolerance=0.1", "env=A, B"]
    verifiers, passed = planned(specs, args, text_domain(), 3.0)
    assert [verifier.source.options for verifier in verifiers] == [
        {"column": "a", "tolerance": "0.1"},
        {"column": "b"},
        {"seconds": "3"},
    ]
    assert passed == ["A", "B"]


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Problems) as caught:
        planned(["math"], [], text_domain())
    assert caught.value.errors[0].code == "missing_package"
    assert "finetune-skills[verifiers]" in str(caught.value)
