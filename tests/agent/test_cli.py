"""The command line: help, speed, flags, and that every ending is an answer with its exit code."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.commands import VERBS
from agent.folder import RunFolder, write_document
from agent.states import first_state
from agent.system import Device, read_machine
from agent.verifying import NAMES
from finetune.domains.answers import BUILTINS
from finetune.errors import EXIT_CODES
from tests.agent.calls import GRPO, TINY, Standin, checked

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "run_finetune_local.py")]
QUICK_S = 0.5


def seconds_of(argv: list[str]) -> float:
    """Return the CPU time of a command: what it takes on a machine that does nothing else, for it waits for nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path / "run")
    write_document(folder.state, "state", first_state("sft-1", "0" * 16, "here") | {"state": "stopped"})
    return folder.path


@pytest.mark.parametrize("verb", ["--help", "run", "status", "list", "logs", "plan"])
def test_looking_and_planning_take_less_than_half_a_second(verb: str, run_dir: Path, rows: Path) -> None:
    argv = {
        "run": ["run", "--help"],
        "status": ["status", str(run_dir)],
        "logs": ["logs", str(run_dir)],
        "plan": ["plan", *TINY, "--data", str(rows), "--out", str(run_dir.parent / "o")],
    }.get(verb, [verb])
    assert min(seconds_of([sys.executable, "-m", "agent.cli", *argv]) for _ in range(2)) < QUICK_S


def test_planning_imports_no_torch(rows: Path) -> None:
    code = f"""
import sys
from agent import cli
assert cli.main({["plan", *TINY, "--data", str(rows)]!r}) == 0
print(sorted({{"torch", "transformers", "numpy", "rich", "datasets"}} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == "[]\n"


def test_help_lists_every_verb_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in VERBS)
    assert {str(code) for code in EXIT_CODES.values()} <= set(
        re.findall(r"\d+", text.split("exit codes:")[1])
    )


def test_a_verifier_to_start_from_is_written_once(command: Any, tmp_path: Path, rows: Path) -> None:
    path = tmp_path / "mine.py"
    answer, code = command("verifier-skeleton", str(path))
    assert code == 0, answer["summary"]
    spec = answer["data"]["verifier"]
    assert spec.startswith(f"{path}:")
    before = path.read_text()
    assert command("verifier-skeleton", str(path))[1] == 0
    flags = ["--engine", "local", "--data", str(rows), "--verifier", spec]
    assert command("plan", *GRPO, *flags)[1] == 0
    path.write_text(before + "# mine\n")
    answer, code = command("verifier-skeleton", str(path))
    assert (code, answer["errors"][0]["code"]) == (7, "target_exists")
    assert path.read_text() == before + "# mine\n"
    assert command("verifier-skeleton", str(tmp_path / "mine.txt"))[1] == 2


def test_known_verifiers_are_those_of_the_engine() -> None:
    assert set(NAMES) == {"auto", "domain", *BUILTINS}


def test_logs_of_an_engine_are_named(command: Any, run_dir: Path) -> None:
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "vllm-0-0.log").write_text("ready\n")
    answer, code = command("logs", str(run_dir), "--file", "vllm-0-0.log")
    assert (code, answer["data"]["lines"][0], answer["data"]["files"]) == (0, "ready", ["vllm-0-0.log"])
    assert command("logs", str(run_dir), "--file", "vllm-0-0.log", "--rank", "0")[1] == 2


def test_unknown_and_repeated_flags_are_refused_together(refused: Any, rows: Path) -> None:
    flags = [
        *TINY,
        "--data",
        str(rows),
        "--leraning-rate",
        "1",
        "--gpus",
        "2",
        "--seed",
        "1",
        "--seed",
        "2",
        "stray",
    ]
    errors = refused(*flags, code=2)
    assert set(errors) == {"unknown_setting", "usage", "settings_conflict"}
    assert "did you mean" in errors["unknown_setting"]["cause"]
    assert errors["settings_conflict"]["cause"].startswith("seed:")


@pytest.mark.parametrize("number", ["0", "-1", "two", "2.5", "65"])
def test_a_bad_number_of_ranks_is_refused_not_bent(refused: Any, rows: Path, number: str) -> None:
    assert set(refused(*TINY, "--data", str(rows), "--num-gpus", number, code=2)) == {"bad_value"}


def test_more_ranks_than_devices_need_no_process_to_be_refused(
    refused: Any, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(read_machine(), devices=(Device("0", "H"),))
    monkeypatch.setattr(cli, "read_machine", lambda: machine)
    errors = refused(
        "--method", "sft", "--model", "builtin:tiny", "--data", str(rows), "--num-gpus", "2", code=3
    )
    assert errors["not_enough_devices"]["evidence"] == {"setting": "num_gpus", "asked": 2, "visible": 1}


def test_abbreviated_flags_are_unknown(refused: Any, rows: Path) -> None:
    assert set(refused(*TINY, "--data", str(rows), "--learning", "1e-3", code=2)) == {"unknown_setting"}


@pytest.mark.parametrize(
    "argv",
    [
        ["rum"],
        ["run", "--method", "grpo"],
        ["run"],
        ["status"],
        ["stop", "/nowhere", "--grace", "x"],
        ["logs", "--limit"],
    ],
)
def test_usage_errors_are_answers_too(command: Any, argv: list[str]) -> None:
    answer, code = command(*argv)
    assert code == 2
    assert answer["status"] == "refused"


@pytest.mark.parametrize("verb", ["status", "logs", "stop", "resume", "generate", "export", "evaluate"])
def test_a_run_that_is_not_there(command: Any, verb: str) -> None:
    answer, code = command(verb, "/nowhere")
    assert (code, answer["errors"][0]["code"]) == (3, "run_missing")


def test_a_bug_is_an_answer_and_its_traceback_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*rest: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("agent.verbs.list_runs", broken)
    assert cli.main(["list"]) == 70
    captured = capsys.readouterr()
    answer = checked(captured.out, 70)
    assert (answer["errors"][0]["code"], answer["errors"][0]["evidence"]["function"]) == ("bug", "broken")
    assert "Traceback" in captured.err


def test_a_full_disk_is_no_bug(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    def full(*rest: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("agent.verbs.list_runs", full)
    answer, code = command("list")
    assert (code, answer["errors"][0]["code"]) == (8, "disk_full")


def test_a_terminal_gets_text_unless_json_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.startswith("list: done - ")
    assert cli.main(["list", "--json"]) == 0
    checked(capsys.readouterr().out, 0)


def test_the_scripts_are_the_verbs(rows: Path, tmp_path: Path) -> None:
    """A script started from another folder, without an installed package, gives the answer of the console command."""
    flags = [*TINY, "--data", str(rows), "--out", str(tmp_path / "o"), "--dry-run"]
    answers = []
    for start in (SCRIPT, [sys.executable, str(ROOT / "scripts" / "finetune_cli.py"), "run"]):
        done = subprocess.run([*start, *flags], capture_output=True, text=True, cwd=tmp_path, check=True)
        answers.append(checked(done.stdout, 0))
        for changing in ("estimates", "checks"):  # what is free changes between the two
            del answers[-1]["data"][changing]
    assert answers[0] == answers[1]


def test_explain_error_knows_codes_texts_and_files(command: Any, tmp_path: Path) -> None:
    assert command("explain-error", "out_of_memory")[0]["data"]["hint_id"] == "out_of_memory"
    assert (
        command("explain-error", "OSError: [Errno 28] No space left on device")[0]["data"]["hint_id"]
        == "disk_full"
    )
    (tmp_path / "x.log").write_text(
        "Traceback (most recent call last):\n  File \"a\"\nModuleNotFoundError: No module named 'foo'\n"
    )
    answer, code = command("explain-error", str(tmp_path / "x.log"))
    assert (code, answer["data"]["hint_id"]) == (0, "missing_package")
    assert command("explain-error", "never seen before")[0]["status"] == "unknown"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--chat-template", "nope"], "file_missing"),
        (["--chat-template-args", "a"], "bad_value"),
        (["--map", "prompt"], "bad_value"),
        (["--domain", "nope"], "file_missing"),
        (["--domain", "x" * 300], "file_missing"),
        (["--out", "o/" + "x" * 300], "bad_path"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(flags: list[str], code: str, command: Any, rows: Path) -> None:
    answer, exit_code = command("plan", *TINY, "--data", str(rows), *flags)
    assert answer["errors"][0]["code"] == code
    assert exit_code == answer_exit_code(code)


def answer_exit_code(code: str) -> int:
    return EXIT_CODES[code]


def test_a_long_line_of_text_is_no_path(command: Any) -> None:
    text = "RuntimeError: size mismatch for model.embed_tokens.weight: " + "copying a param " * 30 + "a/b"
    answer, exit_code = command("explain-error", text)
    assert (answer["status"], exit_code) in (("known", 0), ("unknown", 0))


def test_a_damaged_entry_of_the_index_costs_that_entry_alone(command: Any) -> None:
    home = Path(os.environ["FINETUNE_HOME"]) / "runs"
    home.mkdir(parents=True, exist_ok=True)
    (home / "bad.json").write_text("x")
    assert command("list")[1] == 0
    answer, exit_code = command("status", "bad")
    assert (answer["errors"][0]["code"], exit_code) == ("run_missing", 3)


def test_usual_names_of_other_programs_are_understood_as_suggestions(command: Any, rows: Path) -> None:
    answer, exit_code = command("plan", *TINY, "--data", str(rows), "--lr", "1")
    assert exit_code == 2
    assert "learning" in json.dumps(answer["errors"])


def test_a_flag_of_the_other_kind_of_evaluation_is_refused(
    command: Any, tmp_path: Path, flags: list[str]
) -> None:
    (tmp_path / "c.yaml").write_text("eval_rows: 3\n")
    idle = {
        "adapter": [str(tmp_path), "--adapter", "a"],
        "config": [str(tmp_path), "--config", str(tmp_path / "c.yaml")],
        "checkpoint": [*flags, "--checkpoint", "4"],
        "base": [*flags, "--base"],
    }
    for name, argv in idle.items():
        for more in ([], ["--detach"]):
            answer, code = command("evaluate", *argv, *more)
            found = [(error["code"], error["evidence"]["setting"]) for error in answer["errors"]]
            assert (code, found) == (2, [("setting_without_effect", name)]), answer["summary"]


def test_settings_beside_a_run_are_those_of_its_method(
    command: Any, standin: Standin, rows: Path, tmp_path: Path
) -> None:
    argv = ["run", *GRPO, "--data", str(rows), "--engine", "local", "--verifier", "exact"]
    assert standin(*argv, "--out", str(tmp_path / "g"), how="steps:1")[1] == 0
    for flags in (["--verifier", "nothing"], ["--method", "grpo", "--verifier", "nothing"]):
        answer, code = command("evaluate", str(tmp_path / "g"), *flags)
        assert (code, answer["errors"][0]["code"]) == (2, "bad_value"), answer["summary"]
    answer, code = command("evaluate", str(tmp_path / "g"), "--verfier", "exact")
    assert (code, answer["errors"][0]["code"]) == (2, "unknown_setting")
