"""The verbs of the console command: what each is called, its own flags, and what answers it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import control, flags, jobs, runner, verbs
from agent.folder import RunFolder
from agent.monitor import find_run
from agent.plan import plan_of
from agent.render import Answer
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


def _plan(call: Call) -> Answer:
    return runner.dry_run(
        call.request(), call.context, call.options.checks == "full", call.options.verify_model
    )


def _run(call: Call) -> Answer:
    if call.options.dry_run:
        return _plan(call)
    return runner.run(call.request(), call.context, call.options.verify_model)


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


def _logs(call: Call) -> Answer:
    options = call.options
    if options.rank is not None and options.file is not None:
        raise FinetuneError(
            "settings_conflict", "file and rank both name a log; give one of them", setting="file"
        )
    file = options.file if options.rank is None else f"rank{options.rank}.log"
    return verbs.logs(options.run, file, options.grep, options.offset, options.limit, call.context)


VERBS: dict[str, Verb] = {
    "doctor": Verb("what this machine offers and what is broken", lambda call: verbs.doctor(call.context)),
    "check-data": Verb(
        "read the rows and show what would be learned",
        lambda call: jobs.look_at_data("check-data", call.request(), call.context),
        takes_settings=True,
    ),
    "prepare": Verb(
        "check-data, and keep the prepared rows",
        lambda call: jobs.look_at_data("prepare", call.request(), call.context),
        takes_settings=True,
    ),
    "plan": Verb("what a run would do (= run --dry-run)", _plan, flags.plan, takes_settings=True),
    "run": Verb(
        "train in the foreground; resumes a run that ended early", _run, flags.run, takes_settings=True
    ),
    "status": Verb(
        "how a run stands",
        lambda call: verbs.status(call.options.run, call.options.wait, call.context),
        flags.status,
    ),
    "logs": Verb("lines of a run's logs", _logs, flags.logs),
    "stop": Verb(
        "finish the step, save and end",
        lambda call: control.stop(call.options.run, call.options.grace, call.context),
        flags.stop,
    ),
    "resume": Verb(
        "go on from the newest checkpoint",
        lambda call: control.resume(call.options.run, call.options.extend, call.context),
        flags.resume,
    ),
    "evaluate": Verb("loss and accuracy on held-out rows", _evaluate, flags.evaluate, takes_settings=True),
    "generate": Verb("answers of a trained model", _generate, flags.generate),
    "export": Verb("write a merged model or an adapter, checked", _export, flags.export),
    "verifier-skeleton": Verb(
        "write a verifier of your own to start from",
        lambda call: verbs.verifier_skeleton(call.options.file, call.context),
        flags.skeleton,
    ),
    "list": Verb(
        "the runs of this user",
        lambda call: verbs.list_runs(call.options.offset, call.context),
        flags.offset,
    ),
    "explain-error": Verb(
        "what an error code, a failed run or a log means",
        lambda call: verbs.explain_error(call.options.what, call.context),
        flags.explain,
    ),
}
