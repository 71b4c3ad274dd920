"""Strict JSON, whole files, and a journal that a resumed run can rewind."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from finetune.errors import EXIT_CODES, FinetuneError, Problems, boundary
from finetune.records import Journal, Ledger, Row, StopFlag, read_lines, to_json, write_atomically


def strict(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return found


def test_numbers_that_are_not_finite_become_null_and_are_named() -> None:
    """CE-17."""
    found = strict(
        to_json(
            {"loss": float("nan"), "reward": np.float32(0.5), "deep": {"x": float("inf")}, "n": np.int64(3)}
        )
    )
    assert found == {"loss": None, "reward": 0.5, "deep": {"x": None}, "n": 3, "non_finite": ["loss"]}


def test_line_separators_inside_strings_survive(tmp_path: Path) -> None:
    """DF-03, for our own files."""
    journal = Journal(tmp_path)
    journal.metrics(1, note="left\u2028right\u0085x")
    journal.metrics(2, note="ok")
    assert [line["note"] for line in read_lines(tmp_path / "metrics.jsonl")] == [
        "left\u2028right\u0085x",
        "ok",
    ]


def test_half_a_last_line_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_lines(path) == [{"step": 1}]


def test_rewinding_forgets_later_steps_and_mends_the_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (1, 2, 3):
        journal.metrics(step, loss=1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4')
    journal.rewind(2)
    journal.metrics(3, loss=2.0)
    assert [(line["step"], line["loss"]) for line in read_lines(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_only_rank_zero_writes_metrics_and_each_rank_its_heartbeat(tmp_path: Path) -> None:
    for rank in (0, 1):
        journal = Journal(tmp_path, rank)
        journal.metrics(1, loss=1.0)
        journal.event("checkpoint", step=1)
        journal.heartbeat("training", step=1)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == len(read_lines(tmp_path / "events.jsonl")) == 1
    beats = [json.loads((tmp_path / "heartbeat" / f"rank{rank}").read_text()) for rank in (0, 1)]
    assert [(beat["rank"], beat["step"], beat["operation"], beat["pid"]) for beat in beats] == [
        (0, 1, "training", os.getpid()),
        (1, 1, "training", os.getpid()),
    ]


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_ledger_balances_only_when_every_row_is_somewhere() -> None:
    ledger = Ledger(read=3, trained=1, held_out=1)
    assert not ledger.balances
    ledger.drop("too_long", Row({}, "f.jsonl", 2))
    assert ledger.balances
    assert ledger.dropped == {"too_long": ["f.jsonl:2"]}


def test_foreign_exceptions_get_the_type_of_their_boundary() -> None:
    with (
        pytest.raises(FinetuneError, match=r"verifier x: KeyError: 'a'") as caught,
        boundary("bad_domain", "verifier x"),
    ):
        raise KeyError("a")
    assert (caught.value.code, caught.value.exit_code) == ("bad_domain", 3)
    with pytest.raises(FinetuneError) as caught, boundary("bad_domain", "verifier x"):
        raise FinetuneError("no_rows", "empty")
    assert caught.value.code == "no_rows"


def test_errors_survive_pickling_and_problems_need_one() -> None:
    import pickle

    again = pickle.loads(pickle.dumps(FinetuneError("too_long", "long", file="f")))
    assert (again.code, again.message, again.evidence) == ("too_long", "long", {"file": "f"})
    with pytest.raises(TypeError):
        Problems([])
    with pytest.raises(TypeError):
        FinetuneError("no_such_code", "x")


def test_exit_codes_keep_clear_of_those_of_shells() -> None:
    assert not set(EXIT_CODES.values()) & {0, 1, 124, 126, 127, 128, 130, 137, 143}


def test_stop_flag_takes_a_signal_twice() -> None:
    import signal

    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        flag = StopFlag()
        flag.listen()
        assert not flag.is_set
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert flag.is_set
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
