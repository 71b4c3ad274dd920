"""Ways to call the console command: here, with what it would print, or as a process of its own with stand-in children."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.folder import check_against_schema
from agent.render import MOST_CHARACTERS

STANDIN = [sys.executable, str(Path(__file__).with_name("standin.py"))]
TINY = ["--method", "sft", "--model", "builtin:tiny", "--device", "cpu"]


def checked(text: str, code: int) -> dict[str, Any]:
    """Return the answer that was printed, held to the contract: one object, its schema, its size, ok as the exit code."""
    assert len(text) <= MOST_CHARACTERS + 1
    assert text.endswith("\n") and text.count("\n") == 1
    answer: dict[str, Any] = json.loads(text)
    check_against_schema("answer", answer)
    assert answer["ok"] == (code == 0)
    return answer


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, Any], int]]:
    """Return a function that carries out a command in this process: (answer, exit code)."""

    def call(*argv: str) -> tuple[dict[str, Any], int]:
        capsys.readouterr()
        code = cli.main(list(argv))
        return checked(capsys.readouterr().out, code), code

    return call


@pytest.fixture
def refused(command: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return a function that plans a run which must be refused: the errors by code; it checks the exit code."""

    def call(*flags: str, code: int) -> dict[str, dict[str, Any]]:
        answer, found = command("plan", *flags)
        assert (found, answer["status"]) == (code, "refused"), answer["summary"]
        return {error["code"]: error for error in answer["errors"]}

    return call


class Standin:
    """The command as a process of its own; its children load no model (see standin.py)."""

    def __init__(self, home: Path) -> None:
        self.environ = os.environ | {"FINETUNE_HOME": str(home)}
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, *argv: str, how: str = "", cwd: Path | None = None, **environ: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*STANDIN, *argv],
            env=self.environ | {"FINETUNE_STANDIN": how} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> tuple[dict[str, Any], int]:
        output, self.stderr = process.communicate(timeout=60)
        return checked(output, process.returncode), process.returncode

    def __call__(self, *argv: str, how: str = "", **options: Any) -> tuple[dict[str, Any], int]:
        return self.finish(self.start(*argv, how=how, **options))


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Standin]:
    caller = Standin(tmp_path / "home")
    yield caller
    for process in caller.started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Return a file of 32 rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"What is {n}?", "completion": str(n)}) + "\n" for n in range(32))
    )
    return path
