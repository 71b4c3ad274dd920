"""Write the generated tables of the documentation anew; `make docs` runs it, and a test fails where one is stale.

A table stands between `<!-- begin NAME: ... -->` and `<!-- end NAME -->`; what stands between is replaced whole.
`flags-VERB` is a name for each verb.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from agent.cli import make_parser
from agent.commands import VERBS
from agent.hints import hints
from agent.states import MOVES
from finetune.errors import EXIT_CODES, WARNINGS
from finetune.knobs import Knob, knobs
from finetune.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
SKILL_PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("skills/*/**/*.md"))
DOCUMENTS = ("README.md", "docs/hints.md", "SKILL.md", *SKILL_PAGES)
MEANINGS = {
    0: "done, or the same run already runs or is finished",
    2: "usage: the command line or a setting is wrong",
    3: "input or preflight: data, model, template or profile cannot be used as they are",
    4: "environment: no device, driver or package",
    5: "access: a gated model, a token, no network",
    6: "needs confirmation: it costs more than was agreed to",
    7: "conflict: the folder belongs to another plan, or is in use",
    8: "training failed, or nothing was learned (then there is no adapter/)",
    9: "a bounded wait ended and the run goes on",
    10: "stopped with a good checkpoint; the same command resumes",
    70: "a bug of ours",
}
# What an agent does on each exit code.
MOVES_NEXT = {
    0: "go on with `next_actions`",
    2: "mend the flag that the message names",
    3: "do what `errors[].fix` says, all of them",
    4: "`finetune doctor`",
    5: "ask the user for access, or use local files",
    6: "show the plan to the user, then repeat with `--confirm`",
    7: "another `--out` or target; `evidence.mismatch` says what differs",
    8: "`finetune explain-error RUN`",
    9: "`finetune status RUN --wait 50` again",
    10: "`finetune resume RUN`",
    70: "report the command and its stderr",
}
STATES = {
    "planned": "a folder and a plan; its full checks are made",
    "queued": "waiting to start",
    "starting": "loading the model, starting engines",
    "running": "training",
    "saving": "writing a checkpoint",
    "stopping": "finishing the step and saving",
    "stopped": "ended on request or by a budget, with a checkpoint",
    "preempted": "ended by a signal of the system, with a checkpoint",
    "succeeded": "finished; adapter/ is there",
    "failed": "ended with an error: data.error",
    "lost": "its processes are gone without a word",
}
# The hints of one subject, where the exit code alone would give too many.
DATA_HINTS = """file_missing no_rows bad_row duplicate_key unknown_columns bad_roles empty_assistant no_supervised_token
too_long too_few_rows bad_domain no_chat_template bad_template template_not_prefix_stable tokens_past_embedding
no_stop_token""".split()
DATA_WARNINGS = """prepared_reused stop_token_differs pad_is_stop_token text_beside_template special_text_kept_as_text
template_ignores_tools reasoning_dropped duplicate_rows train_eval_overlap rows_dropped rows_truncated no_eval_rows""".split()
GRPO_HINTS = """bad_verifier blind_verifier bad_rollouts engine_unfit engine_missing engine_model engine_failed
engine_out_of_memory engine_timeout sync_unproved rollout_failures verifier_failed no_sandbox no_engine
unsuited_correction sampler_mismatch low_entropy verifier_not_checked""".split()
TASK_HINTS = "bad_task task_overlap task_check_failed no_sandbox".split()
DATA_SETTINGS = """data eval_data eval_fraction eval_rows split_seed domain data_format map system_prompt chat_template
chat_template_args max_length on_long on_bad_row learn""".split()


def settings_table() -> str:
    rows = [_setting(item) for item in knobs(METHODS["sft"].config)]
    return _table(("flag", "values", "default", "meaning"), rows)


def grpo_settings_table() -> str:
    """The settings that grpo has besides those of sft, or with another default."""
    common = {_setting(item) for item in knobs(METHODS["sft"].config)}
    return _table(
        ("flag", "values", "default", "meaning"),
        [row for item in knobs(METHODS["grpo"].config) if (row := _setting(item)) not in common],
    )


def methods_table() -> str:
    return _table(("method", "what it does"), [(f"`{item.name}`", item.summary) for item in METHODS.values()])


def _setting(item: Knob) -> tuple[str, str, str, str]:
    values = ", ".join(map(str, item.choices)) or {bool: "on/off", str: "text"}.get(
        item.kind, item.kind.__name__
    )
    default = "required" if item.required else "none" if item.default in (None, []) else str(item.default)
    if item.kind is bool and isinstance(item.default, bool):
        default = "on" if item.default else "off"
    advanced = " (--help-all)" if item.advanced else ""
    return f"`{item.flag}`", values + (" ..." if item.is_list else ""), default, item.help + advanced


def exit_codes_table() -> str:
    codes = {
        number: sorted(code for code, exit_code in EXIT_CODES.items() if exit_code == number)
        for number in MEANINGS
    }
    return _table(
        ("exit", "meaning", "error codes"),
        [(str(n), MEANINGS[n], ", ".join(codes[n]) or "-") for n in MEANINGS],
    )


def next_moves_table() -> str:
    rows = [(str(number), meaning, MOVES_NEXT[number]) for number, meaning in MEANINGS.items()]
    return _table(("exit", "meaning", "your next move"), rows)


def states_table() -> str:
    rows = [(f"`{state}`", meaning, ", ".join(MOVES[state]) or "-") for state, meaning in STATES.items()]
    return _table(("status", "meaning", "what may follow"), rows)


def data_settings_table() -> str:
    items = {item.name: item for item in knobs(METHODS["sft"].config)}
    return _table(("flag", "values", "default", "meaning"), [_setting(items[name]) for name in DATA_SETTINGS])


def all_grpo_settings_table() -> str:
    return _table(
        ("flag", "values", "default", "meaning"), [_setting(item) for item in knobs(METHODS["grpo"].config)]
    )


def verbs_table() -> str:
    """The verbs with the names of their own flags."""
    rows = []
    for name, verb in VERBS.items():
        own = [_spelled(action) for action in _own_flags(name)]
        settings = ["settings"] if verb.takes_settings else []
        rows.append((f"`{name}`", verb.summary, ", ".join([*own, *settings]) or "-"))
    return _table(("verb", "what it does", "takes"), rows)


def flags_table(verb: str) -> str:
    """The own flags of one verb."""
    if not _own_flags(verb):
        return "None of its own."
    rows = [(_spelled(action), *_described(action)) for action in _own_flags(verb)]
    return _table(("flag", "values", "default", "meaning"), rows)


def _own_flags(verb: str) -> list[argparse.Action]:
    return [
        action
        for action in make_parser(verb, None)._actions
        if action.dest not in ("help", "json") and action.help != argparse.SUPPRESS
    ]


def _spelled(action: argparse.Action) -> str:
    """Return a flag as it is written, or what stands in the place of a positional argument."""
    place = action.metavar or "|".join(map(str, action.choices or [])) or action.dest
    return f"`{action.option_strings[-1] if action.option_strings else place}`"


def _described(action: argparse.Action) -> tuple[str, str, str]:
    """Return values, default and meaning of a flag."""
    if action.nargs == 0:
        return "-", "off", action.help or ""
    kind = getattr(action.type, "kind", action.type) or str  # the Number of a flag has one
    named = str(action.metavar or "") if action.option_strings else ""
    values = ", ".join(map(str, action.choices or [])) or named or {str: "text"}.get(kind, kind.__name__)
    more = " ..." if action.nargs in ("+", "*") else ""
    needed = not action.option_strings and action.nargs not in ("?", "*")
    default = "required" if needed else "none" if action.default is None else str(action.default)
    return values + more, default, action.help or ""


def hints_table(names: Iterable[str] | None = None) -> str:
    rows = [
        (f"`{hint.id}`", str(EXIT_CODES.get(hint.id, "-")), hint.cause, hint.fix, hint.confirm)
        for hint in (hints().values() if names is None else (hints()[name] for name in names))
    ]
    return _table(("hint", "exit", "cause", "fix", "how to see that it worked"), rows)


def _of_exits(*numbers: int, without: Iterable[str] = ()) -> list[str]:
    return [code for code, number in EXIT_CODES.items() if number in numbers and code not in set(without)]


def _health_hints() -> list[str]:
    """The hints that the rules of agent/health.py give, in their order there."""
    source = (ROOT / "agent" / "health.py").read_text()
    return [name for name in dict.fromkeys(re.findall(r'"(\w+)"', source)) if name in hints()]


def _hints_by_name() -> dict[str, Callable[[], str]]:
    groups = {
        "hints-6-7": _of_exits(6, 7),
        "hints-endings": _of_exits(9, 10, 70),
        "hints-data": DATA_HINTS,
        "hints-health": _health_hints(),
        "hints-data-warnings": DATA_WARNINGS,
        "hints-grpo": GRPO_HINTS,
        "hints-tasks": TASK_HINTS,
        "hints-model": _of_exits(3, without=[*DATA_HINTS, *GRPO_HINTS, *TASK_HINTS]),
        "hints-training": _of_exits(8, without=GRPO_HINTS),
        "hints-warnings": [name for name in hints() if name in WARNINGS],
        "hints-others": [name for name in hints() if name not in WARNINGS and name not in EXIT_CODES],
        **{f"hints-{number}": _of_exits(number) for number in (2, 3, 4, 5, 8)},
    }
    return {name: partial(hints_table, names) for name, names in groups.items()}


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods_table,
    "settings": settings_table,
    "settings-grpo": grpo_settings_table,
    "settings-grpo-all": all_grpo_settings_table,
    "settings-data": data_settings_table,
    "exit-codes": exit_codes_table,
    "exit-codes-short": next_moves_table,
    "states": states_table,
    "verbs": verbs_table,
    "hints": hints_table,
    **_hints_by_name(),
    **{f"flags-{name}": partial(flags_table, name) for name in VERBS},
}


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def filled(text: str) -> str:
    """Return a document with each of its tables made anew; raise KeyError where a table has no maker."""
    between = re.compile(r"(<!-- begin (?P<name>[\w-]+)[^>]*-->\n).*?(<!-- end (?P=name) -->)", re.DOTALL)
    return between.sub(lambda found: f"{found[1]}{TABLES[found['name']]()}\n{found[3]}", text)


def main() -> int:
    for name in DOCUMENTS:
        path = ROOT / name
        old, new = path.read_text(), filled(path.read_text())
        if old != new:
            path.write_text(new)
            print(f"docs: {name} was stale", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
