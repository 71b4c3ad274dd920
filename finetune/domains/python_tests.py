"""The verifier python-tests: the Python code of an answer is run on the row's tests, in a box.

Rule: an answer is right where its program does what the tests ask AND ends as it should; a program that raises, hangs,
leaves early or prints the right thing before it fails is wrong. A box that fails is an error, never a wrong answer.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.boxes.bubblewrap import open_box
from finetune.boxes.launching import Limits
from finetune.boxes.process import Box, new_workspace, read_back
from finetune.data.formats import parsed_json
from finetune.domains.base import Score, Values
from finetune.domains.text import as_text
from finetune.errors import FinetuneError, boundary

OPTIONS = ("box", "memory_mb", "partial", "seconds")
_FENCED = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_RESULT = "result.json"
# Runs in the box. The tests and a secret come on stdin, which is read before any code of the answer: only who ran all
# tests to the end can write the secret down. (Code that looks through its callers' frames could find it; a box keeps
# such code from us, not from cheating.) sys.exit and os._exit in the answer leave no result, hence are wrong.
_RUNNER = """
import json, os, sys
def run():
    told = json.loads(sys.stdin.read())
    path = os.path.abspath(told["result"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    names = {"__name__": "answer"}
    passed = 0
    try:
        for part in ("setup", "answer"):
            exec(compile(told.pop(part), part, "exec"), names)
        is_run = True
    except BaseException:
        import traceback
        traceback.print_exc()
        is_run = False
    for test in told["tests"] if is_run else []:
        try:
            exec(compile(test, "test", "exec"), names)
        except BaseException:
            import traceback
            traceback.print_exc()
        else:
            passed += 1
    with open(path, "w") as file:
        json.dump({"secret": told["secret"], "passed": passed}, file)
    os._exit(0)
run()
"""


@dataclass(frozen=True)
class _Case:
    """What a program reads, and what it must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class _Bench:
    """Where programs run, and how long all programs of one answer may take together."""

    box: Box
    limits: Limits


def python_tests_score(options: dict[str, str]) -> Score:
    """Return the verifier of programs.

    Rows have `tests` (Python code, or a list of it, run after the answer in its namespace; `setup` runs before), or
    `cases` (a list of {stdin, stdout}), or `stdout` (and `stdin`) of one case: white space at the ends of lines aside,
    that is what the program must print, and its exit code must be 0. Options: box (bubblewrap, or process: no
    isolation), partial=true (the share of tests passed instead of all or nothing), seconds (for all tests of one
    answer), memory_mb. Raises bad_value and no_sandbox.
    """
    seconds = _number(options, "seconds", 10.0)
    memory = int(_number(options, "memory_mb", 1024)) << 20
    partial = options.get("partial", "false")
    if partial not in ("true", "false"):
        raise _bad("partial", partial, "true or false")
    box = open_box(options.get("box", "bubblewrap"))
    bench = _Bench(box, Limits(seconds, memory_bytes=memory, processes=32))

    def score(values: Values, completion: str) -> float:
        passed, total = _passed(bench, values, code_of(completion))
        return passed / total if partial == "true" else float(passed == total)

    return score


def code_of(completion: str) -> str:
    """Return the Python code of an answer: its last fenced block, also one that was cut, or all of it."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def _passed(bench: _Bench, values: Values, code: str) -> tuple[int, int]:
    tests, cases = _tests(values), _cases(values)
    if tests:
        return _run_tests(bench, code, tests, values), len(tests)
    if cases:
        return _run_cases(bench, code, cases), len(cases)
    text = f"a row needs tests, cases or stdout; its columns are {', '.join(values) or 'none'}"
    raise FinetuneError("unknown_columns", text, columns_found=list(values))


def _run_tests(bench: _Bench, code: str, tests: list[str], values: Values) -> int:
    secret = secrets.token_hex(16)
    setup = as_text(values["setup"], "setup") if values.get("setup") is not None else ""
    told = {"result": _RESULT, "secret": secret, "setup": setup, "answer": code, "tests": tests}
    with new_workspace({"runner.py": _RUNNER}) as workspace:
        bench.box.run(_python(bench, "runner.py"), workspace, bench.limits, stdin=_utf8(json.dumps(told)))
        try:
            result = json.loads(read_back(workspace, _RESULT) or b"null")
        except ValueError:
            return 0
    is_ours = isinstance(result, dict) and result.get("secret") == secret
    return int(result["passed"]) if is_ours else 0


def _run_cases(bench: _Bench, code: str, cases: list[_Case]) -> int:
    end = time.monotonic() + bench.limits.seconds
    passed = 0
    for case in cases:
        left = end - time.monotonic()
        if left <= 0:
            break
        # Each in a folder of its own, so that no case finds what an earlier one left.
        with new_workspace({"answer.py": _utf8(code)}) as workspace:
            passed += _is_passed(bench, workspace, case, left)
    return passed


def _is_passed(bench: _Bench, workspace: Path, case: _Case, seconds: float) -> bool:
    command = _python(bench, "answer.py")
    result = bench.box.run(
        command, workspace, replace(bench.limits, seconds=seconds), stdin=_utf8(case.stdin)
    )
    is_whole = result.exit_code == 0 and not result.truncated
    return is_whole and _even(result.stdout) == _even(case.stdout)


def _python(bench: _Bench, file: str) -> list[str]:
    return [bench.box.python, "-I", "-B", "-X", "utf8", file]


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")


def _even(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()


def _tests(values: Values) -> list[str]:
    value = values.get("tests")
    if value is None:
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value, "tests")
    listed = value if isinstance(value, list) else [value]
    return [as_text(test, "tests") for test in listed]


def _cases(values: Values) -> list[_Case]:
    listed = _parsed(values.get("cases"), "cases")
    if listed is None:
        if values.get("stdout") is None:
            return []
        return [_Case(as_text(values.get("stdin") or "", "stdin"), as_text(values["stdout"], "stdout"))]
    if not isinstance(listed, list) or not all(
        isinstance(case, dict) and "stdout" in case for case in listed
    ):
        raise FinetuneError("bad_row", "cases must be a list of objects with stdin and stdout")
    return [
        _Case(as_text(case.get("stdin") or "", "stdin"), as_text(case["stdout"], "stdout")) for case in listed
    ]


def _parsed(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    with boundary("bad_row", name):
        return parsed_json(value)


def _number(options: dict[str, str], name: str, default: float) -> float:
    try:
        value = float(options.get(name, default))
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise _bad(name, options[name], "a number above 0")
    return value


def _bad(name: str, value: str, wanted: str) -> FinetuneError:
    return FinetuneError(
        "bad_value", f"verifier_args: {name}: {value!r} is not {wanted}", setting="verifier_args"
    )
