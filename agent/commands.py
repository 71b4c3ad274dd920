"""The verbs of the console command: what each is called, its own flags, and what answers it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import control, jobs, runner, verbs
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


def _run_flags(parser: argparse.ArgumentParser) -> None:
    _plan_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="plan only: nothing is written but the plan")


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checks",
        choices=("quick", "full"),
        default="quick",
        help="full: read all rows too (a run always does)",
    )
    parser.add_argument(
        "--verify-model",
        action="store_true",
        help="digest all bytes of the weights, not their headers and sizes",
    )


def _run_name(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument("run", nargs="?" if optional else None, metavar="RUN", help="run folder or run id")


def _weights_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=int, help="weights of the checkpoint at this step instead of the final ones"
    )
    parser.add_argument("--base", action="store_true", help="the model before training")


def _status_flags(parser: argparse.ArgumentParser) -> None:
    _run_name(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="return when the run has ended, or after so many seconds (exit 9)",
    )


def _logs_flags(parser: argparse.ArgumentParser) -> None:
    _run_name(parser)
    parser.add_argument(
        "--rank", type=int, help="log of this rank (default: rank 0, or the launcher of a single process)"
    )
    parser.add_argument(
        "--file", metavar="NAME", help="another log by its name, as vllm-0-0.log of an engine"
    )
    parser.add_argument("--grep", metavar="PATTERN", help="only lines with this regular expression")
    parser.add_argument("--offset", type=int, help="first line (default: the last lines)")
    parser.add_argument("--limit", type=int, default=50, help="lines at most")


def _stop_flags(parser: argparse.ArgumentParser) -> None:
    _run_name(parser)
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time to finish the step and save, before it is killed",
    )


def _resume_flags(parser: argparse.ArgumentParser) -> None:
    _run_name(parser)
    parser.add_argument("--extend", type=int, metavar="STEPS", help="go on to so many steps in all")


def _evaluate_flags(parser: argparse.ArgumentParser) -> None:
    _run_name(parser, optional=True)
    _weights_flags(parser)
    parser.add_argument("--adapter", metavar="DIR", help="PEFT adapter to evaluate, where no RUN is given")


def _generate_flags(parser: argparse.ArgumentParser) -> None:
    _run_name(parser)
    _weights_flags(parser)
    parser.add_argument("--prompt", nargs="+", action="extend", help="prompts, each a user turn")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts from a file, one a line (.jsonl: texts or lists of messages)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens of an answer at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    parser.add_argument("--offset", type=int, default=0, help="first prompt")


def _export_flags(parser: argparse.ArgumentParser) -> None:
    _run_name(parser)
    parser.add_argument(
        "--to", metavar="DIR", help="target folder (default: merged or adapter-export in the run folder)"
    )
    parser.add_argument(
        "--kind",
        choices=("merged", "adapter"),
        default="merged",
        help="a whole model, or the adapter in PEFT form",
    )
    parser.add_argument(
        "--export-dtype",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="stored type; auto: that of the base model",
    )
    parser.add_argument(
        "--checkpoint", type=int, help="weights of the checkpoint at this step instead of the final ones"
    )


def _offset_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--offset", type=int, default=0, help="first entry")


def _explain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", metavar="CODE|RUN|FILE|TEXT", help="an error code, a run, a log file, or text of an error"
    )


def _skeleton_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="Python file to write")


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
    "plan": Verb("what a run would do (= run --dry-run)", _plan, _plan_flags, takes_settings=True),
    "run": Verb(
        "train in the foreground; resumes a run that ended early", _run, _run_flags, takes_settings=True
    ),
    "status": Verb(
        "how a run stands",
        lambda call: verbs.status(call.options.run, call.options.wait, call.context),
        _status_flags,
    ),
    "logs": Verb("lines of a run's logs", _logs, _logs_flags),
    "stop": Verb(
        "finish the step, save and end",
        lambda call: control.stop(call.options.run, call.options.grace, call.context),
        _stop_flags,
    ),
    "resume": Verb(
        "go on from the newest checkpoint",
        lambda call: control.resume(call.options.run, call.options.extend, call.context),
        _resume_flags,
    ),
    "evaluate": Verb("loss and accuracy on held-out rows", _evaluate, _evaluate_flags, takes_settings=True),
    "generate": Verb("answers of a trained model", _generate, _generate_flags),
    "export": Verb("write a merged model or an adapter, checked", _export, _export_flags),
    "verifier-skeleton": Verb(
        "write a verifier of your own to start from",
        lambda call: verbs.verifier_skeleton(call.options.file, call.context),
        _skeleton_flags,
    ),
    "list": Verb(
        "the runs of this user", lambda call: verbs.list_runs(call.options.offset, call.context), _offset_flag
    ),
    "explain-error": Verb(
        "what an error code, a failed run or a log means",
        lambda call: verbs.explain_error(call.options.what, call.context),
        _explain_flags,
    ),
}
