"""The row of the tests that are too long for `make test`: they are marked `proof`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from proof.claims import ROOT, Claim, Figure

_PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "proof"]


def long_tests(folder: Path, root: Path = ROOT) -> list[Figure]:
    """Run all that are collected; a skipped one does not count as passed, and is printed with its reason."""
    collected = num_collected(root)
    report = folder / "tests.xml"
    done = subprocess.run(
        [*_PYTEST, f"--basetemp={folder / 'tests'}", f"--junitxml={report}"],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout[-3000:])
    ended = outcomes(report)
    for name, reason in ended["skipped"].items():
        print(f"skipped: {name}: {reason}")
    return [
        Claim("exit_code", done.returncode, "==", 0),
        Claim("collected", collected, ">", 0),
        Claim("passed", len(ended["passed"]), "==", collected),
        Claim("skipped", len(ended["skipped"]), "==", 0),
        Claim("failed", len(ended["failed"]), "==", 0),
    ]


def num_collected(root: Path) -> int:
    """Return how many tests bear the mark; raises RuntimeError where they cannot be collected."""
    done = subprocess.run(
        [*_PYTEST, "--collect-only"], cwd=root, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the tests cannot be collected: {done.stdout[-2000:]}")
    return sum("::" in line for line in done.stdout.splitlines())


def outcomes(report: Path) -> dict[str, dict[str, str]]:
    """Return the tests of a JUnit report by how they ended: name -> reason. A test that fails and breaks down is one."""
    found: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        for kind, tags in (("failed", ("failure", "error")), ("skipped", ("skipped",))):
            if (
                ended := next((one for tag in tags if (one := case.find(tag)) is not None), None)
            ) is not None:
                found[kind][name] = ended.get("message") or ""
                break
        else:
            found["passed"][name] = ""
    return found
