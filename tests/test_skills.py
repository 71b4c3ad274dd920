"""The skills as they ship: valid, short, each whole in itself, with references on conditions and cases to try them on."""

import json
import re
import shutil
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from skills_ref import validate

from agent.commands import VERBS
from agent.skills import contents, shipped
from scripts.make_docs import ROOT
from tests.pages import page_text

NAMES = [
    f"finetune-{job}" for job in "data evaluate export grpo monitor setup sft tasks troubleshoot".split()
]
ROUTER = "finetune-skills"
FOLDERS = {name: ROOT / "skills" / name for name in NAMES}


@pytest.fixture
def router(tmp_path: Path) -> Path:
    """The root's SKILL.md in a folder of its name, as the validator wants it."""
    folder = tmp_path / ROUTER
    folder.mkdir()
    shutil.copy(ROOT / "SKILL.md", folder)
    return folder


def pages_of(name: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in FOLDERS[name].rglob("*.md"))


def test_the_nine_skills_are_there_and_ship() -> None:
    assert sorted(path.name for path in (ROOT / "skills").iterdir()) == NAMES
    assert sorted(shipped()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_skills_are_valid(name: str) -> None:
    assert validate(FOLDERS[name]) == []


def test_the_router_is_valid(router: Path) -> None:
    assert validate(router) == []


def test_the_validator_refuses_a_foreign_key_and_another_folder_name(router: Path) -> None:
    page = router / "SKILL.md"
    page.write_text(page.read_text().replace("license:", "version: 1\nlicense:", 1))
    assert any("version" in problem for problem in validate(router))
    other = router.rename(router.with_name("elsewhere"))
    assert any("elsewhere" in problem for problem in validate(other))


@pytest.mark.parametrize("page", ["SKILL.md", *(f"skills/{name}/SKILL.md" for name in NAMES)])
def test_skills_are_short_and_say_when_to_use_them(page: str) -> None:
    text = page_text(page)
    assert text.count("\n") < 500
    assert len(text) / 3.5 < 5000  # a token of such text has about four characters
    description = re.search(r"^description: (.*)$", text, re.MULTILINE)
    assert description
    assert description[1].startswith("Use this skill when ")
    assert 100 < len(description[1]) < 1024
    assert not re.search(r"[<>]|---", description[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_skill_has_rules_gotchas_commands_and_a_loop(name: str) -> None:
    text = page_text(f"skills/{name}/SKILL.md")
    for part in ("## Rules", "## Gotchas", "## References", "```sh\n", "```json\n", "scripts/run.py"):
        assert part in text, part
    assert re.search(r"\b([Uu]ntil|[Ll]oop|again|continue)\b", text)


@pytest.mark.parametrize("name", NAMES)
def test_each_reference_is_opened_on_a_condition_and_nothing_leaves_the_folder(name: str) -> None:
    text = page_text(f"skills/{name}/SKILL.md")
    linked = set(re.findall(r"\]\((references/[\w-]+\.md)\)", text))
    there = {f"references/{path.name}" for path in (FOLDERS[name] / "references").iterdir()}
    assert linked == there
    listed = text[text.index("## References") :]
    assert listed.count("Open ") + listed.count("By exit code") >= 1
    for page in pages_of(name):
        links = re.findall(r"\]\((?!http)([^)#]+)\)", page_text(page))
        assert not [link for link in links if link.startswith(("..", "/"))], page


def test_all_scripts_are_one_and_the_same() -> None:
    texts = {(folder / "scripts" / "run.py").read_text() for folder in FOLDERS.values()}
    assert len(texts) == 1


def test_agent_programs_find_the_skills_in_a_checkout() -> None:
    for place in (".claude/skills", ".agents/skills", "agent/skillset"):
        assert (ROOT / place).is_symlink()
        assert (ROOT / place).resolve() == ROOT / "skills"


def test_the_manifests_of_the_plugin_agree_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugin = json.loads((ROOT / ".claude-plugin" / "plugin.json").read_text())
    market = json.loads((ROOT / ".claude-plugin" / "marketplace.json").read_text())
    assert (plugin["name"], plugin["version"], plugin["license"]) == (
        project["name"],
        project["version"],
        project["license"],
    )
    assert not {"skills", "agents", "commands", "hooks"} & set(
        plugin
    )  # the default folders are the right ones
    entry = market["plugins"][0]
    assert (entry["name"], entry["source"], entry["version"]) == (plugin["name"], "./", plugin["version"])
    for page in ["SKILL.md", *(f"skills/{name}/SKILL.md" for name in NAMES)]:
        assert f'  version: "{project["version"]}"\n' in page_text(page)


def test_a_wheel_takes_every_file_of_a_skill_but_its_evals() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["agent"]
    for path in (path for name in NAMES for path in contents(FOLDERS[name])):
        assert any(fnmatch(f"skillset/x/{path}", pattern) for pattern in data), path


@pytest.mark.parametrize("name", NAMES)
def test_evals_name_skills_scripts_and_verbs_that_exist(name: str) -> None:
    content = json.loads((FOLDERS[name] / "evals" / "evals.json").read_text())
    assert content["skill_name"] == name
    cases = content["evals"]
    assert len({case["id"] for case in cases}) == len(cases) >= 5
    near_misses = [case for case in cases if case["expected_skill"] != name]
    assert len(near_misses) >= 1
    for case in cases:
        assert case["prompt"]
        assert case["expected_output"]
        assert case["assertions"]
        assert case["expected_skill"] in (*NAMES, None)
        assert (case["expected_script"] is None) == (case in near_misses)
        assert case["expected_script"] is None or (FOLDERS[name] / case["expected_script"]).exists()
        assert set(case["expected_verbs"]) <= set(VERBS)


def test_trigger_sets_are_balanced_and_differ() -> None:
    wanted: dict[str, str] = {}
    for name in NAMES:
        queries = json.loads((FOLDERS[name] / "evals" / "triggers.json").read_text())
        yes = [item["query"] for item in queries if item["should_trigger"]]
        no = [item["query"] for item in queries if not item["should_trigger"]]
        assert len(set(yes + no)) == len(queries) >= 20
        assert min(len(yes), len(no)) >= 8
        for query in yes:
            assert wanted.setdefault(query, name) == name, "two skills want the same query"
