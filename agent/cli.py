"""The console command `finetune`: verbs and flags -> one JSON object on stdout and an exit code.

On a terminal a short text takes the object's place, unless --json is given. Nothing is ever asked.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from agent.commands import VERBS, Call, carried_out
from agent.flags import detach
from agent.monitor import find_run
from agent.plan import plan_of
from agent.render import Answer, document, for_people, text_of
from agent.request import method_in
from agent.runner import Context, guarded
from agent.system import read_machine
from finetune.errors import FinetuneError
from finetune.knobs import FlagParser, add_flags, knobs, unknown_name
from finetune.methods import METHODS, Method, method_named

EXIT_CODES = """exit codes:
  0 done, or the same run already runs or is finished     7 conflict: folder of another plan, or in use
  2 usage                                                 8 training failed, or nothing was learned
  3 input or preflight failed                             9 the wait ended, the run goes on
  4 environment: device, driver, package                 10 stopped with a good checkpoint: resume
  5 access: gated model, token                           70 a bug of ours
  6 needs confirmation"""
EXAMPLE = """example:
  finetune run --method sft --model builtin:smollm2-135m --data rows.jsonl --out runs/a --dry-run"""

# What stands after a verb in its usage line, where it is no single run.
USED_WITH = {
    "verifier-skeleton": " FILE",
    "report": " RUN [RUN ...]",
    "explain-error": " CODE|RUN|FILE|TEXT",
    "skills": " install|list",
    "tasks": " check DIR|FILE|builtin:desk",
}


def main(argv: list[str] | None = None) -> int:
    """Carry out one command; argv is the verb and its flags."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    command = argv[0] if argv[0] in VERBS else "finetune"
    answer = guarded(command, lambda: answer_to(argv))
    value = document(answer)
    try:
        print(
            text_of(value) if "--json" in argv or not sys.stdout.isatty() else for_people(value), flush=True
        )
    except BrokenPipeError:  # whoever asked has gone; the exit code is still the answer's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answer.exit_code


def overview() -> str:
    lines = [
        "finetune VERB ...: finetune an open language model, and know what happened",
        "",
        "verbs (each with --help):",
    ]
    lines += [f"  {name:18}{verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        [*lines, "", "Every verb prints one JSON object on stdout; logs go to stderr.", EXAMPLE, EXIT_CODES]
    )


def answer_to(
    argv: list[str], cwd: Path | None = None, check: Callable[[Call], None] = lambda call: None
) -> Answer:
    """Return what the command answers; raise FinetuneError or Problems where it cannot, or where `check` does."""
    name = argv[0]
    if name not in VERBS:
        raise FinetuneError(
            "usage",
            f"{unknown_name(name, list(VERBS)).replace('setting', 'verb')}; there are: {', '.join(VERBS)}",
        )
    call = read_call(name, argv[1:], Context(read_machine(), cwd or Path.cwd(), argv))
    check(call)
    return carried_out(call)


def read_call(name: str, arguments: list[str], context: Context) -> Call:
    """Return the verb as it was called; unknown and repeated flags are gathered, to be refused with all other problems."""
    verb = VERBS[name]
    method = _method_of(arguments, context.cwd) if verb.takes_settings else None
    parser = make_parser(name, method, advanced="--help-all" in arguments)
    if "--help-all" in arguments:
        parser.print_help()
        sys.exit(0)
    options, rest = parser.parse_known_args(arguments)
    if method and (own := _method_of_run(options, context)) and _value_of("--method", arguments) is None:
        method, parser = own, make_parser(name, own)
        options, rest = parser.parse_known_args(arguments)
    names = {item.name for item in knobs(method.config)} | {"method", "config"} if method else set()
    settings = {key: value for key, value in vars(options).items() if key in names}
    problems = [*_unknown(rest, parser), *_repeated(arguments, parser)]
    return Call(name, settings, options, problems, context)


def make_parser(name: str, method: Method | None, advanced: bool = False) -> FlagParser:
    """Return the parser of one verb: its own flags, and the settings of a method where it takes them."""
    verb = VERBS[name]
    positional = " RUN" if name in ("status", "logs", "stop", "resume", "generate", "export") else ""
    positional = USED_WITH.get(name, positional)
    parser = FlagParser(
        prog=f"finetune {name}",
        usage=f"finetune {name}{positional} [flags]",
        description=verb.summary,
        epilog=f"{EXAMPLE}\n{EXIT_CODES}" if verb.takes_settings else EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    verb.flags(parser)
    if verb.is_job:
        detach(
            parser,
            "do it in a process of its own and return a handle at once; `finetune status` gives the result",
        )
    if method:
        parser.add_argument("--help-all", action="store_true", help="this help with the advanced settings")
        group = parser.add_argument_group(f"settings of {method.name} ({method.summary})")
        group.add_argument(
            "--method", metavar="|".join(METHODS), default=argparse.SUPPRESS, help="how to train (required)"
        )
        group.add_argument(
            "--config",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="settings from a YAML file or a plan.json",
        )
        add_flags(group, method.config, advanced)
    return parser


def _method_of(arguments: list[str], cwd: Path) -> Method:
    """Return the method whose flags are taken: the one named, the one that the config file names, or the first."""
    named = _value_of("--method", arguments)
    if named is None and (config := _value_of("--config", arguments)):
        named = method_in(config, cwd)
    return next(iter(METHODS.values())) if named is None else method_named(named)


def _method_of_run(options: argparse.Namespace, context: Context) -> Method | None:
    """Return the method of the run that a call names, None where it names none: its settings are those of the run."""
    if not isinstance(run := getattr(options, "run", None), str):
        return None
    try:
        return method_named(plan_of(find_run(run, context.cwd, context.machine.environ))["method"])
    except FinetuneError:  # the verb says why
        return None


def _value_of(flag: str, arguments: list[str]) -> str | None:
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
        if argument == flag and place + 1 < len(arguments):
            return arguments[place + 1]
    return None


def _unknown(rest: list[str], parser: argparse.ArgumentParser) -> list[FinetuneError]:
    """Return an error for each flag that does not exist; what follows one is its value and no error of its own."""
    known = [flag.removeprefix("--") for flag in parser._option_string_actions if flag.startswith("--")]
    errors, is_value = [], False
    for argument in rest:
        if argument.startswith("--") and len(argument) > 2:
            name = argument.removeprefix("--").split("=")[0]
            errors.append(FinetuneError("unknown_setting", unknown_name(name, known), setting=name))
            is_value = "=" not in argument
        elif is_value:
            is_value = False
        else:
            errors.append(FinetuneError("usage", f"{argument!r} belongs to no flag"))
    return errors


def _repeated(arguments: list[str], parser: argparse.ArgumentParser) -> list[FinetuneError]:
    """Return an error for each flag that is given twice although it takes one value: neither is taken in silence."""
    given: dict[str, int] = {}
    for argument in arguments:
        action = parser._option_string_actions.get(argument.split("=")[0])
        if (
            action is not None
            and argument.startswith("--")
            and not isinstance(action, argparse._ExtendAction | argparse._StoreTrueAction)
        ):
            given[action.dest] = given.get(action.dest, 0) + 1
    text = "is given more than once; give it once"
    return [
        FinetuneError("settings_conflict", f"{name}: {text}", setting=name)
        for name, count in given.items()
        if count > 1
    ]


if __name__ == "__main__":
    sys.exit(main())
