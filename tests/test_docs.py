"""The documentation tells the truth: generated tables are fresh, named files and flags exist, commands are understood."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.errors import EXIT_CODES
from scripts.make_docs import DOCUMENTS, MEANINGS, ROOT, filled

PAGES = ("README.md", "AGENTS.md")
GENERATED = re.compile(r"<!-- begin .*?<!-- end [\w-]+ -->", re.DOTALL)
FENCES = re.compile(r"```sh\n(.*?)```", re.DOTALL)
# What a run or a measurement leaves, not part of the repository.
MADE = ("runs/", "adapter/", "proof.jsonl", "bench.json", "plan.json", "run.json", "rows.jsonl")


def prose(page: str) -> str:
    return GENERATED.sub("", (ROOT / page).read_text())


def commands() -> list[str]:
    """Return the lines of README's shell blocks without their comments."""
    lines = [
        line.split("  #")[0].strip()
        for block in FENCES.findall(prose("README.md"))
        for line in block.splitlines()
    ]
    return [line for line in lines if line]


@pytest.mark.parametrize("page", DOCUMENTS)
def test_generated_tables_are_fresh(page: str) -> None:
    text = (ROOT / page).read_text()
    assert filled(text) == text, "run `make docs`"


def test_every_exit_code_has_its_meaning() -> None:
    assert set(MEANINGS) == {0, *EXIT_CODES.values()}


def test_a_stale_table_is_found() -> None:
    text = "<!-- begin exit-codes: made -->\nold\n<!-- end exit-codes -->"
    assert "| 70 | a bug of ours | bug |" in filled(text)


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = prose(page)
    quoted = re.findall(r"`([\w./-]+)`", text)
    paths = {
        name for name in quoted if name.endswith("/") or re.search(r"\.(py|md|toml|json|jsonl|yaml)$", name)
    }
    paths |= set(re.findall(r"\]\((?!http)([^)#]+)\)", text))
    missing = [name for name in sorted(paths) if not name.startswith(MADE) and not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_named_flags_exist(page: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", prose(page)))
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", all_help()))
    assert named - known == set()


def all_help() -> str:
    """Return the help of the console command and of every verb, hidden flags included."""
    verbs = sorted(set(re.findall(r"^ {2,4}([a-z][a-z-]+) ", run_cli("--help").stdout, re.MULTILINE)))
    assert "run" in verbs
    grpo = run_cli("run", "--method", "grpo", "--help-all").stdout
    return "\n".join(
        [
            grpo,
            *(run_cli(verb, "--help-all" if verb in ("run", "plan") else "--help").stdout for verb in verbs),
        ]
    )


def run_cli(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command: str, tmp_path: Path) -> None:
    """Runs are done as dry runs; other verbs find no run folder here, which is not a usage error."""
    rows = [{"prompt": f"What is {n}?", "completion": f" It is {n}."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program, *arguments = shlex.split(command)
    if program == "make":
        assert (
            subprocess.run(["make", "-n", *arguments], capture_output=True, cwd=ROOT, check=False).returncode
            == 0
        )
        return
    assert program == ".venv/bin/finetune"
    is_run = arguments[0] == "run"
    more = [flag for flag in ("--dry-run", "--device", "cpu") if flag not in arguments] if is_run else []
    done = run_cli(*arguments, *more, "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert done.returncode == 0 if is_run else done.returncode in (0, 3), answer["errors"]
    assert answer["ok"] == (done.returncode == 0)
