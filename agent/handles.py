"""Jobs: verbs that load a model or read all data, in a process of their own, and the handle by which to ask for the result.

A job is the same command, its answer in a file. Folder FINETUNE_HOME/jobs/JOB_ID: request.json (the command), state.json
(the process), answer.json (what the command printed), job.log. The same command in the same place while it runs is the
same job.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from agent.environment import scrub, scrub_text, secret_values
from agent.folder import RunFolder, check_against_schema, locked
from agent.plan import home
from agent.processes import ProcessId, Streams, kill_session, start_detached, wait_until
from agent.render import Answer
from agent.runner import Context
from agent.standing import our_command
from finetune.errors import EXIT_CODES, FinetuneError
from finetune.records import to_json, write_atomically

DETACH = "--detach"
POLL_S = 5
_AFTER_KILL_S = 10.0
_OTHERS_START_WITHIN_S = 30.0
_LOG_LINES = 5


@dataclass(frozen=True)
class Job:
    """A job as its folder shows it. request: verb, argv, cwd, digest, created; process: host, pid, pid_start, boot_id."""

    path: Path
    request: dict[str, Any]
    process: dict[str, Any]

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def process_id(self) -> ProcessId:
        return ProcessId(self.process["pid"], self.process["pid_start"], self.process["boot_id"])

    @property
    def is_running(self) -> bool:
        if self.process["host"] != socket.gethostname():
            return self.answer is None
        return self.process_id.is_alive

    @property
    def answer(self) -> dict[str, Any] | None:
        """Return what the command answered; None where it has not, or not to its end."""
        value = _read(self.path / "answer.json")
        try:
            check_against_schema("answer", value)
        except jsonschema.ValidationError:
            return None
        return value

    @property
    def status(self) -> str:
        """Return running, succeeded, stopped, or failed, which is also what became of a process that was killed."""
        if self.is_running:
            return "running"
        answer = self.answer
        if answer is None or answer["errors"]:
            is_told = answer is not None and answer["errors"][0]["code"] == "stopped"
            return "stopped" if is_told or (self.path / ".stop").exists() else "failed"
        return "succeeded"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def detach(verb: str, context: Context) -> Answer:
    """Start the command that was given as a job, or answer with the job that does it already."""
    argv = [argument for argument in context.argv if argument not in (DETACH, "--json")]
    text = json.dumps([argv, str(context.cwd)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    with locked(RunFolder(_place(context.machine.environ)), _OTHERS_START_WITHIN_S):
        for job in known_jobs(context.machine.environ):
            if job.request["digest"] == digest and job.is_running:
                return _running(job, "already runs")
        return _running(_begin(verb, argv, digest, context), "runs")


def _begin(verb: str, argv: list[str], digest: str, context: Context) -> Job:
    name = f"{verb}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"
    path = _place(context.machine.environ) / name
    path.mkdir(parents=True)
    request = scrub(
        {"verb": verb, "argv": argv, "cwd": str(context.cwd), "digest": digest, "created": time.time()}
    )
    streams = Streams(context.cwd, path / "answer.json", path / "job.log")
    found = start_detached(job_command(argv), context.machine.environ, streams)
    facts = {"pid": 0, "pid_start": 0, "boot_id": ""}  # of a process that has ended by now
    if found is not None:
        facts = {"pid": found.pid, "pid_start": found.start, "boot_id": found.boot}
    process = {"host": socket.gethostname(), **facts}
    write_atomically(path / "state.json", to_json(process, indent=1))
    write_atomically(path / "request.json", to_json(request, indent=1))  # last: it makes the job known
    return Job(path, request, process)


def job_command(argv: list[str]) -> list[str]:
    """Return the command of a job: the one that was given, its answer as JSON."""
    return our_command(*argv, "--json")


def _running(job: Job, how: str) -> Answer:
    return Answer(
        job.request["verb"],
        "running",
        f"{job.request['verb']} {how} as a job: {job.id}",
        data={"job_id": job.id, "job_dir": str(job.path), "suggested_poll_s": POLL_S},
        next_actions=[
            ("ask for its result", our_command("status", job.id, "--wait", "50")),
            ("end it", our_command("stop", job.id)),
        ],
    )


def _place(environ: Mapping[str, str]) -> Path:
    return home(environ) / "jobs"


def known_jobs(environ: Mapping[str, str]) -> list[Job]:
    """Return the jobs of this user, newest first."""
    jobs = [job for path in _place(environ).glob("[!.]*") if (job := _job(path))]
    return sorted(jobs, key=lambda job: job.request["created"], reverse=True)


def _job(path: Path) -> Job | None:
    request, process = _read(path / "request.json"), _read(path / "state.json")
    if not isinstance(request, dict) or not isinstance(process, dict):
        return None
    is_whole = {"verb", "argv", "digest", "created"} <= request.keys() and "pid_start" in process
    return Job(path, request, process) if is_whole else None


def find_job(name: str, environ: Mapping[str, str]) -> Job | None:
    """Return the job of this id (or folder), None where there is none."""
    return _job(_place(environ) / os.path.basename(name.rstrip("/")))


def job_status(job: Job, wait_s: float, context: Context) -> Answer:
    """Say how a job stands; the answer of one that has ended is in data.result and data.errors."""
    wait_until(lambda: not job.is_running, wait_s, every=0.2)
    if job.is_running:
        answer = _running(job, "runs")
        answer.command = "status"
        age = round(time.time() - job.request["created"], 1)
        answer.data |= {"job": _facts(job, None) | {"age_s": age, "log": _log_tail(job, context)}}
        if wait_s > 0:
            text = f"{job.request['verb']} still runs after {wait_s:g} s"
            answer.errors = [FinetuneError("still_running", text)]
        return answer
    inner = job.answer
    if inner is None:
        return _without_answer(job, context)
    errors = inner["errors"]
    code = EXIT_CODES.get(errors[0]["code"], 1) if errors else 0
    facts = _facts(job, code)
    if inner["next_offset"] is not None:
        facts["next_offset"] = inner["next_offset"]
    return Answer(
        "status",
        job.status,
        f"{job.request['verb']}: {inner['summary']}",
        run_id=inner["run_id"],
        run_dir=None if inner["run_dir"] is None else Path(inner["run_dir"]),
        data={"job": facts, "result": inner["data"], "errors": errors},
        warnings=[(item["hint_id"], item["text"]) for item in inner["warnings"]],
        next_actions=[(action["why"], action["argv"]) for action in inner["next_actions"]],
        artifacts=inner["artifacts"],
    )


def _facts(job: Job, exit_code: int | None) -> dict[str, Any]:
    facts = {"id": job.id, "command": job.request["verb"], "argv": job.request["argv"]}
    return facts | {"job_dir": str(job.path)} | ({} if exit_code is None else {"exit_code": exit_code})


def _without_answer(job: Job, context: Context) -> Answer:
    """Return what is to be said of a job whose process ended without an answer: killed, or the machine went down."""
    was_stopped = job.status == "stopped"
    code, how = ("stopped", "was ended") if was_stopped else ("job_died", "ended without an answer")
    error = FinetuneError(code, f"the process of {job.request['verb']} {how}")
    log = _log_tail(job, context)
    shown = {"code": error.code, "message": error.message, "log": log}
    facts = _facts(job, error.exit_code)
    data = {"job": facts, "result": {}, "errors": [shown]}
    again = [("do it again", our_command(*job.request["argv"], DETACH))]
    return Answer("status", job.status, error.message, data=data, next_actions=again)


def _log_tail(job: Job, context: Context) -> list[str]:
    path = job.path / "job.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    return scrub_text(text, secret_values(context.machine.environ)).splitlines()[-_LOG_LINES:]


def stop_job(job: Job, grace_s: float, context: Context) -> Answer:
    """End a job: told first, killed after the grace time with all that it started."""
    was_running, killed = job.is_running, False
    host = job.process["host"]
    if was_running and host != socket.gethostname():  # its pid is another process's here
        raise FinetuneError("run_in_use", f"the job works on {host}; stop it there", host=host)
    if was_running:
        (job.path / ".stop").touch()
        job.process_id.send(signal.SIGTERM)
        killed = not wait_until(lambda: not job.is_running, grace_s)
        if killed:
            kill_session(job.process_id.pid)
            wait_until(lambda: not job.is_running, _AFTER_KILL_S)
    answer = job_status(job, 0.0, context)
    answer.command = "stop"
    answer.data["killed"] = killed
    if not was_running:
        answer.summary = f"nothing to stop: the job has {answer.status}"
    return answer


def rows(jobs: list[Job]) -> list[dict[str, Any]]:
    """Return what a list shows of each job."""
    return [
        {
            "job_id": job.id,
            "command": job.request["verb"],
            "status": job.status,
            "created": job.request["created"],
        }
        for job in jobs
    ]
