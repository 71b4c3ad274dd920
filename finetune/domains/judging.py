"""What runs in a verifier process: loads the verifiers, calls them, and says in plain values what came of it.

Rule: this process runs foreign code, so it answers over a socket that its children do not inherit, ends what a call
left running, and dies with the process that started it. Whether a value is a reward is decided here, once for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import json
import math
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.domains.answers import BUILTINS
from finetune.errors import FinetuneError

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TRACEBACK_CHARACTERS = 1500


@dataclass(frozen=True)
class Source:
    """Where a verifier comes from: a built-in one with its options, or a function of a file.

    by_position: called as score(row, completion), as a domain's file has it, instead of by the names of its parameters.
    """

    name: str
    file: str | None = None
    function: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    by_position: bool = False


@dataclass(frozen=True)
class Kind:
    """How a verifier wants to be called: with all answers at once, as a coroutine; and whether its file has right(row)."""

    is_batched: bool = False
    is_async: bool = False
    has_right: bool = False


@dataclass(frozen=True)
class Scored:
    """What one verifier says of one answer, as JSON values. parts: "" for a number, else the names of a dict."""

    status: str
    parts: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None


class BrokenContract(Exception):
    """A function returned what no answer can excuse: a text, a list of another length."""


class Judge:
    """One verifier, loaded."""

    def __init__(self, source: Source, seconds: float) -> None:
        self.source, self.seconds = source, seconds
        self._right: Callable[..., Any] | None = None
        self._runner = asyncio.Runner()
        if source.file is None:
            score = BUILTINS[source.name].make(source.options)
            self._function: Callable[..., Any] = lambda row, completion: score(row, completion)
            by_position = True
        else:
            module = _imported(Path(source.file))
            self._function = getattr(module, source.function or "", None)  # type: ignore[assignment]
            if not callable(self._function):
                raise FinetuneError("bad_verifier", f"{source.file} has no function {source.function}")
            self._right = getattr(module, "right", None)
            by_position = source.by_position
        self._parameters = {} if by_position else dict(inspect.signature(self._function).parameters)
        call = self._function if inspect.isroutine(self._function) else type(self._function).__call__
        self.kind = Kind(
            "completions" in self._parameters, inspect.iscoroutinefunction(call), callable(self._right)
        )

    def right_answers(self, answers: Sequence[dict[str, Any]]) -> list[Any]:
        """Return what the file's right(row) says of each row: the text of an answer that is right, or None."""
        assert self._right is not None, "asked only where there is one"
        found = [self._right(dict(answer["row"])) for answer in answers]
        if bad := [value for value in found if value is not None and not isinstance(value, str)]:
            raise BrokenContract(f"right() gave {type(bad[0]).__name__}, where text or None belongs")
        return found

    def scored(self, answers: Sequence[dict[str, Any]]) -> list[Scored]:
        """Score answers, each a dict of row, completion, prompt, stopped and place; raises BrokenContract.

        Whatever else the function raises becomes the error of the answer, or of all where it is batched.
        """
        if self.kind.is_batched:
            return self._batch(answers)
        if self.kind.is_async:
            return self._runner.run(self._together(answers))
        return [self._alone(answer) for answer in answers]

    def _alone(self, answer: dict[str, Any]) -> Scored:
        try:
            return self._as_scored(self._waited(self._called(answer)))
        except BrokenContract:
            raise
        except BaseException as error:
            return self._failed(error, answer["place"])

    async def _together(self, answers: Sequence[dict[str, Any]]) -> list[Scored]:
        async def one(answer: dict[str, Any]) -> Scored:
            limit = asyncio.timeout(self.seconds)
            try:
                async with limit:
                    return self._as_scored(await self._called(answer))
            except BrokenContract:
                raise
            except BaseException as error:
                return Scored("timeout") if limit.expired() else self._failed(error, answer["place"])

        return list(await asyncio.gather(*(one(answer) for answer in answers)))

    def _batch(self, answers: Sequence[dict[str, Any]]) -> list[Scored]:
        try:
            values = self._waited(self._called(_merged(answers)))
        except BrokenContract:
            raise
        except BaseException as error:
            return [self._failed(error, answer["place"]) for answer in answers]
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple):
            text = f"expected a list of {len(answers)} rewards, got {type(values).__name__}"
            raise BrokenContract(text)
        if len(values) != len(answers):
            raise BrokenContract(f"expected {len(answers)} rewards, got {len(values)}")
        return [self._as_scored(value) for value in values]

    def _waited(self, value: Any) -> Any:
        return self._runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def _called(self, answer: dict[str, Any]) -> Any:
        if not self._parameters:
            return self._function(answer["row"], answer["completion"])
        positional, named = self._arguments(answer)
        return self._function(*positional, **named)

    def _arguments(self, answer: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments that the parameters' names ask for: the answer's own, then columns of the row.

        A function of all answers has plurals (completions, rows, prompts) and columns as lists.
        """
        own = {name: value for name, value in answer.items() if name not in ("columns", "place")}
        columns = answer["columns"] if "columns" in answer else answer["row"]
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given = {**columns, **own}
                named |= {key: value for key, value in given.items() if key not in self._parameters}
            elif name in own or name in columns:
                value = own[name] if name in own else columns[name]
                if parameter.kind is parameter.POSITIONAL_ONLY:
                    positional.append(value)
                else:
                    named[name] = value
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
                raise LookupError(
                    f"its parameter {name!r} is neither one of {', '.join(own)} nor a column of the row"
                )
        return positional, named

    def _as_scored(self, value: Any) -> Scored:
        """Return what a function gave as rewards; raises BrokenContract where it is no reward at all."""
        if isinstance(value, dict):
            if not value or not all(isinstance(name, str) for name in value):
                raise BrokenContract("a dict of rewards needs names")
            parts = {name: self._number(part) for name, part in value.items()}
        else:
            parts = {"": self._number(value)}
        bad = {name: part for name, part in parts.items() if part is not None and not math.isfinite(part)}
        if bad:
            finite = {name: None if name in bad else part for name, part in parts.items()}
            told = ", ".join(f"{name or 'the reward'} is {part}" for name, part in bad.items())
            return Scored("invalid", finite, f"{self.source.name}: {told}")
        return Scored("unscorable" if None in parts.values() else "scored", parts)

    def _number(self, value: Any) -> float | None:
        if value is not None and not isinstance(value, str | bytes) and hasattr(value, "item"):
            with contextlib.suppress(ValueError, RuntimeError):  # a tensor or array of more than one element
                value = value.item()
        if value is None:
            return None
        if isinstance(value, bool | int | float):
            return float(value)
        raise BrokenContract(
            f"it gave {type(value).__name__} ({value!r:.80}), where a number, a dict of numbers or None belongs"
        )

    def _where(self, place: str) -> str:
        return f"{self.source.name}, {place}" if place else self.source.name

    def _failed(self, error: BaseException, place: str) -> Scored:
        head = f"{self._where(place)}: {type(error).__name__}: {str(error)[:500]}"
        trace = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
        return Scored("error", error=f"{head}\n{trace}")


async def _awaited(value: Any) -> Any:
    return await value


def _merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answers as one call of a batched function sees them; a column that a row lacks is None there."""
    names = dict.fromkeys(name for answer in answers for name in answer["row"])
    return {
        "completions": [answer["completion"] for answer in answers],
        "rows": [answer["row"] for answer in answers],
        "prompts": [answer["prompt"] for answer in answers],
        "stopped": [answer["stopped"] for answer in answers],
        "columns": {name: [answer["row"].get(name) for answer in answers] for name in names},
        "place": answers[0]["place"],
    }


def _imported(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))  # its neighbours are its own
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FinetuneError("bad_verifier", f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def serve(channel: socket.socket) -> None:
    """Answer jobs until the other side is gone. The first message holds the sources, and its reply their kinds."""
    reader = channel.makefile("rb")
    judges, reply = _loaded(pickle.load(reader))
    _send(channel, reply)
    kept = _children()
    while True:
        try:
            job = pickle.load(reader)
        except EOFError:
            return
        _send(channel, _done(judges[job["verifier"]], job))
        _end_children(kept)


def _loaded(told: dict[str, Any]) -> tuple[list[Judge], dict[str, Any]]:
    judges: list[Judge] = []
    for source in told["sources"]:
        try:
            judges.append(Judge(source, told["seconds"]))
        except FinetuneError as error:
            return [], {"code": error.code, "message": f"{source.name}: {error.message}"}
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
            text = f"{source.name}: it cannot be loaded: {type(error).__name__}: {error}\n{trace}"
            return [], {"code": "bad_verifier", "message": text}
    return judges, {"kinds": [vars(judge.kind) for judge in judges]}


def _done(judge: Judge, job: dict[str, Any]) -> dict[str, Any]:
    try:
        if job["what"] == "right":
            return {"results": judge.right_answers(job["answers"])}
        return {"results": [vars(scored) for scored in judge.scored(job["answers"])]}
    except BrokenContract as error:
        return {"broken": f"{judge.source.name}: {error}"}
    except BaseException as error:
        return {"broken": f"{judge.source.name}: {type(error).__name__}: {error}"}
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()


def _send(channel: socket.socket, reply: dict[str, Any]) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")


def _children() -> set[int]:
    """Return the pids of our children, those included whose own parent is gone."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def _end_children(kept: Iterable[int]) -> None:
    """Kill and collect what a call left running; what was there before the first call stays."""
    known = set(kept)
    while left := _children() - known:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def main() -> None:
    """Serve on the socket that argv names, for the process that it names: the whole life of a verifier process."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        return
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    serve(channel)
