"""The verb `tasks check`: its answer, and its refusals."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from agent.cli import main
from finetune.data.task_files import DESK
from tests.agent.calls import checked

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], int]:
    code = main(["tasks", *argv, "--json"])
    return checked(capsys.readouterr().out, code), code


@needs_bwrap
def test_tasks_that_are_fit_end_with_zero(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    value, code = answer(capsys, "check", "builtin:desk/copy-file")
    assert (code, value["status"], value["data"]["box"]) == (0, "done", "bubblewrap")
    (row,) = value["data"]["tasks"]
    assert (row["name"], row["oracle"]["reward"], row["idle"]["reward"]) == ("copy-file", 1.0, 0.0)


@needs_bwrap
def test_a_task_that_pays_for_nothing_is_named(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DESK / "copy-file", tmp_path / "tasks" / "copy-file")
    (tmp_path / "tasks" / "copy-file" / "verifier" / "test.sh").write_text("exit 0\n")
    monkeypatch.chdir(tmp_path)
    value, code = answer(capsys, "check", "tasks")
    assert (code, value["errors"][0]["code"]) == (3, "task_check_failed")
    assert "doing nothing is worth 1" in str(value["errors"][0])


def test_a_folder_that_is_no_task_is_refused_with_all_problems(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "task.md").write_text("Do.\n")
    value, code = answer(capsys, "check", str(tmp_path))
    assert code == 3
    assert {error["code"] for error in value["errors"]} == {"bad_task"}
    assert len(value["errors"]) == 3


def test_without_a_box_that_isolates_nothing_is_run(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    value, code = answer(capsys, "check", "builtin:desk")
    assert (code, value["errors"][0]["code"]) == (4, "no_sandbox")
    value, code = answer(capsys, "check", "builtin:desk", "--box", "jail")
    assert (code, value["errors"][0]["code"]) == (2, "bad_value")
