"""Putting skills where an agent program looks for them, and a skill folder alone: it finds the command or tells how to get it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.folder import check_against_schema
from agent.skills import SKILLS, contents, shipped
from scripts.make_docs import ROOT

NAMES = list(shipped())
Command = Callable[..., tuple[dict[str, Any], int]]


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A skill folder copied alone, its evals left behind."""
    return Path(shutil.copytree(SKILLS / "finetune-sft", tmp_path / "somewhere" / "finetune-sft"))


def run_script(folder: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a Python that has no packages of ours beside it, from a folder without a .venv above it."""
    python = os.path.realpath(sys.executable)
    return subprocess.run(
        [python, str(folder / "scripts" / "run.py"), *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": "/nowhere", "HOME": str(folder)} | environ,
    )


def test_a_skill_alone_says_how_to_install_what_it_needs(alone: Path) -> None:
    done = run_script(alone, "doctor")
    answer = json.loads(done.stdout)
    check_against_schema("answer", answer)
    assert (done.returncode, answer["ok"], answer["errors"][0]["code"]) == (4, False, "missing_package")
    assert "make -C DIR setup" in answer["errors"][0]["fix"]
    assert "FINETUNE_COMMAND" in answer["errors"][0]["fix"]


def test_a_skill_alone_takes_no_other_program_of_that_name(alone: Path) -> None:
    other = alone / "bin" / "finetune"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho piano\n")
    other.chmod(0o755)
    assert run_script(alone, "doctor", PATH=str(other.parent)).returncode == 4


def installed_command() -> Path:
    command = Path(sys.executable).with_name("finetune")
    if not command.exists():
        pytest.skip("the package is not installed here")
    return command


@pytest.mark.parametrize("way", ["told", "on the path", "in a .venv above"])
def test_a_skill_alone_hands_over_to_the_command(alone: Path, way: str, tmp_path: Path) -> None:
    command, environ = installed_command(), {"FINETUNE_HOME": str(tmp_path / "state")}
    if way == "told":
        environ["FINETUNE_COMMAND"] = str(command)
    elif way == "on the path":
        environ["PATH"] = f"{command.parent}:/usr/bin:/bin"
    else:
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        shutil.copy(command, tmp_path / ".venv" / "bin" / "finetune")
    done = run_script(alone, "list", **environ)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["command"] == "list"
    assert run_script(alone, "list", "--no-such", **environ).returncode == 2


def test_skills_are_installed_once_and_left_alone_after(
    command: Command, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    answer, code = command("skills", "install")
    assert (code, [row["state"] for row in answer["data"]["skills"]]) == (0, ["installed"] * len(NAMES))
    place = tmp_path / ".agents" / "skills"
    assert sorted(path.name for path in place.iterdir()) == NAMES
    assert contents(place / "finetune-data") == contents(SKILLS / "finetune-data")
    assert not (place / "finetune-data" / "evals").exists()
    again, code = command("skills", "install", "--target", "agents", "--scope", "project")
    assert (code, {row["state"] for row in again["data"]["skills"]}) == (0, {"unchanged"})
    assert again["artifacts"] == answer["artifacts"]


def test_an_installed_skill_finds_the_command_again(
    command: Command, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed_command()
    monkeypatch.setenv("HOME", str(tmp_path))
    answer, _ = command(
        "skills", "install", "--target", "claude", "--scope", "user", "--name", "finetune-data"
    )
    folder = tmp_path / ".claude" / "skills" / "finetune-data"
    assert answer["data"]["skills"][0]["path"] == str(folder)
    done = run_script(folder, "list", FINETUNE_HOME=str(home))
    assert json.loads(done.stdout)["command"] == "list"


def test_a_folder_with_other_content_is_replaced_by_force_alone(command: Command, tmp_path: Path) -> None:
    target = tmp_path / "place"
    own = target / "finetune-sft" / "SKILL.md"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    answer, code = command("skills", "install", "--target", str(target))
    assert (code, [error["code"] for error in answer["errors"]]) == (7, ["target_exists"])
    assert [path.name for path in target.iterdir()] == ["finetune-sft"]
    assert own.read_text() == "mine"
    answer, code = command("skills", "install", "--target", str(target), "--force")
    assert (code, {row["state"] for row in answer["data"]["skills"]}) == (0, {"installed", "replaced"})
    assert contents(target / "finetune-sft") == contents(SKILLS / "finetune-sft")
    assert sorted(path.name for path in target.iterdir()) == NAMES


def test_a_link_is_replaced_and_never_followed(command: Command, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "notes").write_text("kept")
    target = tmp_path / "place"
    target.mkdir()
    (target / "finetune-sft").symlink_to(theirs)
    flags = ("--target", str(target), "--name", "finetune-sft", "--force")
    assert command("skills", "install", *flags)[1] == 0
    assert (theirs / "notes").read_text() == "kept"
    assert not (target / "finetune-sft").is_symlink()


def test_the_skills_themselves_are_never_replaced(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    answer, code = command("skills", "install", "--target", "claude", "--force")
    assert (code, {row["state"] for row in answer["data"]["skills"]}) == (0, {"unchanged"})


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--target", "codex"], "bad_value"),
        (["--name", "finetune-stf"], "bad_value"),
        (["--target", "./place", "--scope", "user"], "setting_without_effect"),
        (["--scope", "world"], "usage"),
    ],
)
def test_what_makes_no_sense_is_refused(command: Command, flags: list[str], code: str) -> None:
    answer, exit_code = command("skills", "install", *flags)
    assert (exit_code, answer["errors"][0]["code"]) == (2, code)


def test_skills_are_listed(command: Command) -> None:
    answer, code = command("skills", "list")
    assert (code, [row["name"] for row in answer["data"]["skills"]]) == (0, NAMES)
    assert all((Path(row["path"]) / "SKILL.md").exists() for row in answer["data"]["skills"])
    answer, code = command("skills", "list", "--force")
    assert (code, answer["errors"][0]["code"]) == (2, "setting_without_effect")
