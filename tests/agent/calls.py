"""Calling the console command in tests: what its answers are held to, and a process of its own with stand-in children."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.folder import RunFolder, check_against_schema
from agent.processes import wait_until
from agent.render import MOST_CHARACTERS
from agent.system import Device, Machine

STANDIN = [sys.executable, str(Path(__file__).with_name("standin.py"))]
SLOW = "steps:50,pause:0.2"
CPU = Machine("here", 8, 32 << 30, 16 << 30, cpu_bf16=True, shared_memory=(16 << 30, 15 << 30))
GPUS = tuple(Device(str(index), "H", 80 << 30, 79 << 30) for index in (0, 1, 2, 3))
CUDA = replace(CPU, devices=GPUS)
TINY = ["--method", "sft", "--model", "builtin:tiny", "--device", "cpu"]
Caller = Callable[..., dict[str, Any]]  # of tools
GRPO = ["--method", "grpo", *TINY[2:]]


def checked(text: str, code: int) -> dict[str, Any]:
    """Return the answer that was printed, held to the contract: one object, its schema, its size, ok as the exit code."""
    assert len(text) <= MOST_CHARACTERS + 1
    assert text.endswith("\n")
    assert text.count("\n") == 1
    answer: dict[str, Any] = json.loads(text)
    check_against_schema("answer", answer)
    assert answer["ok"] == (code == 0)
    return answer


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


def document(path: Path, kind: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    check_against_schema(kind, value)
    return value


def wait_for_step(folder: RunFolder, step: int, seconds: float = 20) -> None:
    def is_there() -> bool:
        return folder.metrics.exists() and folder.metrics.read_bytes().count(b"\n") >= step

    assert wait_until(is_there, seconds)


def codes(answer: dict[str, Any]) -> list[str]:
    return [error["code"] for error in answer["errors"]]
