"""CA-07: a dry run changes nothing on disk but for its plan, whatever is there, and is refused as the run would be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.folder import RunFolder, check_against_schema
from tests.agent.calls import TINY, Standin, checked, codes

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "run_finetune_local.py")]
# All that a command may write to by itself; a folder here that nobody made is made by nobody.
PLACES = {
    "HOME": "user",
    "FINETUNE_HOME": "home",
    "FINETUNE_CACHE": "cache",
    "HF_DATASETS_CACHE": "datasets",
    "XDG_CACHE_HOME": "xdg",
    "TMPDIR": "temporary",
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Return the variables that bring everything under tmp_path."""
    (tmp_path / "temporary").mkdir()
    return {name: str(tmp_path / folder) for name, folder in PLACES.items()}


def everything(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, time and content of all that is in a folder, itself included."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        facts = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (facts.st_mode, facts.st_mtime_ns, content)
    return found


def new_names(before: dict[str, Any], after: dict[str, Any], holding: str) -> list[str]:
    """Return what is new; fail where anything else was changed, but for the time of the folder that holds the new."""
    kept = {name: facts for name, facts in after.items() if name in before and name != holding}
    assert kept == {name: facts for name, facts in before.items() if name != holding}
    return sorted(after.keys() - before.keys())


@pytest.mark.parametrize("out", ["missing", "finished"])
def test_a_dry_run_leaves_nothing_but_its_plan(
    out: str, standin: Standin, flags: list[str], folder: RunFolder, places: dict[str, str], tmp_path: Path
) -> None:
    if out == "finished":
        assert standin("run", *flags, **places)[0]["status"] == "succeeded"
    before = everything(tmp_path)
    environ = os.environ | places
    done = subprocess.run(
        [*SCRIPT, *flags, "--dry-run"], capture_output=True, text=True, env=environ, cwd=tmp_path, check=True
    )
    plan = Path(checked(done.stdout, 0)["artifacts"][0]["path"])
    check_against_schema("plan", json.loads(plan.read_text()))
    first = tmp_path / "home"
    made = [first] if out == "missing" else []
    expected = [*made, first / "plans", plan]
    holding = "." if out == "missing" else "home"
    assert new_names(before, everything(tmp_path), holding) == [
        str(path.relative_to(tmp_path)) for path in expected
    ]
    assert folder.path.exists() == (out == "finished")


@pytest.mark.parametrize(
    ("flags_of_it", "code"),
    [
        (["--data", "ROWS", "--seed", "x", "--leraning-rate", "1"], "bad_value"),
        (["--data", "no_such.jsonl", "--max-length", "100000"], "file_missing"),
        (["--data", "ROWS", "--out", "OTHER"], "plan_conflict"),
        (["--data", "ROWS", "--out", "FOREIGN"], "target_exists"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_dry_run_is_refused_with_the_errors_of_the_run_and_changes_nothing(
    flags_of_it: list[str],
    code: str,
    standin: Standin,
    flags: list[str],
    rows: Path,
    folder: RunFolder,
    places: dict[str, str],
    tmp_path: Path,
) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    if code == "plan_conflict":  # with a finished run of another seed
        assert standin("run", *flags, "--seed", "7", **places)[1] == 0
    meant = {"ROWS": str(rows), "OTHER": str(folder.path), "FOREIGN": str(tmp_path / "foreign")}
    argv = ["run", *TINY, *(meant.get(part, part) for part in flags_of_it)]
    before = everything(tmp_path)
    dry, dry_code = standin(*argv, "--dry-run", cwd=tmp_path, **places)
    assert everything(tmp_path) == before
    true, true_code = standin(*argv, cwd=tmp_path, **places)
    assert code in codes(dry)
    assert (dry_code, dry["errors"]) == (true_code, true["errors"])


def test_full_checks_of_a_dry_run_find_the_errors_of_the_run_and_change_nothing(
    standin: Standin, flags: list[str], places: dict[str, str], tmp_path: Path
) -> None:
    before = everything(tmp_path)
    argv = ["run", *flags, "--dry-run", "--checks", "full"]
    dry, dry_code = standin(*argv, how="refuse", **places)
    after = everything(tmp_path)
    true, true_code = standin("run", *flags, how="refuse", **places)
    # The request that the checking child was given came and went in TMPDIR.
    assert new_names(before, after, "temporary") == []
    assert (dry_code, codes(dry)) == (3, ["too_long", "bad_row"])
    assert (dry_code, dry["errors"]) == (true_code, true["errors"])
