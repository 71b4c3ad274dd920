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
    monkeypatch.setattr(setup, "look", lambda: "3.11.7")
    assert not setup.is_current()
    stamp.write_text(json.dumps({"digest": setup.source_digest(), "python": "3.11.7"}))
    assert setup.is_current()
    monkeypatch.setattr(setup, "look", lambda: "")  # a package is gone
    assert not setup.is_current()
    monkeypatch.setattr(setup, "look", lambda: "3.11.7")
    stamp.write_text(json.dumps({"digest": "of yesterday", "python": "3.11.7"}))
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
