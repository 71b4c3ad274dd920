"""The catalogue of hints, and finding the cause of a failure in logs."""

import os
import re
import traceback
from pathlib import Path

import pytest

from agent.cli import make_parser
from agent.commands import VERBS
from agent.health import RULES
from agent.hints import (
    KINDS,
    described,
    diagnosed,
    earliest_traceback,
    findings,
    findings_of,
    hint,
    hints,
    logs_of,
    patterns,
)
from agent.tracebacks import lines_of, read_lines
from finetune.errors import EXIT_CODES, WARNINGS, FinetuneError
from finetune.methods import METHODS

LOGS = Path(__file__).with_name("faults") / "logs"
FIXTURES = sorted(LOGS.glob("*.log"))
HEADER = re.compile(
    r"# seen with: [^\n]*\d[^\n]*\n# (caused by tests/agent/faults/causes\.py|written from the documented wording: \S)"
)
OF_METRICS = {"loss_rises", "held_out_falls", "rollouts_lost", "rewards_missing", "slow_sync"}


def traceback_of(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "/x/y.py", line 3, in f\n    g()\n{error}\n'


def test_each_code_warning_and_cause_has_a_hint_and_nothing_else_has() -> None:
    told = {known.hint for known in patterns()} | {rule.hint_id for rule in RULES} | OF_METRICS
    assert set(hints()) == set(EXIT_CODES) | WARNINGS | told
    assert not set(EXIT_CODES) & WARNINGS


def test_hints_are_whole_sentences() -> None:
    for entry in hints().values():
        for text in (entry.cause, entry.fix, entry.confirm):
            assert re.fullmatch(r"[-/A-Z`a-z].{8,}[.]", text), (entry.id, text)


def test_flags_and_verbs_named_in_hints_exist() -> None:
    known: set[str] = set()
    for name, verb in VERBS.items():
        for method in METHODS.values() if verb.takes_settings else (None,):
            known |= set(make_parser(name, method)._option_string_actions)
    foreign = set(
        "--shm-size --ipc --security-opt --master-port --max-lora-rank".split()
    )  # of docker, torchrun, vLLM
    texts = [entry.cause + entry.fix + entry.confirm for entry in hints().values()]
    texts += [known.cause + (known.fix or "") for known in patterns()]
    for text in texts:
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known | foreign, text
        assert set(re.findall(r"`finetune ([a-z-]+)", text)) <= set(VERBS), text


def test_patterns_stand_in_the_rank_of_their_kinds() -> None:
    places = [KINDS.index(known.kind) for known in patterns()]
    assert places == sorted(places)
    assert len(patterns()) >= 50


def test_each_pattern_has_a_log_and_each_log_a_pattern() -> None:
    assert {path.name.split(".")[0] for path in FIXTURES} == {known.id for known in patterns()}


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_a_log_of_a_fault_is_known_by_its_pattern(path: Path) -> None:
    """The first two lines say with what it was seen, and whether it was really caused."""
    assert HEADER.match(path.read_text()), "say in two lines with what it was seen"
    found = findings_of(read_lines(path), path)
    assert found, "nothing is found"
    assert found[0].known is not None, found[0].error
    assert found[0].known.id == path.name.split(".")[0], found[0].error
    assert path.stat().st_size < 8000


def test_logs_that_are_called_caused_are_those_that_can_be_caused() -> None:
    from tests.agent.faults.causes import CAUSES

    caused = {path.stem for path in FIXTURES if "# caused by" in path.read_text()}
    assert caused == set(CAUSES)
    assert len(caused) >= 40
    assert all("/root/" not in path.read_text() and "/work/" not in path.read_text() for path in FIXTURES)


@pytest.mark.proof
@pytest.mark.parametrize("name", [path.stem for path in FIXTURES if "# caused by" in path.read_text()])
def test_a_fault_that_is_caused_again_is_known_again(name: str) -> None:
    from tests.agent.faults.causing import caused

    found = findings_of(lines_of(caused(name)))
    assert found[:1], "nothing is found"
    assert found[0].known is not None, found[0].error
    assert found[0].known.id == name, found[0].error


def test_an_error_is_shown_with_its_own_words_and_the_hint_of_its_code() -> None:
    shown = described(FinetuneError("too_long", "rows.jsonl:3 has 900 tokens", line=3))
    assert (shown["hint_id"], shown["code"], shown["cause"]) == (
        "too_long",
        "too_long",
        "rows.jsonl:3 has 900 tokens",
    )
    assert shown["fix"] == hint("too_long").fix
    assert shown["evidence"] == {"line": 3}


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


def log(folder: Path, name: str, text: str, age: float = 0.0) -> Path:
    path = folder / name
    path.write_text(text)
    os.utime(path, (1000 - age, 1000 - age))
    return path


GONE = traceback_of(
    "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
)


def causes(*logs: Path) -> list[str]:
    return [finding.known.id if finding.known else finding.error for finding in findings(list(logs))]


def test_the_earlier_of_two_known_errors_comes_first(tmp_path: Path) -> None:
    full = "2026-01-01 10:00:02 x\n" + traceback_of("OSError: [Errno 28] No space left on device")
    data = "2026-01-01 10:00:03 x\n" + traceback_of("json.decoder.JSONDecodeError: Expecting value")
    logs = log(tmp_path, "rank0.log", data), log(tmp_path, "rank1.log", full)
    assert causes(*logs) == ["disk_full", "json_broken"]


def test_at_one_time_the_kind_of_cause_decides(tmp_path: Path) -> None:
    texts = (GONE, traceback_of("MemoryError"), traceback_of("KeyError: 1"), traceback_of("CastError: x"))
    logs = [log(tmp_path, f"rank{rank}.log", text) for rank, text in enumerate(texts)]
    assert causes(*logs) == ["rows_disagree", "memory", "KeyError: 1", "peer_gone"]


def test_without_times_what_ranks_say_of_each_other_comes_last(tmp_path: Path) -> None:
    gone = log(tmp_path, "rank0.log", "2026-01-01 10:00:00 x\n" + GONE, age=100)
    own = log(tmp_path, "rank1.log", traceback_of("KeyError: 1"))
    assert causes(gone, own) == ["KeyError: 1", "peer_gone"]


def test_a_line_that_means_a_failure_counts_without_a_traceback(tmp_path: Path) -> None:
    text = "step 3\n[84211.4] Memory cgroup out of memory: Killed process 4711 (python)\nKilled\n"
    (first, second) = findings_of(lines_of(text))
    assert (first.known and first.known.id, first.line, second.line) == ("system_killed", 2, 3)
    assert findings_of(lines_of("INFO no module is missing\nall is well\n")) == []


def test_an_error_of_ours_in_a_log_is_known_by_its_code(tmp_path: Path) -> None:
    error = "finetune.errors.FinetuneError: rank 1: a gradient is not finite\nerror code: non_finite"
    (found,) = findings([log(tmp_path, "rank0.log", traceback_of(error))])
    assert found.known is not None
    assert (found.known.hint, found.known.cause) == ("non_finite", "rank 1: a gradient is not finite")
    assert found.fix == hint("non_finite").fix


def test_what_raises_an_error_of_ours_prints_its_code() -> None:
    try:
        raise FinetuneError("bad_row", "it is bad")
    except FinetuneError as error:
        text = "".join(traceback.format_exception(error))
    (found,) = findings_of(lines_of(text))
    assert found.known is not None
    assert (found.known.hint, found.known.cause) == ("bad_row", "it is bad")


def test_logs_are_found_in_folders_of_ranks_and_those_of_earlier_attempts_are_not(tmp_path: Path) -> None:
    for name in ("0/stderr.log", "1/stderr", "slurm-7.out", "attempt-1/rank0.log", "rows.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [str(path.relative_to(tmp_path)) for path in logs_of(tmp_path)]
    assert names == ["0/stderr.log", "1/stderr", "slurm-7.out"]


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
