"""Importing the heavy packages in a child process, one after the other, and what torch then says of its devices."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.environment import child_environment

_LIMIT_S = 120.0
_MARK = "\x1e"  # before our lines: packages print on stdout too
# A name is told before it is imported: of a package that kills the process nothing is told afterwards.
_CHILD = """
import importlib, json, sys
def tell(**facts):
    print("\\x1e" + json.dumps(facts), flush=True)
for name in sys.argv[1:]:
    tell(begun=name)
    try:
        importlib.import_module(name)
    except Exception as error:
        tell(name=name, error=f"{type(error).__name__}: {error}"[:500])
        break
    tell(name=name, error=None)
torch = sys.modules.get("torch")
if torch is not None and torch.cuda.is_available():
    count = range(torch.cuda.device_count())
    tell(
        architectures=torch.cuda.get_arch_list(),
        devices=[[torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)] for i in count],
        unreachable=[[i, j] for i in count for j in count if i < j and not torch.cuda.can_device_access_peer(i, j)],
    )
"""


@dataclass(frozen=True)
class Imports:
    """What importing told. failed: (package, why) of the first that could not be imported.

    devices: name, major and minor capability of each that torch sees; unreachable: pairs without direct access.
    """

    failed: tuple[str, str] | None = None
    seconds: float = 0.0
    architectures: list[str] = field(default_factory=list)
    devices: list[tuple[str, int, int]] = field(default_factory=list)
    unreachable: list[tuple[int, int]] = field(default_factory=list)


def try_imports(names: Sequence[str], environ: Mapping[str, str]) -> Imports:
    """Import packages in a child, up to the first that fails."""
    began = time.monotonic()
    command = [sys.executable, "-c", _CHILD, *names]
    try:
        done = subprocess.run(
            command,
            env=child_environment(environ, {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"importing takes more than {_LIMIT_S:g} s"
        return Imports((", ".join(names), reason), time.monotonic() - began)
    return _read(done.stdout, done.stderr, done.returncode, time.monotonic() - began)


def _read(output: str, errors: str, returncode: int, seconds: float) -> Imports:
    """Return what the child told; a package that was begun and never told of has ended the process."""
    told: list[dict[str, Any]] = [
        json.loads(line.partition(_MARK)[2]) for line in output.split("\n") if _MARK in line
    ]
    begun = [facts["begun"] for facts in told if "begun" in facts]
    results = {facts["name"]: facts["error"] for facts in told if "name" in facts}
    failed = next(((name, why) for name, why in results.items() if why is not None), None)
    if failed is None and len(results) < len(begun):
        last = (errors.strip().splitlines() or [f"exit code {returncode}"])[-1]
        failed = (begun[-1], last[:500])
    facts = next((facts for facts in told if "architectures" in facts), {})
    return Imports(
        failed,
        seconds,
        facts.get("architectures", []),
        [(name, major, minor) for name, major, minor in facts.get("devices", [])],
        [(one, other) for one, other in facts.get("unreachable", [])],
    )
