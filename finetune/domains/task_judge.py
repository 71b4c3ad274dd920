"""What runs in a verifier's box: carries out the verifier of a task and prints what it found, once, at the end.

Rule: it imports nothing of ours, since the Python of a box sees the standard library alone: its text is handed to that
Python (`-c`) with what it is told as JSON. stdout carries nothing else; what the verifier prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import subprocess
import sys
import tempfile
import traceback

_PR_SET_DUMPABLE = 4
_MOST_BYTES = 1 << 16
_FILES = ("reward.txt", "reward.json")


def judge(told: dict) -> None:
    """told: script (its path in the box), is_shell. Prints {exit_code, files} of a shell script, or {tests} of a test file."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)  # nobody reads our memory or takes our stdout
    out = os.dup(1)
    os.dup2(2, 1)
    found = _run_script(told["script"]) if told["is_shell"] else {"tests": _run_tests(told["script"])}
    os.write(out, json.dumps(found).encode())


def _run_script(path: str) -> dict:
    """Run it with an empty folder of its own for the reward: what an agent left is never taken for one."""
    place = os.environ["TMPDIR"]  # said, or Python would take the workspace where it cannot write to /tmp
    with tempfile.TemporaryDirectory(dir=place) as folder:
        environment = os.environ | {"REWARD_DIR": folder}
        done = subprocess.run(["sh", path], env=environment, stdin=subprocess.DEVNULL, check=False)
        return {"exit_code": done.returncode, "files": {name: _text(folder, name) for name in _FILES}}


def _text(folder: str, name: str) -> str | None:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{name} holds more than {_MOST_BYTES} bytes")
    return content.decode(errors="replace")


def _run_tests(path: str) -> dict:
    """Call each function test_* in the order of the file; one that raises has failed.

    A file that cannot be run raises, and so does a test whose call runs nothing: a generator or a coroutine.
    """
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    names: dict = {"__name__": "test_outputs", "__file__": path}
    exec(code, names)
    results = {}
    for name, value in list(names.items()):
        if name.startswith("test_") and callable(value):
            try:
                given = value()
            except Exception:
                traceback.print_exc()
                results[name] = False
            else:
                if inspect.isgenerator(given) or inspect.isasyncgen(given) or inspect.isawaitable(given):
                    raise TypeError(f"{name} gives a {type(given).__name__}, of which nothing was run")
                results[name] = True
    return results


if __name__ == "__main__":
    judge(json.loads(sys.argv[1]))
