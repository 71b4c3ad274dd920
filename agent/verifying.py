"""Verifiers as settings name them: a known name or FILE.py:function, each with an optional weight behind.

Rule: a file is read, never run; what it does is found out by the full checks, in a process of its own.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.knobs import unknown_name

NAMES = (
    "auto",
    "domain",
    "exact",
    "numeric",
    "regex",
    "choice",
    "json-schema",
    "math",
    "python-tests",
    "reasoning-gym",
)
_FILE = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)(?P<weight>:[-+.\w]+)?")
_WEIGHTED = re.compile(r"(?P<name>.*?)(:(?P<weight>\d+(\.\d+)?))?")


@dataclass(frozen=True)
class VerifierFile:
    """A function of a user's file; weight is the text behind it with its colon, or nothing."""

    file: str
    function: str
    weight: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}{self.weight}"


def verifier_file(spec: str) -> VerifierFile | None:
    """Return the file that an entry of --verifier names, or None where it is a name."""
    found = _FILE.fullmatch(spec)
    return VerifierFile(found["file"], found["function"], found["weight"] or "") if found else None


def verifier_problems(specs: Sequence[str]) -> Iterator[FinetuneError]:
    """Yield what can be seen without running anything: unknown names, bad weights, missing files and functions."""
    for spec in specs:
        own = verifier_file(spec)
        found = _WEIGHTED.fullmatch(own.weight if own else spec)
        name = found["name"] if found else ""
        if own:
            yield from _file_problems(own)
            if name:
                text = f"verifier: the weight in {spec!r} is no number of 0 or more"
                yield FinetuneError("bad_value", text, setting="verifier")
        elif name not in NAMES:
            text = f"verifier {unknown_name(name, list(NAMES))}; there are {', '.join(NAMES)} and FILE.py:function"
            yield FinetuneError(
                "bad_value", text.replace("no such setting", "no such verifier"), setting="verifier"
            )


def _file_problems(own: VerifierFile) -> Iterator[FinetuneError]:
    if not os.path.isfile(own.file):
        text = f"verifier: {own.file} is not there"
        yield FinetuneError("file_missing", text, setting="verifier", file=own.file)
        return
    try:
        names = _defined(ast.parse(Path(own.file).read_bytes(), own.file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        text = f"verifier: {own.file}:{line or 1} is no Python: {error}"
        yield FinetuneError("bad_value", text, setting="verifier", file=own.file, line=line)
        return
    if own.function not in names:
        text = f"verifier: {own.file} has no function {own.function}; it has {', '.join(sorted(names)) or 'none'}"
        yield FinetuneError("bad_value", text, setting="verifier", file=own.file)


def _defined(module: ast.Module) -> set[str]:
    """Return what a module binds at its top: functions, classes, assigned and imported names."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def first_function(text: str) -> str:
    """Return the name of the first public function of a module."""
    functions = [
        node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return next(name for name in functions if not name.startswith("_"))


def verifier_content(specs: Sequence[str]) -> list[str]:
    """Return the entries with each file replaced by its digest: what they mean, wherever the files lie."""
    return [_content(verifier_file(spec), spec) for spec in specs]


def _content(own: VerifierFile | None, spec: str) -> str:
    if own is None or not os.path.isfile(own.file):
        return spec
    digest = hashlib.sha256(Path(own.file).read_bytes()).hexdigest()
    return f"{digest}:{own.function}{own.weight}"
