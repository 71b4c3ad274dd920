"""A real run without what it must not need: a network, whatever the environment says, and packages for reports."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.model.source import resolve_source
from tests.agent.calls import TINY, checked, codes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

# Loaded by every Python before its program: it tells of itself, and refuses to talk to any other machine.
WITNESS = """
import os, sys

FOLDER = os.environ["FINETUNE_WITNESS"]
HERE = {"127.0.0.1", "::1", "localhost", "", None, b"localhost", b"127.0.0.1"}


def note(name, text):
    with open(os.path.join(FOLDER, name), "a") as file:
        file.write(text + "\\n")


def watch(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if host not in HERE:
        note("attempts", f"{event} {host} by {sys.orig_argv}")
        raise OSError(f"{event} {host}: there is no network")


sys.addaudithook(watch)
note("processes", " ".join(sys.orig_argv))
"""
UNIMPORTABLE = ("tensorboard", "matplotlib", "wandb")


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    """Return the folder in which every Python process and every attempt to leave this machine is noted."""
    folder = tmp_path / "witness"
    folder.mkdir()
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(WITNESS)
    for name in UNIMPORTABLE:
        (modules / f"{name}.py").write_text(f"raise ImportError('{name} is not for use here')\n")
    return folder


@pytest.fixture
def command(tmp_path: Path, witness: Path) -> Callable[..., tuple[dict[str, Any], int]]:
    """Return a function that carries out a command of which no variable says that there is no network."""

    def call(*argv: str) -> tuple[dict[str, Any], int]:
        own = {
            "FINETUNE_HOME": "home",
            "FINETUNE_CACHE": "cache",
            "HF_HOME": "hub",
            "FINETUNE_WITNESS": "witness",
        }
        environ = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
        environ |= {name: str(tmp_path / folder) for name, folder in own.items()}
        environ |= {"PYTHONPATH": str(tmp_path / "modules")}
        script = [sys.executable, str(ROOT / "scripts" / "finetune_cli.py")]
        done = subprocess.run([*script, *argv], env=environ, capture_output=True, text=True, check=False)
        return checked(done.stdout, done.returncode), done.returncode

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return builtin:tiny as a folder of its own, as a model is that somebody has fetched."""
    from finetune.model.builtin import write_model  # imports torch

    write_model(resolve_source("builtin:tiny"), tmp_path / "model")
    return tmp_path / "model"


def attempts(witness: Path) -> list[str]:
    path = witness / "attempts"
    return path.read_text().splitlines() if path.exists() else []


def test_the_witness_sees_an_attempt(witness: Path, tmp_path: Path) -> None:
    environ = os.environ | {"FINETUNE_WITNESS": str(witness), "PYTHONPATH": str(tmp_path / "modules")}
    program = "import socket; socket.create_connection(('203.0.113.1', 80), 1)"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=False)
    assert b"there is no network" in done.stderr
    program = "import socket; socket.socket().connect(('203.0.113.1', 80))"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=False)
    assert b"there is no network" in done.stderr
    assert len(attempts(witness)) == 2


def test_a_run_of_a_local_model_never_asks_for_the_network_nor_for_packages_of_reports(
    command: Callable[..., tuple[dict[str, Any], int]], witness: Path, model: Path, rows: Path, tmp_path: Path
) -> None:
    """CA-08, CA-11."""
    out = tmp_path / "out"
    flags = [
        "--method",
        "sft",
        "--model",
        str(model),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--max-steps",
        "2",
    ]
    answer, code = command("run", *flags, "--data", str(rows), "--out", str(out))
    assert (code, answer["status"]) == (0, "succeeded"), answer
    assert (out / "adapter" / "adapter_model.safetensors").exists()
    processes = (witness / "processes").read_text()
    assert all(module in processes for module in ("finetune.probe", "finetune.launch", "finetune.rank"))
    assert attempts(witness) == []


@pytest.mark.proof
def test_what_a_run_reports_with_is_asked_for_before_its_first_step(
    command: Callable[..., tuple[dict[str, Any], int]], rows: Path, tmp_path: Path
) -> None:
    """CA-11: tensorboard is there and cannot be imported."""
    flags = [*TINY, "--data", str(rows), "--max-steps", "2", "--threads", "1", "--report-to", "tensorboard"]
    answer, code = command("run", *flags, "--out", str(tmp_path / "out"))
    assert (code, codes(answer)) == (4, ["missing_package"]), answer
    assert "tensorboard" in json.dumps(answer["errors"][0])
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
