"""Verifiers: what --verifier names, and the rewards that they give to sampled answers.

Rule: foreign code (a user's function, a library) runs in worker processes and never here. An answer that is wrong has
a reward of 0; an answer that could not be scored has none, and says why.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from finetune.domains.answers import BUILTINS, checked_package
from finetune.domains.base import Domain
from finetune.domains.judging import Source
from finetune.domains.workers import Job, Outcome, WorkerPool
from finetune.errors import FinetuneError, Problems

Status = Literal["scored", "unscorable", "invalid", "timeout", "error"]
_WORST: tuple[Status, ...] = ("error", "timeout", "invalid", "unscorable", "scored")
_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)(?::(?P<weight>.*))?")
_NAMED = re.compile(r"(?P<name>[^:]+)(?::(?P<weight>.*))?")
_TOGETHER = 64  # answers that one call of a coroutine function's worker waits for together
_GRACE_SECONDS = 2.0
_BOX_GRACE_SECONDS = 10.0  # for setting boxes up, on top of the time that their programs have


@dataclass(frozen=True)
class Answer:
    """One sampled answer: the columns of its row, its text, what was asked, whether it ended by itself, where the row is."""

    values: dict[str, Any]
    completion: str
    prompt: str | list[dict[str, Any]] = ""
    stopped: bool = True
    place: str = ""


@dataclass(frozen=True)
class Reward:
    """What an answer is worth: value = sum of weight * part, or None where any part is None.

    parts holds one entry per verifier, and one per named reward of a function ("mine:score.format"). status: scored;
    unscorable (a verifier said None); invalid (NaN or infinite); timeout; error (it raised, or its process died); the
    worst of all verifiers. error: which verifier and why, with the end of the traceback and of what was printed.
    """

    value: float | None
    parts: dict[str, float | None]
    status: Status
    error: str | None = None


@dataclass(frozen=True)
class Verifier:
    """One entry of --verifier. source is where its process finds it."""

    source: Source
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.source.name


class VerifierSet:
    """The verifiers of a run with their worker processes: a context manager, made by open_verifiers."""

    def __init__(self, verifiers: Sequence[Verifier], pool: WorkerPool, timeout_s: float) -> None:
        self.verifiers = list(verifiers)
        self.pool = pool
        self.timeout_s = timeout_s

    @property
    def names(self) -> list[str]:
        return [verifier.name for verifier in self.verifiers]

    @property
    def weights(self) -> dict[str, float]:
        return {verifier.name: verifier.weight for verifier in self.verifiers}

    def score(self, answers: Sequence[Answer]) -> list[Reward]:
        """Return one reward per answer, in order; may be called from any thread.

        An answer whose verifier raises, dies, hangs or gives NaN costs that answer alone: a function of all answers
        (with a parameter `completions`) is called once with all of them, and where this call fails, once more with
        each alone. Raises bad_verifier where a function breaks its contract: a list of another length
        ("expected 8, got 1"), or a value that is no number.
        """
        parts = self._scored(range(len(self.verifiers)), answers)
        return [_reward(one, self.weights) for one in parts]

    def score_with(self, place: int, answers: Sequence[Answer]) -> list[Reward]:
        """Return the rewards by one verifier (its place in names) alone, with weight 1; raises as score does."""
        parts = self._scored([place], answers)
        return [_reward(one, {self.names[place]: 1.0}) for one in parts]

    def _scored(self, places: Iterable[int], answers: Sequence[Answer]) -> list[list[_Part]]:
        if not answers:
            return []
        given = [_as_given(answer) for answer in answers]
        rewards: list[list[_Part]] = [[] for _ in answers]
        everything = list(range(len(given)))
        jobs = [job for place in places for job in self._jobs(place, everything)]
        while jobs:
            outcomes = self.pool.run([self._job(place, indices, given) for place, indices in jobs])
            again: list[tuple[int, list[int]]] = []
            for (place, indices), outcome in zip(jobs, outcomes, strict=True):
                if _is_lost(outcome) and len(indices) > 1:
                    again += [(place, [index]) for index in indices]
                else:
                    for index, part in zip(
                        indices, self._parts(place, indices, outcome, answers), strict=True
                    ):
                        rewards[index].append(part)
            jobs = again
        return rewards

    def right_answers(self, place: int, answers: Sequence[Answer]) -> list[str | None]:
        """Return what right(row) in the file of one verifier says of these rows; raises bad_verifier."""
        job = Job(place, [_as_given(answer) for answer in answers], self.timeout_s, "right")
        outcome = self.pool.run([job])[0]
        if outcome.results is None:
            why = outcome.broken or outcome.failure
            raise FinetuneError(
                "bad_verifier", f"{self.names[place]}: right(): {why} {outcome.printed}".strip()
            )
        return outcome.results

    def close(self) -> None:
        """End all worker processes, with everything that they started."""
        self.pool.close()

    def __enter__(self) -> VerifierSet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _jobs(self, place: int, indices: list[int]) -> list[tuple[int, list[int]]]:
        kind = self.pool.kinds[place]
        size = len(indices) if kind.is_batched else _TOGETHER if kind.is_async else 1
        return [(place, indices[start : start + size]) for start in range(0, len(indices), size)]

    def _job(self, place: int, indices: list[int], given: list[dict[str, Any]]) -> Job:
        name = self.names[place]
        is_timed = name in BUILTINS and BUILTINS[name].timed
        own = float(self.verifiers[place].source.options["seconds"]) if is_timed else self.timeout_s
        is_together = self.pool.kinds[place].is_async and len(indices) > 1
        grace = _BOX_GRACE_SECONDS if is_timed else _GRACE_SECONDS if is_together else 0.0
        return Job(place, [given[index] for index in indices], own + grace)

    def _parts(
        self, place: int, indices: list[int], outcome: Outcome, answers: Sequence[Answer]
    ) -> list[_Part]:
        name = self.names[place]
        if outcome.broken is not None:
            raise FinetuneError("bad_verifier", outcome.broken, verifier=name)
        if outcome.results is None:
            where = f"{name}, {answers[indices[0]].place}".rstrip(", ")
            status: Status = "timeout" if outcome.failure == "timeout" else "error"
            return [_Part(name, {"": None}, status, self._told(where, status, outcome.printed))]
        parts = []
        for index, scored in zip(indices, outcome.results, strict=True):
            error = scored["error"]
            if scored["status"] == "timeout":
                error = self._told(f"{name}, {answers[index].place}".rstrip(", "), "timeout", "")
            elif scored["status"] == "error" and outcome.printed:
                error += f"\nprinted: {outcome.printed[-500:]}"
            parts.append(_Part(name, scored["parts"] or {"": None}, scored["status"], error))
        return parts

    def _told(self, where: str, status: Status, printed: str) -> str:
        what = (
            f"verifier_timeout: {where}: no end within {self.timeout_s:g} seconds"
            if status == "timeout"
            else f"verifier_died: {where}: its process ended"
        )
        return what + (f"\nprinted: {printed[-500:]}" if printed else "")


@dataclass(frozen=True)
class _Part:
    """What one verifier says of one answer; values: "" -> the number, or name -> number of a dict."""

    name: str
    values: dict[str, float | None]
    status: Status
    error: str | None


def _reward(parts: Sequence[_Part], weights: Mapping[str, float]) -> Reward:
    values: dict[str, float | None] = {}
    total: float | None = 0.0
    for part in sorted(parts, key=lambda part: list(weights).index(part.name)):
        values |= {f"{part.name}.{inner}" if inner else part.name: one for inner, one in part.values.items()}
        known = [one for one in part.values.values() if one is not None]
        is_known = len(known) == len(part.values) and total is not None
        total = total + weights[part.name] * math.fsum(known) if total is not None and is_known else None
    status: Status = min((part.status for part in parts), key=_WORST.index, default="scored")
    errors = "\n".join(part.error for part in parts if part.error)
    if total is not None and not math.isfinite(total):
        return Reward(None, values, "invalid", "the weighted sum is too large")
    return Reward(total, values, status, errors or None)


def _is_lost(outcome: Outcome) -> bool:
    """Return whether a call of several answers told nothing of any: it hung, died, or raised for all at once."""
    if outcome.results is None:
        return outcome.broken is None
    return all(scored["status"] == "error" for scored in outcome.results)


def _as_given(answer: Answer) -> dict[str, Any]:
    """Return an answer in the one shape in which verifiers get it."""
    return {
        "row": answer.values,
        "completion": answer.completion,
        "prompt": answer.prompt,
        "stopped": answer.stopped,
        "place": answer.place,
    }


def open_verifiers(
    specs: Sequence[str], args: Sequence[str], domain: Domain, timeout_s: float = 10.0, workers: int = 2
) -> VerifierSet:
    """Start the verifiers that --verifier names, to be used as a context manager.

    specs: auto (or domain: the domain's own score), exact, numeric, regex, choice, json-schema, math, python-tests,
    reasoning-gym, or FILE.py:function; each with an optional weight behind (numeric:0.8). args: KEY=VALUE, or
    VERIFIER.KEY=VALUE where several read the key; env=NAME,NAME lets these variables through to all of them. Raises
    Problems (bad_value, setting_without_effect, file_missing, missing_package), and no_sandbox or bad_verifier where
    one does not load.
    """
    verifiers, passed = planned(specs, args, domain, timeout_s)
    pool = WorkerPool([verifier.source for verifier in verifiers], timeout_s, workers, passed)
    return VerifierSet(verifiers, pool, timeout_s)


def planned(
    specs: Sequence[str], args: Sequence[str], domain: Domain, timeout_s: float = 10.0
) -> tuple[list[Verifier], list[str]]:
    """Return the verifiers that the settings mean, and the environment variables let through, without starting any.

    Raises Problems with all that is wrong with them.
    """
    problems: list[FinetuneError] = []
    verifiers: list[Verifier] = []
    for spec in specs:
        try:
            verifiers.append(_verifier(spec, domain))
        except FinetuneError as error:
            problems.append(error)
    names = [verifier.name for verifier in verifiers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(_bad("verifier", f"{twice[0]} is given twice"))
    if not specs:
        problems.append(_bad("verifier", "none is given"))
    options, passed, faults = _options(args, verifiers, timeout_s)
    if problems or faults:
        raise Problems([*problems, *(faults if not problems else [])])
    return [
        replace(verifier, source=replace(verifier.source, options=options[verifier.name]))
        for verifier in verifiers
    ], passed


def _verifier(spec: str, domain: Domain) -> Verifier:
    if match := _FUNCTION.fullmatch(spec):
        path = Path(match["file"]).expanduser().absolute()
        if not path.is_file():
            raise FinetuneError("file_missing", f"verifier: {path}: no such file", file=str(path))
        name = f"{path.stem}:{match['function']}"
        return Verifier(Source(name, str(path), match["function"]), _weight(spec, match["weight"]))
    match = _NAMED.fullmatch(spec)
    name = match["name"] if match else spec
    weight = _weight(spec, match["weight"] if match else None)
    if name in ("auto", "domain"):
        return Verifier(_domain_source(domain), weight)
    if name not in BUILTINS:
        known = ["auto", *BUILTINS]
        close = difflib.get_close_matches(name, known, n=1)
        text = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)} and FILE.py:function"
        raise _bad("verifier", f"{spec}: no such verifier; {text}")
    checked_package(name)
    return Verifier(Source(name), weight)


def _domain_source(domain: Domain) -> Source:
    if domain.score is None:
        text = f"auto: rows of domain {domain.name} have no verifier of their own; name one"
        raise _bad("verifier", text)
    if domain.file is not None:
        return Source(f"{domain.name}:score", domain.file, "score", by_position=True)
    own = {"math": "numeric", "reasoning-gym": "reasoning-gym"}[domain.name]
    checked_package(own)
    return Source(own)


def _weight(spec: str, text: str | None) -> float:
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight) or weight == 0:
        raise _bad("verifier", f"{spec}: the weight {text!r} is no finite number other than 0")
    return weight


def _options(
    args: Sequence[str], verifiers: Sequence[Verifier], timeout_s: float
) -> tuple[dict[str, dict[str, str]], list[str], list[FinetuneError]]:
    """Return the options of each verifier by name, the variables let through, and what is wrong with the arguments."""
    options: dict[str, dict[str, str]] = {verifier.name: {} for verifier in verifiers}
    passed: list[str] = []
    faults: list[FinetuneError] = []
    for arg in args:
        key, mark, value = arg.partition("=")
        if not mark:
            faults.append(_bad("verifier_args", f"{arg}: give KEY=VALUE"))
            continue
        if key == "env":
            passed += [name.strip() for name in value.split(",") if name.strip()]
            continue
        owner, _, option = key.rpartition(".")
        readers = [
            name
            for name in options
            if name in BUILTINS and option in BUILTINS[name].options and owner in ("", name)
        ]
        if readers:
            for name in readers:
                options[name][option] = value
        elif any(option in builtin.options for builtin in BUILTINS.values()):
            text = f"verifier_args: {key}: none of {', '.join(options)} reads it; leave it out"
            faults.append(FinetuneError("setting_without_effect", text, setting="verifier_args"))
        else:
            known = sorted({option for builtin in BUILTINS.values() for option in builtin.options} | {"env"})
            faults.append(_bad("verifier_args", f"{key}: no such argument; there are {', '.join(known)}"))
    for name in options:
        if name in BUILTINS and BUILTINS[name].timed:
            options[name].setdefault("seconds", f"{timeout_s:g}")
            try:
                float(options[name]["seconds"])
            except ValueError:
                faults.append(_bad("verifier_args", f"seconds: {options[name]['seconds']!r} is no number"))
    return options, passed, faults


def _bad(setting: str, text: str) -> FinetuneError:
    return FinetuneError("bad_value", f"{setting}: {text}", setting=setting)
