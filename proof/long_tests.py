"""The row of the tests that are too long for `make test`: they are marked `proof`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from proof.claims import ROOT, Claim


def long_tests(folder: Path) -> list[Claim]:
    """Run them all; a skipped one does not count as passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "proof", f"--basetemp={folder / 'tests'}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout[-3000:])
    passed = re.search(r"(\d+) passed", done.stdout)
    return [
        Claim("exit_code", done.returncode, "==", 0),
        Claim("passed", int(passed[1]) if passed else 0, ">=", 11),
    ]
