"""One attempt at a run: the training child is started, watched, asked to stop, and its outcome is written down.

This process is the one writer of state.json and run.json while it holds the folder's lock; the child inherits the lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.budgets import Watch
from agent.console import Display
from agent.environment import scrub_text, secret_values
from agent.folder import RunFolder, write_document
from agent.hints import diagnosed
from agent.manifest import begun, changes_since_last_attempt, ended
from agent.monitor import Tail, heartbeats, resumed_from, warnings_of
from agent.processes import Interrupts, ProcessId, kill_session, start_child
from agent.states import moved, owner, settled
from finetune.errors import EXIT_CODES, FinetuneError
from finetune.records import read_lines, to_json, write_atomically

_POLL_S = 0.1
_HEARTBEAT_EVERY_S = 1.0
_STARTS_UP_S = 1.0  # in which the child cannot be told to stop: it would be killed
LIMIT_GRACE_S = 900.0  # in which a training that has reached a limit must have saved
NOTHING_SPENT = {"seconds": 0.0, "generated_tokens": 0, "disk_bytes": 0}


@dataclass
class Attempt:
    """What one attempt works with. state and manifest are what was last written."""

    folder: RunFolder
    plan: dict[str, Any]
    state: dict[str, Any]
    manifest: dict[str, Any]
    host: str
    environment: Mapping[str, str]  # of the training child
    display: Display
    interrupts: Interrupts
    lock: int
    over: FinetuneError | None = None  # the limit at which it was stopped

    def write_state(self, state: dict[str, Any]) -> None:
        """Write the state; one that the ranks bring about (saving, running again) is no event of its own."""
        is_passing = {self.state["state"], state["state"]} == {"running", "saving"}
        if state["state"] != self.state["state"] and not is_passing:
            self.folder.tell("state", state=state["state"], step=state["step"])
        self.state = state
        write_document(self.folder.state, "state", state)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        write_document(self.folder.manifest, "run", manifest)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: error is None after success, and of code stopped after a stop."""

    status: str
    error: FinetuneError | None
    warnings: list[tuple[str, str]]


def carry_out(attempt: Attempt) -> Ending:
    """Train until the child has ended, and write down how."""
    folder = attempt.folder
    folder.outcome.unlink(missing_ok=True)
    _scrub_files(folder, attempt.environment)  # of an attempt that was killed
    _set_aside_logs(folder, len(attempt.manifest["attempts"]))
    attempt.write_manifest(begun(attempt.manifest, attempt.plan, attempt.host))
    _mend_events(folder)
    fresh = owner(attempt.host) | {
        "plan_id": attempt.plan["plan_id"],
        "child": None,
        "hint_id": None,
        "operation": None,
        "errors": [],
        "warnings": [],
    }
    attempt.write_state(
        moved(attempt.state, "starting", num_steps=attempt.plan["arithmetic"]["steps"], **fresh)
    )
    watch = Watch(
        folder, attempt.plan, attempt.state.get("spent") or NOTHING_SPENT, read_lines(folder.metrics)
    )
    told = _Told(attempt, watch, Tail(folder.metrics), Tail(folder.events))
    with open(folder.logs / "launch.log", "ab") as log:
        child = start_child(attempt.plan["launch"]["argv"], attempt.environment, log, [attempt.lock])
    attempt.write_state(moved(attempt.state, "running", child=_child_section(child)))
    _watch(attempt, child, told)
    told.read()
    return _conclude(attempt, child.returncode, watch)


@dataclass
class _Told:
    """What the training tells while it goes on: its steps are shown and counted, its events counted."""

    attempt: Attempt
    watch: Watch
    metrics: Tail
    events: Tail

    def read(self) -> None:
        began = self.attempt.manifest["attempts"][-1]["started"]
        for line in self.metrics.read():
            self.attempt.display.step(line)
            self.watch.step(line)
        for event in self.events.read():
            if event["time"] >= began:
                self.watch.event(event)


def _mend_events(folder: RunFolder) -> None:
    """Take away a half-written last line, before anything is appended to it."""
    if folder.events.exists() and not folder.events.read_bytes().endswith(b"\n"):
        write_atomically(folder.events, "".join(to_json(line) + "\n" for line in read_lines(folder.events)))


def _child_section(child: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    found = ProcessId.of(child.pid)
    return None if found is None else {"pid": found.pid, "pid_start": found.start, "boot_id": found.boot}


def _set_aside_logs(folder: RunFolder, number: int) -> None:
    """Move the logs of attempt N to logs/attempt-N, so that no old traceback is taken for ours."""
    folder.logs.mkdir(exist_ok=True)
    old = [path for path in folder.logs.glob("*.log") if path != folder.supervisor_log]
    if old:
        target = folder.logs / f"attempt-{number}"
        target.mkdir(exist_ok=True)
        for path in old:
            path.replace(target / path.name)


def _watch(attempt: Attempt, child: subprocess.Popen[bytes], told: _Told) -> None:
    """Follow the child until it ends: show its steps, keep the state, stop it at the first signal or limit."""
    written = time.monotonic()
    started, stopping_since, is_listening = time.monotonic(), 0.0, False
    while child.poll() is None:
        told.read()
        if attempt.state["state"] == "stopping":
            if attempt.over is not None and time.monotonic() - stopping_since > LIMIT_GRACE_S:
                kill_session(child.pid)
        else:
            is_listening = is_listening or _listens(attempt)
            if not attempt.interrupts.received and is_listening:
                attempt.over = told.watch.over()
            asked = attempt.interrupts.received and (
                is_listening or time.monotonic() - started > _STARTS_UP_S
            )
            if asked or attempt.over:
                stopping_since = time.monotonic()
                child.send_signal(signal.SIGTERM)
                attempt.display.note("stopping: the step is finished and saved")
                attempt.write_state(moved(attempt.state, "stopping", **_seen(attempt.folder)))
        if time.monotonic() - written >= _HEARTBEAT_EVERY_S:
            written = time.monotonic()
            with full_disk_passed_over():  # what is trained may still be saved, or more room be made
                _warn(attempt, told.watch.warnings)
                attempt.write_state(_refreshed(attempt) | {"spent": told.watch.spent})
        time.sleep(_POLL_S)


@contextlib.contextmanager
def full_disk_passed_over() -> Iterator[None]:
    """Go on where the disk is full; raise every other OSError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _listens(attempt: Attempt) -> bool:
    """Whether a rank of this attempt has shown a sign of life: one that starts up would be killed by being told to stop."""
    began = attempt.manifest["attempts"][-1]["started"]
    return any(time.time() - beat["age_s"] >= began for beat in heartbeats(attempt.folder))


def _warn(attempt: Attempt, warnings: list[dict[str, str]]) -> None:
    """Keep what is wrong at the moment in the state, and tell of it once."""
    known = {warning["code"] for warning in attempt.state.get("warnings", [])}
    for warning in warnings:
        if warning["code"] not in known:
            attempt.folder.tell("warning", **warning)
    attempt.state = attempt.state | {"warnings": warnings}


def _refreshed(attempt: Attempt) -> dict[str, Any]:
    seen = _seen(attempt.folder)
    if attempt.state["state"] == "stopping":
        return attempt.state | {"heartbeat": time.time()} | seen
    is_saving = (seen.get("operation") or "").startswith("saving")
    return moved(attempt.state, "saving" if is_saving else "running", **seen)


def _seen(folder: RunFolder) -> dict[str, Any]:
    """Return what the ranks and the disk show: step, operation, newest checkpoint."""
    checkpoint = folder.last_checkpoint()
    seen: dict[str, Any] = {"checkpoint": None if checkpoint is None else str(checkpoint)}
    beats = heartbeats(folder)
    if beats:
        seen |= {"step": beats[0]["step"], "operation": beats[0]["operation"]}
    return seen


def _conclude(attempt: Attempt, returncode: int, watch: Watch) -> Ending:
    folder = attempt.folder
    began = attempt.manifest["attempts"][-1]["started"]
    outcome = _read_outcome(folder)
    status, error = _judge(attempt, outcome, returncode)
    result = outcome["result"] if outcome else None
    _scrub_files(folder, attempt.environment)
    seen = _seen(folder)
    if result:
        seen["step"] = result["steps"]
    manifest = ended(attempt.manifest, status, resumed_from(folder, began), result, error, folder)
    attempt.write_manifest(manifest)
    hint_id = None if manifest["error"] is None else manifest["error"]["hint_id"]
    attempt.write_state(
        settled(attempt.state, status, child=None, hint_id=hint_id, spent=watch.spent, **seen)
    )
    differing = [("differs_from_last_attempt", text) for text in changes_since_last_attempt(manifest)]
    own = [(item["code"], item["text"]) for item in (outcome or {}).get("warnings", [])]
    return Ending(status, error, [*differing, *warnings_of(folder, began), *own])


def _read_outcome(folder: RunFolder) -> dict[str, Any] | None:
    try:
        outcome: dict[str, Any] = json.loads(folder.outcome.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return outcome


def _judge(
    attempt: Attempt, outcome: dict[str, Any] | None, returncode: int
) -> tuple[str, FinetuneError | None]:
    """Return the final state and the error that goes with it."""
    logs = attempt.folder.logs
    if outcome is None:
        if attempt.state["state"] == "stopping":
            early = "ended" if returncode == -signal.SIGTERM else "was killed"
            return _stopped(attempt, f"{early} while stopping, after", attempt.state["step"], killed=True)
        return "failed", _for_memory(attempt, diagnosed(_death(returncode, attempt.state), logs))
    if outcome["status"] == "stopped":
        if outcome["result"] is None:
            return _stopped(
                attempt, "stopped before training went on from", _saved_step(attempt), killed=False
            )
        return _stopped(attempt, "stopped after", outcome["result"]["steps"], killed=False)
    if outcome["error"]:
        return "failed", _for_memory(attempt, diagnosed(_error_of(outcome["error"]), logs))
    return "succeeded", None


def _stopped(attempt: Attempt, how: str, step: int, killed: bool) -> tuple[str, FinetuneError]:
    """Return stopped where a person asked for it, else preempted, with the checkpoint to go on from."""
    folder = attempt.folder
    asked = folder.stop_request.exists() or attempt.interrupts.received == signal.SIGINT
    checkpoint = folder.last_checkpoint()
    text = f"{how} step {step}; the newest checkpoint is {checkpoint.name if checkpoint else 'none'}"
    evidence = {"step": step, "checkpoint": checkpoint and str(checkpoint), "killed": killed}
    if attempt.over is not None:
        error = FinetuneError(
            attempt.over.code, f"{attempt.over.message}; {text}", **attempt.over.evidence | evidence
        )
        return "stopped", error
    return "stopped" if asked else "preempted", FinetuneError("stopped", text, **evidence)


def _saved_step(attempt: Attempt) -> int:
    checkpoint = attempt.folder.last_checkpoint()
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))


def _error_of(item: dict[str, Any]) -> FinetuneError:
    code = item["code"] if item["code"] in EXIT_CODES else "training_failed"
    evidence = item.get("evidence") or {}
    return FinetuneError(
        code, item["message"], **evidence | {"rank": item.get("rank"), "traceback": item.get("traceback")}
    )


def _death(returncode: int, state: dict[str, Any]) -> FinetuneError:
    doing = f"step {state['step']}, {state['operation'] or 'starting'}"
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return FinetuneError("rank_died", f"the training process was killed by {name} ({doing})", signal=name)
    text = f"the training process left with exit code {returncode} and no outcome ({doing})"
    return FinetuneError("training_failed", text, returncode=returncode)


def _for_memory(attempt: Attempt, error: FinetuneError) -> FinetuneError:
    """Return what killed a process that the kernel took when memory was nearly full: a lack of memory."""
    low = next((item for item in attempt.state.get("warnings", []) if item["code"] == "low_memory"), None)
    if error.code != "rank_died" or "SIGKILL" not in error.message or low is None:
        return error
    text = f"{error.message}; just before, {low['text']}"
    return FinetuneError("out_of_memory", text, **error.evidence)


def _scrub_files(folder: RunFolder, environment: Mapping[str, str]) -> None:
    """Mask secrets that libraries printed or named in an error; a file without any stays untouched."""
    secrets = secret_values(environment)
    errors = [folder.outcome, *(folder.path / "heartbeat").glob("*.error.json")]
    for path in [*folder.logs.glob("*.log"), *filter(Path.exists, errors)]:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        masked = scrub_text(text, secrets)
        if masked != text:
            path.write_bytes(masked.encode("utf-8", "surrogateescape"))
