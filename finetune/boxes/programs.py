"""A Python of this machine with its packages, as commands in a box may use it (an agent program in a venv, say).

Rule: what a box reads is named by places of the box, since the real folders may be closed to the box's user.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import FinetuneError

_ASK = "import json, sys; print(json.dumps([sys.base_prefix, [path for path in sys.path if path], sys.version_info[:2]]))"


@dataclass(frozen=True)
class Program:
    """python: the interpreter by its place in the box; reads and environment: what Box.run is given for it."""

    python: str
    reads: dict[str, Path]
    environment: dict[str, str]


def python_program(python: Path, place: str = "/opt/agent") -> Program:
    """Return how a box runs this interpreter with the packages that it finds here, also those of editable installs by path.

    Its base may lie where the box's user may not enter (/root, a home): it is read at `place`. Raises missing_package
    where the interpreter does not run.
    """
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
        base, paths, version = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise FinetuneError("missing_package", f"{python} does not run as a Python: {error}") from error
    name = f"bin/python{version[0]}.{version[1]}"
    reads: dict[str, Path] = {}
    environment: dict[str, str] = {}
    inside = base
    if not Path(base).is_relative_to("/usr"):
        inside = f"{place}/base"
        reads[inside] = Path(base)
        environment["LD_LIBRARY_PATH"] = f"{inside}/lib"
    packages = [path for path in map(Path, paths) if path.is_dir() and not path.is_relative_to(base)]
    for index, path in enumerate(packages):
        reads[f"{place}/packages{index}"] = path
    environment["PYTHONPATH"] = ":".join(f"{place}/packages{index}" for index in range(len(packages)))
    return Program(f"{inside}/{name}", reads, environment)
