"""Verifiers as settings name them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.preflight import Findings
from agent.verifying import NAMES, verifier_file, verifier_problems

Maker = Callable[..., tuple[dict[str, Any], Findings]]


def test_a_file_a_function_and_a_weight_are_told_apart() -> None:
    own = verifier_file("/a b/odd:1/mine.py:score:0.5")
    assert own is not None
    assert (own.file, own.function, own.weight) == ("/a b/odd:1/mine.py", "score", ":0.5")
    assert str(own) == "/a b/odd:1/mine.py:score:0.5"
    assert [verifier_file(spec) for spec in (*NAMES, "numeric:0.8", "mine.py")] == [None] * (len(NAMES) + 2)


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ("numric", "bad_value", "did you mean numeric"),
        ("numeric:-1", "bad_value", "no such verifier"),
        ("mine.py:score:x", "bad_value", "no number"),
        ("mine.py:scored", "bad_value", "has no function scored; it has imported, score"),
        ("broken.py:score", "bad_value", "broken.py:2 is no Python"),
        ("gone.py:score", "file_missing", "gone.py is not there"),
        ("mine.py", "bad_value", "no such verifier"),
    ],
)
def test_what_can_be_seen_without_running_is_refused(
    spec: str, code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from x import imported\nasync def score(completion): raise SystemExit\n")
    Path("broken.py").write_text("\ndef score(:\n")
    found = list(verifier_problems([spec]))
    assert [error.code for error in found] == [code]
    assert words in found[0].message


def test_known_names_and_functions_pass(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completion): return 1.0\nother = score\n")
    specs = [f"{tmp_path}/mine.py:score", f"{tmp_path}/mine.py:other:2", *NAMES, "numeric:0.8"]
    assert list(verifier_problems(specs)) == []


def test_a_verifier_counts_by_its_content_and_its_path_becomes_absolute(grpo: Maker, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("def score(completion): return 1.0\n")
    plan, found = grpo(verifier=["a/mine.py:score:0.5", "numeric"])
    assert not found.problems
    assert plan["settings"]["verifier"]["value"] == [f"{tmp_path}/a/mine.py:score:0.5", "numeric"]
    assert plan["identity"]["verifier"][0].endswith(":score:0.5")
    assert grpo(verifier=["b/mine.py:score:0.5", "numeric"])[0]["plan_id"] == plan["plan_id"]
    assert grpo(verifier=["b/mine.py:score:0.6", "numeric"])[0]["plan_id"] != plan["plan_id"]
    (tmp_path / "b/mine.py").write_text("def score(completion): return 0.0\n")
    assert grpo(verifier=["b/mine.py:score:0.5", "numeric"])[0]["plan_id"] != plan["plan_id"]
