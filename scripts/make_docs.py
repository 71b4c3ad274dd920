"""Write the generated tables of the documentation anew; `make docs` runs it, and a test fails where one is stale.

A table stands between `<!-- begin NAME: ... -->` and `<!-- end NAME -->`; what stands between is replaced whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from agent.hints import hints
from finetune.errors import EXIT_CODES
from finetune.knobs import Knob, knobs
from finetune.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/hints.md")
MEANINGS = {
    0: "done, or the same run already runs or is finished",
    2: "usage: the command line or a setting is wrong",
    3: "input or preflight: data, model, template or profile cannot be used as they are",
    4: "environment: no device, driver or package",
    5: "access: a gated model, a token, no network",
    6: "needs confirmation, or over budget",
    7: "conflict: the folder belongs to another plan, or is in use",
    8: "training failed, or nothing was learned (then there is no adapter/)",
    9: "a bounded wait ended and the run goes on",
    10: "stopped with a good checkpoint; the same command resumes",
    70: "a bug of ours",
}


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


def hints_table() -> str:
    rows = [
        (f"`{hint.id}`", str(EXIT_CODES.get(hint.id, "-")), hint.cause, hint.fix, hint.confirm)
        for hint in hints().values()
    ]
    return _table(("hint", "exit", "cause", "fix", "how to see that it worked"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods_table,
    "settings": settings_table,
    "settings-grpo": grpo_settings_table,
    "exit-codes": exit_codes_table,
    "hints": hints_table,
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
