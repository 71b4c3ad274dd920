"""The verbs of the console command: what each is called, its own flags, and what answers it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent import (
    auditing,
    control,
    doctor,
    explaining,
    flags,
    handles,
    jobs,
    runner,
    serving,
    skills,
    supervisor,
    task_checks,
    verbs,
)
from agent.folder import RunFolder
from agent.monitor import find_run
from agent.plan import plan_of
from agent.render import Answer
from agent.report.writing import write_reports
from agent.request import Request, absolute, again, understand
from agent.runner import Context
from finetune.errors import FinetuneError, Problems


@dataclass(frozen=True)
class Verb:
    """One verb: its line in the help, its own flags, whether it takes the settings of a method, and what it does."""

    summary: str
    answer: Callable[[Call], Answer]
    flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    takes_settings: bool = False
    is_job: bool = False  # takes more than seconds: --detach does it in a process of its own


@dataclass
class Call:
    """A verb as it was called: the settings given as flags, the verb's own options, and the flags that make no sense."""

    verb: str
    settings: dict[str, Any]
    options: argparse.Namespace
    problems: list[FinetuneError]
    context: Context

    def request(self) -> Request:
        """Return the request that the flags make, with every problem found so far."""
        request = understand(self.settings, self.context.cwd)
        request.problems[:0] = self.problems
        return request

    def run_folder(self) -> RunFolder:
        return find_run(self.options.run, self.context.cwd, self.context.machine.environ)

    def refuse_problems(self) -> None:
        if self.problems:
            raise Problems(self.problems)


def carried_out(call: Call) -> Answer:
    """Return what the verb answers, or the handle of the job that does it."""
    verb = VERBS[call.verb]
    if call.verb == "evaluate":
        call.problems += _idle_of_evaluate(call)
    if not verb.takes_settings:
        call.refuse_problems()
    if not (verb.is_job and call.options.detach):
        return verb.answer(call)
    if verb.takes_settings and getattr(call.options, "run", None) is None:
        if problems := call.request().problems:
            raise Problems(problems)
    else:
        call.refuse_problems()
    named = getattr(call.options, "run", None)
    if named and not (call.verb == "stop" and handles.find_job(named, call.context.machine.environ)):
        call.run_folder()
    if call.verb == "plan" and call.options.checks == "quick":
        text = "detach: quick checks answer at once; give --checks full, or leave it out"
        raise FinetuneError("setting_without_effect", text, setting="detach")
    return handles.detach(call.verb, call.context)


def _plan(call: Call) -> Answer:
    return runner.dry_run(
        call.request(), call.context, call.options.checks == "full", call.options.verify_model
    )


def _run(call: Call) -> Answer:
    options = call.options
    if options.dry_run and options.detach:
        text = "detach: a dry run starts nothing; leave one of the two out"
        raise FinetuneError("settings_conflict", text, setting="detach")
    if options.dry_run:
        return _plan(call)
    consent = runner.Consent(options.confirm, options.yes_under)
    if options.detach:
        return supervisor.start(call.request(), call.context, supervisor.Wish(consent, options.verify_model))
    return runner.run(call.request(), call.context, options.verify_model, consent=consent)


def _start(call: Call) -> Answer:
    options, context = call.options, call.context
    wish = supervisor.Wish(
        runner.Consent(options.confirm, options.yes_under), options.verify_model, options.new
    )
    if options.plan is None:
        return supervisor.start(call.request(), context, wish)
    if call.settings:
        name = min(call.settings)
        text = f"plan: says all settings; leave out {name}, or make another plan"
        call.problems.append(FinetuneError("settings_conflict", text, setting=name))
    call.refuse_problems()
    plan = supervisor.stored_plan(options.plan, context)
    all_bytes = bool(plan["model"].get("all_bytes")) or options.verify_model
    request = supervisor.request_of(plan, context.cwd)
    return supervisor.start(request, context, replace(wish, verify_model=all_bytes, plan=plan))


def _resume(call: Call) -> Answer:
    options = call.options
    names = ("max_hours", "max_disk_gb", "max_generated_tokens")
    limits = {name: value for name in names if (value := getattr(options, name)) is not None}
    consent = runner.Consent(options.confirm, options.yes_under)
    return control.resume(options.run, options.extend, limits, consent, options.detach, call.context)


def _idle_of_evaluate(call: Call) -> list[FinetuneError]:
    """Return an error for each flag that only the other kind of evaluation reads: that of a run, or that of a model."""
    options = call.options
    if options.run is None:
        given = {"checkpoint": options.checkpoint is not None, "base": options.base}
        text = "says which weights of a RUN, and no RUN is given"
    else:
        given = {"adapter": options.adapter is not None, "config": "config" in call.settings}
        text = "means nothing beside a RUN, which brings its own; leave one of the two out"
    idle = [name for name, is_given in given.items() if is_given]
    return [FinetuneError("setting_without_effect", f"{name}: {text}", setting=name) for name in idle]


def _evaluate(call: Call) -> Answer:
    options = call.options
    if options.run is None:
        adapter = options.adapter and absolute(options.adapter, call.context.cwd)
        plan = jobs.quick_plan(call.request(), call.context)
        return jobs.evaluate(plan, {"adapter": adapter, "merged": None}, None, call.context)
    call.refuse_problems()
    folder = call.run_folder()
    changes = {name: value for name, value in call.settings.items() if name not in ("method", "config")}
    plan = jobs.quick_plan(again(plan_of(folder), changes, call.context.cwd), call.context)
    return jobs.evaluate(
        plan, jobs.weights_of(folder, options.checkpoint, options.base), folder.path, call.context
    )


def _generate(call: Call) -> Answer:
    options, folder = call.options, call.run_folder()
    prompts = list(options.prompt or [])
    if options.prompts:
        prompts += _prompts_of(Path(absolute(options.prompts, call.context.cwd)))
    if not prompts:
        raise FinetuneError(
            "usage", "prompt: required, give --prompt TEXT or --prompts FILE", setting="prompt"
        )
    wanted = {
        "prompts": prompts,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
    }
    return jobs.generate(
        folder,
        jobs.weights_of(folder, options.checkpoint, options.base),
        wanted,
        options.offset,
        call.context,
    )


def _prompts_of(path: Path) -> list[Any]:
    """Return the prompts of a file: a text a line, or with .jsonl a text or a list of messages a line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        return [json.loads(line) for line in lines] if path.suffix == ".jsonl" else lines
    except OSError as error:
        raise FinetuneError("file_missing", f"prompts: {error}", setting="prompts", file=str(path)) from error
    except ValueError as error:
        raise FinetuneError(
            "bad_value", f"prompts: {path} is no JSONL of texts or messages: {error}", setting="prompts"
        ) from error


def _export(call: Call) -> Answer:
    options, folder = call.options, call.run_folder()
    own = folder.path / {"merged": "merged", "adapter": "adapter-export"}[options.kind]
    out = absolute(options.to, call.context.cwd) if options.to else str(own)
    wanted = {"out": out, "kind": options.kind, "dtype": options.export_dtype}
    return jobs.export(folder, jobs.weights_of(folder, options.checkpoint, False), wanted, call.context)


def _report(call: Call) -> Answer:
    options, context = call.options, call.context
    folders = [find_run(name, context.cwd, context.machine.environ) for name in options.run]
    out = Path(absolute(options.out, context.cwd)) if options.out else None
    return write_reports(folders, out, context.machine)


def _logs(call: Call) -> Answer:
    options = call.options
    if options.rank is not None and options.file is not None:
        raise FinetuneError(
            "settings_conflict", "file and rank both name a log; give one of them", setting="file"
        )
    file = options.file if options.rank is None else f"rank{options.rank}.log"
    return verbs.logs(options.run, file, options.grep, options.offset, options.limit, call.context)


def _skills(call: Call) -> Answer:
    options = call.options
    if options.action == "install":
        target = options.target or "agents"
        return skills.install(target, options.scope, options.name or [], options.force, call.context)
    if given := [name for name in ("target", "scope", "name", "force") if getattr(options, name)]:
        text = f"{given[0]}: says where and what `skills install` copies; `skills list` reads no flag"
        raise FinetuneError("setting_without_effect", text, setting=given[0])
    return skills.list_skills()


VERBS: dict[str, Verb] = {
    "doctor": Verb(
        "what this machine offers and what is broken",
        lambda call: doctor.doctor(call.context, call.options.quick),
        flags.doctor,
        is_job=True,
    ),
    "check-data": Verb(
        "read the rows and show what would be learned",
        lambda call: jobs.look_at_data("check-data", call.request(), call.context),
        takes_settings=True,
        is_job=True,
    ),
    "prepare": Verb(
        "check-data, and keep the prepared rows",
        lambda call: jobs.look_at_data("prepare", call.request(), call.context),
        takes_settings=True,
        is_job=True,
    ),
    "plan": Verb(
        "what a run would do (= run --dry-run)", _plan, flags.plan, takes_settings=True, is_job=True
    ),
    "run": Verb(
        "train in the foreground; resumes a run that ended early", _run, flags.run, takes_settings=True
    ),
    "start": Verb(
        "train in a process of its own, and return its handle at once",
        _start,
        flags.start,
        takes_settings=True,
    ),
    "status": Verb(
        "how a run or a job stands",
        lambda call: verbs.status(call.options.run, call.options.wait, call.options.since, call.context),
        flags.status,
    ),
    "logs": Verb("lines of a run's logs", _logs, flags.logs),
    "stop": Verb(
        "finish the step, save and end",
        lambda call: control.stop(call.options.run, call.options.grace, call.context),
        flags.stop,
        is_job=True,
    ),
    "resume": Verb("go on from the newest checkpoint", _resume, flags.resume),
    "evaluate": Verb(
        "loss and accuracy on held-out rows", _evaluate, flags.evaluate, takes_settings=True, is_job=True
    ),
    "generate": Verb("answers of a trained model", _generate, flags.generate, is_job=True),
    "export": Verb("write a merged model or an adapter, checked", _export, flags.export, is_job=True),
    "report": Verb("write what a run did as one HTML page, or compare several", _report, flags.report),
    "verifier-skeleton": Verb(
        "write a verifier of your own to start from",
        lambda call: verbs.verifier_skeleton(call.options.file, call.context),
        flags.skeleton,
    ),
    "list": Verb(
        "the runs of this user, or the jobs",
        lambda call: (verbs.list_jobs if call.options.jobs else verbs.list_runs)(
            call.options.offset, call.context
        ),
        flags.listing,
    ),
    "explain-error": Verb(
        "what an error code, a failed run or a log means",
        lambda call: explaining.explain_error(call.options.what, call.context),
        flags.explain,
    ),
    "skills": Verb(
        "copy the skills to where an agent program finds them, or list them", _skills, flags.skills
    ),
    "tasks": Verb(
        "check tasks for agents: oracle, doing nothing, and what an agent could find",
        lambda call: task_checks.check(call.options.tasks, call.options.box, call.context),
        flags.tasks,
        is_job=True,
    ),
    "rollouts": Verb(
        "audit what a run sampled: every call trained or excluded, token for token what the engine served",
        lambda call: auditing.audit(
            find_run(call.options.run, call.context.cwd, call.context.machine.environ).path
        ),
        flags.rollouts,
    ),
    "serve-mcp": Verb(
        "the tools of this program as an MCP server on stdin and stdout",
        lambda call: serving.serve(call.options.root or [], call.context),
        flags.serve,
    ),
}
