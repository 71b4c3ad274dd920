"""The catalogue of hints, and finding the cause of a failure in logs."""

import os
import re
from pathlib import Path

import pytest

from agent.cli import make_parser
from agent.commands import VERBS
from agent.hints import (
    described,
    diagnosed,
    earliest_traceback,
    first_traceback,
    hint,
    hints,
    match,
    patterns,
)
from finetune.errors import EXIT_CODES, WARNINGS, FinetuneError
from finetune.methods import METHODS

LAUNCHER = """Traceback (most recent call last):
  File "/x/torch/multiprocessing/spawn.py", line 90, in join
    raise ProcessRaisedException(msg, error_index, failed_process.pid)
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
"""


def traceback_of(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "/x/y.py", line 3, in f\n    g()\n{error}\n'


def test_each_code_and_warning_has_a_hint_and_nothing_else_has() -> None:
    assert set(hints()) == set(EXIT_CODES) | WARNINGS
    assert not set(EXIT_CODES) & WARNINGS


def test_hints_are_whole_sentences() -> None:
    for entry in hints().values():
        for text in (entry.cause, entry.fix, entry.confirm):
            assert re.fullmatch(r"[-A-Z`a-z].{8,}[.]", text), (entry.id, text)


def test_flags_and_verbs_named_in_hints_exist() -> None:
    known: set[str] = set()
    for name, verb in VERBS.items():
        for method in METHODS.values() if verb.takes_settings else (None,):
            known |= set(make_parser(name, method)._option_string_actions)
    foreign = {"--shm-size", "--ipc"}  # of docker
    texts = [entry.cause + entry.fix + entry.confirm for entry in hints().values()] + [
        known.cause for known in patterns()
    ]
    for text in texts:
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known | foreign, text
        assert set(re.findall(r"`finetune ([a-z-]+)", text)) <= set(VERBS), text


@pytest.mark.parametrize("known", patterns(), ids=lambda known: f"{known.hint}-{known.cause[:20]}")
def test_each_pattern_finds_its_sample_before_any_other_does(known) -> None:  # type: ignore[no-untyped-def]
    assert known.hint in EXIT_CODES
    assert match(known.sample) is known


def test_an_error_is_shown_with_its_own_words_and_the_hint_of_its_code() -> None:
    shown = described(FinetuneError("too_long", "rows.jsonl:3 has 900 tokens", line=3))
    assert (shown["hint_id"], shown["code"], shown["cause"]) == (
        "too_long",
        "too_long",
        "rows.jsonl:3 has 900 tokens",
    )
    assert shown["fix"] == hint("too_long").fix
    assert shown["evidence"] == {"line": 3}


def test_the_launchers_summary_is_never_the_cause(tmp_path: Path) -> None:
    (tmp_path / "launch.log").write_text(LAUNCHER + "\n" + traceback_of("ValueError: the cause"))
    found = first_traceback(tmp_path / "launch.log")
    assert found is not None
    assert (found.error, found.line) == ("ValueError: the cause", 8)
    (tmp_path / "launch.log").write_text(LAUNCHER)
    assert first_traceback(tmp_path / "launch.log") is None


def test_the_earliest_traceback_over_all_ranks_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(
        "2026-01-01 10:00:05 waiting\n" + traceback_of("RuntimeError: Connection closed by peer")
    )
    (tmp_path / "rank1.log").write_text("2026-01-01 10:00:03 step 7\n" + traceback_of("KeyError: 'first'"))
    found = earliest_traceback(tmp_path)
    assert found is not None
    assert found.error == "KeyError: 'first'"


def test_without_times_the_log_that_ended_first_is_the_earliest(tmp_path: Path) -> None:
    for name, age in (("rank0.log", 10), ("rank1.log", 20)):
        (tmp_path / name).write_text(traceback_of(f"ValueError: {name}"))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    found = earliest_traceback(tmp_path)
    assert found is not None
    assert found.error == "ValueError: rank1.log"


def test_an_engines_log_is_asked_last(tmp_path: Path) -> None:
    (tmp_path / "vllm-0-0.log").write_text("2026-01-01 10:00:00 x\n" + traceback_of("KeyError: 'engine'"))
    found = earliest_traceback(tmp_path)
    assert found is not None
    assert found.error == "KeyError: 'engine'"
    (tmp_path / "rank0.log").write_text("2026-01-01 10:00:09 x\n" + traceback_of("KeyError: 'rank'"))
    found = earliest_traceback(tmp_path)
    assert found is not None
    assert found.error == "KeyError: 'rank'"


def test_progress_bars_do_not_hide_an_error(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_bytes(
        b"10%|#\r20%|##\r" + traceback_of("OSError: x").encode().replace(b"\n", b"\r\n")
    )
    found = first_traceback(tmp_path / "rank0.log")
    assert found is not None
    assert (found.error, found.line) == ("OSError: x", 3)


def test_a_known_text_gives_the_hint_and_keeps_the_code(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(
        traceback_of("RuntimeError: operator torchvision::nms does not exist")
    )
    shown = described(diagnosed(FinetuneError("training_failed", "it failed", rank=0), tmp_path))
    assert (shown["code"], shown["hint_id"], shown["fix"]) == (
        "training_failed",
        "broken_package",
        hint("broken_package").fix,
    )
    assert shown["evidence"]["rank"] == 0
    assert shown["evidence"]["line"] == 1


def test_an_unknown_text_is_called_unknown_and_shown(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(traceback_of("FooError: never seen"))
    error = diagnosed(FinetuneError("training_failed", "it failed"), tmp_path)
    assert error.code == "training_failed"
    assert "the cause is unknown" in error.message
    assert "FooError: never seen" in error.message
    assert error.evidence["traceback"][-1] == "FooError: never seen"


def test_an_error_that_knows_its_cause_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(traceback_of("MemoryError"))
    error = FinetuneError("non_finite", "loss is nan")
    assert diagnosed(error, tmp_path) is error
    assert diagnosed(FinetuneError("rank_died", "killed"), tmp_path / "nothing").code == "rank_died"
