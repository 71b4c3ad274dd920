"""The documentation tells the truth: tables are fresh, named files and flags exist, every command is understood.

That the commands also run as written is in test_docs_run.py.
"""

import re
import subprocess
from pathlib import Path

import pytest

from agent import cli
from agent.commands import VERBS
from agent.runner import Context
from agent.states import MOVES
from finetune.errors import EXIT_CODES
from finetune.methods import METHODS
from scripts.make_docs import DOCUMENTS, MEANINGS, MOVES_NEXT, ROOT, STATES, filled
from tests.agent.calls import CPU
from tests.pages import FLAG, PAGES, PLACEHOLDERS, commands, differences, filled_in, lines_of, prose, tables

# What a run or a measurement leaves, or a page's reader has, not part of the repository.
MADE = ("runs/", "adapter/", "checkpoints/", "rollouts/", "logs/", "proof.jsonl", "bench.json", "plan.json")
MADE += ("run.json", "state.json", "metrics.jsonl", "events.jsonl", "rows.jsonl", "config.json", "a.jsonl")
MADE += ("generation_config.json",)
MADE += ("task.md", "environment/", "verifier/", "oracle/", "test_outputs.py", "reward.json")  # of a task
FOREIGN = {"--enable-lora", "--lora-modules"}  # flags of other programs


@pytest.mark.parametrize("page", DOCUMENTS)
def test_generated_tables_are_fresh(page: str) -> None:
    text = (ROOT / page).read_text()
    assert filled(text) == text, "run `make docs`"


def test_every_exit_code_and_state_has_its_meaning() -> None:
    assert set(MEANINGS) == set(MOVES_NEXT) == {0, *EXIT_CODES.values()}
    assert set(STATES) == set(MOVES)


def test_a_stale_table_is_found() -> None:
    text = "<!-- begin exit-codes: made -->\nold\n<!-- end exit-codes -->"
    assert "| 70 | a bug of ours | bug |" in filled(text)


@pytest.mark.parametrize("page", [*PAGES, "AGENTS.md"])
def test_named_files_exist(page: str) -> None:
    text = prose(page)
    quoted = re.findall(r"`([\w./-]+)`", text)
    paths = {
        name for name in quoted if name.endswith("/") or re.search(r"\w\.(py|md|toml|json|jsonl|yaml)$", name)
    }
    paths -= {name for name in paths if name.startswith((".claude/", ".agents/", ".opencode/"))}
    links = set(re.findall(r"\]\((?!http)([^)#]+)\)", text))
    near = (ROOT / page).parent
    a_skill = ROOT / "skills" / "finetune-setup"  # the pages of the root name what every skill has
    places = (ROOT, near, near.parent, a_skill)  # paths of a skill start from its folder
    missing = [
        name
        for name in sorted(paths)
        if not name.startswith(MADE) and not any((place / name).exists() for place in places)
    ]
    assert not missing
    assert not [link for link in links if not (near / link).exists()]


@pytest.mark.parametrize("page", [*PAGES, "AGENTS.md"])
def test_named_flags_exist(page: str) -> None:
    assert set(FLAG.findall(prose(page))) - all_flags(advanced=True) - FOREIGN == set()


def test_every_flag_stands_in_a_generated_table() -> None:
    """The advanced ones aside, which --help does not show either; --json, --method and the like are told in the text."""
    everywhere = {"--help", "--help-all", "--json", "--method", "--config"}
    named = set(FLAG.findall(tables()))
    assert all_flags(advanced=False) - everywhere - named == set()
    assert everywhere <= {flag for page in PAGES for flag in FLAG.findall(prose(page))} | named


def all_flags(advanced: bool) -> set[str]:
    """Return the flags that the help of any verb shows; of a switch its positive form."""
    texts = [
        cli.make_parser(name, method, advanced).format_help()
        for name, verb in VERBS.items()
        for method in (METHODS.values() if verb.takes_settings else (None,))
    ]
    return {flag.replace("--no-", "--") for text in texts for flag in FLAG.findall(text)}


@pytest.fixture
def reader(tmp_path: Path) -> Context:
    return Context(CPU, tmp_path, [])


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command: str, reader: Context) -> None:
    """Every flag and value is one that the verb takes; whether the files are there is another matter."""
    program, *argv = filled_in(command, dict.fromkeys(PLACEHOLDERS, "x"))
    if program == "make":
        done = subprocess.run(["make", "-n", *argv], capture_output=True, cwd=ROOT, check=False)
        assert done.returncode == 0
        return
    assert program == "finetune"
    if argv != ["--help"]:
        assert cli.read_call(argv[0], argv[1:], reader).problems == []


def test_a_command_with_a_foreign_flag_is_found(reader: Context) -> None:
    assert cli.read_call("plan", ["--no-such-flag"], reader).problems


def test_an_answer_that_lacks_what_is_shown_is_found() -> None:
    shown = {"ok": True, "data": {"loss": 1.5, "rows": [{"id": "a"}]}}
    assert differences(shown, {"ok": True, "data": {"loss": 2, "rows": [{"id": "b", "x": 1}], "y": 0}}) == []
    assert differences(shown, {"ok": False, "data": {"loss": 2, "rows": [{"id": "b"}]}}) == [
        "answer.ok is False and not True"
    ]
    assert differences(shown, {"ok": True, "data": {"loss": "2", "rows": [{}]}}) == [
        "answer.data.loss is '2', of another kind than 1.5",
        "answer.data.rows[0].id is not there",
    ]
    assert differences({"rows": [1]}, {"rows": []}) == ["answer.rows is empty"]


def test_lines_of_a_block_lose_comments_and_the_folder_of_the_program() -> None:
    assert lines_of("finetune list  # all\n\n.venv/bin/finetune doctor\n") == [
        "finetune list",
        "finetune doctor",
    ]
