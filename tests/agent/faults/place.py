"""Where a fault is caused: a folder with rows, and the command called on it as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.folder import RunFolder
from agent.processes import wait_until
from tests.agent.calls import checked

ROOT = Path(__file__).parents[3]
LIMIT_S = 120
PLAIN = {"--device": "cpu", "--dtype": "fp32", "--threads": "1", "--learning-rate": "1e-2"}


class WarmCommand:
    """The process of warm.py, which answers each command from a fork of itself."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.faults.warm"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(self, request: dict[str, Any]) -> int:
        """Start a command and return its process id; its answer is in the file `out` once `out`.code is there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Call:
    """A command under way."""

    pid: int
    out: Path

    def result(self) -> tuple[dict[str, Any], int]:
        """Wait for its end; return the answer and the exit code."""
        code = Path(f"{self.out}.code")
        assert wait_until(code.exists, LIMIT_S, 0.02), Path(f"{self.out}.err").read_text()[-3000:]
        return checked(self.out.read_text(), int(code.read_text())), int(code.read_text())


@dataclass
class Place:
    """A folder of a test's own. root, path: what the command takes for the machine's files and for PATH."""

    folder: Path
    warm: WarmCommand
    environ: dict[str, str]
    root: Path | None = None
    calls: int = 0
    model: str = "builtin:tiny"
    out: Path = field(init=False)
    rows: Path = field(init=False)

    def __post_init__(self) -> None:
        self.out, self.rows = self.folder / "run", self.folder / "rows.jsonl"
        self.write_rows(*({"prompt": f"Say {n}.", "completion": f"Number {n}!"} for n in range(12)))

    def write_rows(self, *rows: Any) -> None:
        """Write the rows, objects or lines as they are."""
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        self.rows.write_text("".join(line + "\n" for line in lines))

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def start(self, *argv: str) -> Call:
        self.calls += 1
        out = self.folder / f"answer{self.calls}.json"
        asked = {"argv": argv, "cwd": str(self.folder), "environ": self.environ, "out": str(out)}
        return Call(self.warm.start(asked | {"root": self.root and str(self.root)}), out)

    def call(self, *argv: str) -> tuple[dict[str, Any], int]:
        return self.start(*argv).result()

    def settings(self, *flags: str, method: str = "sft") -> list[str]:
        """Return the flags of a small run; those that are given stand in place of ours."""
        own = {"--method": method, "--model": self.model, "--data": str(self.rows), "--out": str(self.out)}
        usual = [word for pair in (own | PLAIN).items() if pair[0] not in flags for word in pair]
        return [*usual, *flags]

    def planned(self, *flags: str, full: bool = False, method: str = "sft") -> tuple[dict[str, Any], int]:
        """Plan a run."""
        return self.call(
            "plan", *self.settings(*flags, method=method), "--checks", "full" if full else "quick"
        )

    def checked_in_full(self, *flags: str, method: str = "sft") -> tuple[dict[str, Any], int]:
        return self.planned(*flags, full=True, method=method)

    def trained(self, *flags: str, method: str = "sft") -> tuple[dict[str, Any], int]:
        return self.start_training(*flags, method=method).result()

    def start_training(self, *flags: str, method: str = "sft") -> Call:
        return self.start("run", *self.settings(*flags, method=method))

    def grpo(self, verifier: str, *flags: str) -> list[str]:
        """Return flags of a small run of grpo that samples in its own process, scored by Python code in a file."""
        path = self.write("verifier.py", verifier)
        small = ["--engine", "local", "--group-size", "4", "--global-batch-size", "8"]
        return [*small, "--max-completion-tokens", "4", "--verifier", f"{path}:score", *flags]

    def wait_for_step(self, step: int) -> None:
        metrics = RunFolder(self.out).metrics
        assert wait_until(
            lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step, LIMIT_S, 0.02
        )

    def pid_of_rank(self, rank: int) -> int:
        return int(json.loads((self.out / "heartbeat" / f"rank{rank}").read_text())["pid"])

    def age_logs(self, names: Sequence[str]) -> None:
        """Set the times of logs so that the first named was written first."""
        for place, name in enumerate(names):
            stamp = time.time() - 100 + place
            os.utime(self.folder / name, (stamp, stamp))
