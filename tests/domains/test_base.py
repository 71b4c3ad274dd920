"""Loading domains, and what happens when a user's own does not behave."""

import math
import time

import pytest

from finetune.data.conversation import Conversation
from finetune.domains.base import limited_score, prompt_key
from finetune.domains.registry import domain_from_file, load_domain
from finetune.errors import FinetuneError
from finetune.records import Row

GOOD = """
from finetune.data.conversation import Conversation
def conversation(row): return Conversation(prompt=row["p"], completion=row["c"])
def split(rows, fraction, seed): return [1], [0]
def score(row, completion): return completion == row["c"]
def metrics(scores): return {"best": max(scores)}
"""
ROW = Row({"p": "a", "c": "b"}, "rows.jsonl", 7)


@pytest.fixture
def domain_of(tmp_path):
    def domain_of(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return domain_from_file(path)

    return domain_of


def test_a_users_domain(domain_of):
    domain = domain_of(GOOD)
    assert domain.conversation(ROW) == Conversation(prompt="a", completion="b")
    assert domain.split([ROW, ROW], 0.5, 0) == ([1], [0])
    assert [domain.score(ROW.values, text) for text in ("b", "c")] == [1.0, 0.0]
    assert domain.metrics([0.0, 1.0]) == {"best": 1.0}
    assert domain.has_verifier
    assert domain.digest != domain_of(GOOD + "# other").digest


def test_a_users_turns_are_checked_like_those_of_rows(domain_of):
    text = "def conversation(row): return [{'role': 'user', 'content': 3}, {'role': row['p']}]\n"
    domain = domain_of(GOOD + text)
    turns = domain.conversation(Row({"p": "assistant"}, "f", 1)).messages
    assert turns == [{"role": "user", "content": "3"}, {"role": "assistant", "content": ""}]
    with pytest.raises(FinetuneError) as caught:
        domain.conversation(ROW)
    assert caught.value.code == "bad_roles"


@pytest.mark.parametrize(
    "returned", ["[{'role': 'user', 'content': 'a'}]", "{'messages': [{'role': 'user', 'content': 'a'}]}"]
)
def test_a_users_conversation_may_be_plain_values(domain_of, returned):
    domain = domain_of(GOOD + f"def conversation(row): return {returned}\n")
    assert domain.conversation(ROW) == Conversation([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def conversation(row): return 1\n", "bad_domain"),
        (GOOD + "raise OSError('no')\n", "bad_domain"),
        ("syntax error", "bad_domain"),
        (GOOD + "score = 3\n", "bad_domain"),
    ],
)
def test_a_file_that_is_no_domain(domain_of, text, code):
    with pytest.raises(FinetuneError) as caught:
        domain_of(text)
    assert caught.value.code == code
    assert "mine.py" in caught.value.message


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("def conversation(row): return row['missing']\n", lambda domain: domain.conversation(ROW)),
        (
            "def split(rows, fraction, seed): return [0], [0]\n",
            lambda domain: domain.split([ROW, ROW], 0.5, 0),
        ),
        ("def score(row, completion): raise KeyError('x')\n", lambda domain: domain.score({}, "")),
        ("def score(row, completion): return 'good'\n", lambda domain: domain.score({}, "")),
        ("def score(row, completion): return float('nan')\n", lambda domain: domain.score({}, "")),
        ("def metrics(scores): return {'a': 'b'}\n", lambda domain: domain.metrics([])),
    ],
)
def test_a_users_function_that_fails_is_named(domain_of, text, call):
    with pytest.raises(FinetuneError) as caught:
        call(domain_of(GOOD + text))
    assert caught.value.code == "bad_domain"
    assert f"mine.py: {text[4 : text.index('(')]}()" in caught.value.message


def test_a_verifier_that_does_not_finish_scores_nothing():
    def slow(row, completion):
        time.sleep(10)
        return 0.0

    started = time.monotonic()
    assert limited_score(slow, "here", seconds=0.1)({}, "") is None
    assert time.monotonic() - started < 5
    assert limited_score(lambda row, completion: None, "here")({}, "") is None
    assert limited_score(lambda row, completion: -math.pi, "here")({}, "") == -math.pi


def test_domains_by_name(tmp_path):
    assert load_domain("auto", ["a.jsonl"]).name == "text"
    assert load_domain("auto", ["builtin:arithmetic:0.5"]).name == "math"
    assert load_domain("auto", ["builtin:arithmetic", "a.jsonl"]).name == "text"
    assert load_domain("text", ["a.jsonl"], "alpaca").name == "text"
    assert load_domain("math", ["a.jsonl"]).name == "math"
    for name, data_format, code in (
        ("poetry", "auto", "bad_value"),
        (str(tmp_path / "no.py"), "auto", "file_missing"),
        ("math", "alpaca", "setting_without_effect"),
    ):
        with pytest.raises(FinetuneError) as caught:
            load_domain(name, ["a.jsonl"], data_format)
        assert caught.value.code == code


def test_what_a_conversation_asks():
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a  b"},
        {"role": "assistant", "content": "c"},
    ]
    assert prompt_key(Conversation(turns)) == prompt_key(
        Conversation([*turns[:2], {"role": "assistant", "content": "d"}])
    )
    assert prompt_key(Conversation(turns)) != prompt_key(Conversation(turns[1:]))
    assert prompt_key(Conversation(prompt=" a\n b", completion="c")) == "a b"
    assert prompt_key(Conversation(text="t")) == "t"
