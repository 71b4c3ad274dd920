"""Answers: bounded, clean, and in step with the exit code."""

from pathlib import Path

import pytest

from agent.folder import check_against_schema
from agent.render import MOST_CHARACTERS, Answer, clean, document, for_people, refusal, text_of
from finetune.errors import EXIT_CODES, FinetuneError


@pytest.mark.parametrize("code", EXIT_CODES)
def test_ok_agrees_with_the_exit_code_of_every_error(code: str) -> None:
    answer = refusal("run", [FinetuneError(code, "it went wrong")])
    value = document(answer)
    check_against_schema("answer", value)
    assert (value["ok"], answer.exit_code) == (False, EXIT_CODES[code])
    assert value["errors"][0]["code"] == code


def test_an_answer_without_errors_is_ok() -> None:
    value = document(Answer("list"))
    check_against_schema("answer", value)
    assert value["ok"]
    assert Answer("list").exit_code == 0


def test_long_answers_are_cut_and_say_so() -> None:
    errors = [
        FinetuneError("bad_row", f"row {n} " + "é" * 5000, places=[f"{n}:{m}" for m in range(500)])
        for n in range(30)
    ]
    value = document(refusal("run", errors))
    assert len(text_of(value)) <= MOST_CHARACTERS
    assert value["truncated"]
    assert len(value["errors"]) >= 2
    check_against_schema("answer", value)


def test_even_data_that_cannot_be_cut_fits() -> None:
    value = document(Answer("x", data={f"key {n}": n for n in range(3000)}))
    assert len(text_of(value)) <= MOST_CHARACTERS
    assert value["truncated"]


def test_pages_join_to_the_whole() -> None:
    items = [f"{n} " + "x" * (n % 300) for n in range(400)]
    offset, seen, pages = 0, [], 0
    while offset is not None:
        value = document(
            Answer("logs", data={"lines": items[offset:]}, pages="lines", offset=offset, total=len(items))
        )
        assert len(text_of(value)) <= MOST_CHARACTERS
        seen += value["data"]["lines"]
        assert value["truncated"] == (value["next_offset"] is not None)
        offset, pages = value["next_offset"], pages + 1
    assert seen == items
    assert pages > 3


def test_the_last_page_knows_that_it_is_the_last() -> None:
    value = document(Answer("logs", data={"lines": ["a"]}, pages="lines", offset=9, total=10))
    assert (value["truncated"], value["next_offset"]) == (False, None)
    assert (
        document(Answer("logs", data={"lines": ["a"]}, pages="lines", offset=9, total=11))["next_offset"]
        == 10
    )


def test_foreign_text_has_no_control_codes() -> None:
    assert clean("a\x1b[31mred\x1b[0m\r\nb\x07\x00\u202e \ud800c\x1b]0;title\x07\td", 100) == "ared\nb c\td"
    assert clean("x" * 50, 10) == "x" * 7 + "..."
    value = document(refusal("run", [FinetuneError("bad_row", "bad \x1b[2J row", text="\x1b[1mbold")]))
    assert "\\u001b" not in text_of(value)
    assert "\x1b" not in text_of(value)


def test_secrets_are_masked_in_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k_TEST")
    assert "k_TEST" not in text_of(document(Answer("x", summary="k_TEST", data={"a": ["k_TEST"]})))


def test_numbers_that_are_not_finite_are_null() -> None:
    assert document(Answer("x", data={"loss": float("nan")}))["data"] == {"loss": None}


def test_people_read_cause_fix_and_what_to_do_next() -> None:
    error = FinetuneError("too_long", "rows.jsonl:3 is too long")
    answer = refusal(
        "run",
        [error],
        next_actions=[("look", ["finetune", "logs", "a b"])],
        run_dir=Path("/r"),
        data={"n": 3},
    )
    text = for_people(document(answer))
    assert text.splitlines()[0] == "run: refused - rows.jsonl:3 is too long"
    for part in (
        "error too_long: rows.jsonl:3 is too long",
        "fix: ",
        "confirm: ",
        "run folder: /r",
        "n: 3",
        "next: look: finetune logs 'a b'",
    ):
        assert part in text


def test_a_page_and_a_long_command_fit_into_the_status_of_a_job() -> None:
    items = [f"{n} " + "x" * 300 for n in range(60)]
    inner = document(Answer("generate", data={"completions": items}, pages="completions", total=60))
    argv = ["generate", "run", *(f"--prompt={n} " + "y" * 400 for n in range(60))]
    outer = document(Answer("status", data={"job": {"argv": argv}, "result": inner["data"]}))
    assert outer["data"]["result"] == inner["data"]
    assert outer["data"]["job"]["argv"][:2] == argv[:2]
    assert sum(map(len, outer["data"]["job"]["argv"])) < 500
    assert len(text_of(outer)) <= MOST_CHARACTERS
    short = {"job": {"argv": ["status", "x" * 390]}}
    assert document(Answer("status", data=short))["data"] == short
