"""Tasks: reading their folders, keeping them apart, the workspace, and what becomes a reward and what does not."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.boxes.bubblewrap import open_box
from finetune.boxes.folders import TooLarge, sealed_copy
from finetune.boxes.process import ProcessBox
from finetune.data.task_files import DESK
from finetune.domains.task_checking import check_tasks
from finetune.domains.tasks import load_tasks, prepare_workspace, require_apart, verify
from finetune.errors import FinetuneError, Problems

DESK_NAMES = [
    "append-line",
    "config-fix",
    "copy-file",
    "csv-sum",
    "json-repair",
    "log-triage",
    "small-program",
    "write-note",
]
HEAD = "---\nversion: 1\n---\n"
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")


def make_task(folder: Path, **files: str) -> Path:
    """Write a task folder; names are paths with __ for / and _DOT_ for a dot."""
    given = {"task_DOT_md": HEAD + "Do it.\n", "oracle__solve_DOT_sh": "touch done\n"}
    given |= (
        {"verifier__test_DOT_sh": "test -e done\n"} if not any("verifier" in key for key in files) else {}
    )
    for key, text in (given | files).items():
        path = folder / key.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def problems(spec: Path) -> list[str]:
    with pytest.raises(Problems) as caught:
        load_tasks(str(spec))
    assert {error.code for error in caught.value.errors} == {"bad_task"}
    return [error.message for error in caught.value.errors]


def scored(folder: Path, script: str, workspace: Path, **files: str):
    """Return what a verifier's script makes of a workspace, in a plain box."""
    (task,) = load_tasks(str(make_task(folder, verifier__test_DOT_sh=script, **files)))
    workspace.mkdir(exist_ok=True)
    return verify(task, workspace, ProcessBox())


def test_a_task_is_what_its_folder_says(tmp_path):
    front = (
        "---\nversion: 1\ntimeout_s: 90\nverifier_timeout_s: 7.5\nmax_steps: 6\nallow_internet: false\n"
        "resources: {memory_mb: 512, processes: 20, file_mb: 2, workspace_mb: 3, cpu_s: 50}\n---\n"
    )
    make_task(tmp_path / "one", task_DOT_md=front + "\nDo this,\nthen that.\n")
    (task,) = load_tasks(str(tmp_path / "one"))
    assert (task.name, task.prompt, task.max_steps) == ("one", "Do this,\nthen that.", 6)
    assert (task.timeout_s, task.verifier_timeout_s, task.limits.seconds) == (90, 7.5, 90)
    limits = task.limits
    assert (limits.total_memory_bytes, limits.memory_bytes, limits.processes) == (512 << 20, None, 20)
    assert (limits.file_bytes, limits.workspace_bytes, limits.cpu_seconds) == (2 << 20, 3 << 20, 50)


def test_all_that_is_wrong_with_all_tasks_is_told_at_once(tmp_path):
    bad = "---\nversion: 2\ntimeout_s: soon\nmax_step: 3\nallow_internet: true\nresources: {memory_mb: -1}\n---\n"
    make_task(tmp_path / "a", task_DOT_md=bad + "Do.\n")
    make_task(tmp_path / "b", task_DOT_md="no front matter\n")
    make_task(tmp_path / "c")
    (tmp_path / "c" / "oracle" / "solve.sh").unlink()
    (tmp_path / "c" / "verifier" / "test.sh").unlink()
    (tmp_path / "c" / "link").symlink_to("/etc/passwd")
    text = "\n".join(problems(tmp_path))
    for part in (
        "version must be 1, and is 2",
        "timeout_s: 'soon'",
        "did you mean max_steps?",
        "allow_internet must be false",
        "resources.memory_mb: -1",
        "b/task.md: does not begin with",
        "c/oracle/solve.sh",
        "needs test.sh or test_outputs.py",
        "c/link: only ordinary files",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("version: true", "version must be 1"),
        ("version: 1\ntimeout_s: true", "timeout_s: True"),
        ("version: 1\n- x", "no YAML"),
        ("- 1", "no mapping"),
        ("version: 1\nresources: 5", "resources is no mapping"),
        ("version: 1\nreward: tests", "which a test.sh can tell"),
        ("version: 1\nprograms: [a]", "programs is no mapping"),
        ("version: 1\nprograms: {a: {}}", "programs.a.command is missing"),
        ("version: 1\nprograms: {a: {command: x, files: none}}", "there is no verifier/none"),
        ("version: 1\nprograms: {a: {command: x, stdin: ../task.md}}", "there is no verifier/../task.md"),
        ("version: 1\nprograms: {a/b: {command: x}}", "is no name"),
    ],
)
def test_a_wrong_front_matter_is_named(tmp_path, front, said):
    make_task(tmp_path / "a", task_DOT_md=f"---\n{front}\n---\nDo.\n")
    assert said in "\n".join(problems(tmp_path))


def test_a_task_without_a_prompt_is_refused(tmp_path):
    make_task(tmp_path / "a", task_DOT_md=HEAD + " \n")
    assert "no prompt" in "\n".join(problems(tmp_path))


def test_a_list_names_tasks_and_a_name_may_stand_for_one_only(tmp_path):
    make_task(tmp_path / "tasks" / "a")
    make_task(tmp_path / "tasks" / "b")
    make_task(tmp_path / "others" / "a")
    names = tmp_path / "names.txt"
    names.write_text("tasks/b  # the second\n\n# and one that ships\nbuiltin:desk/copy-file\n")
    assert [task.name for task in load_tasks(str(names))] == ["b", "copy-file"]
    names.write_text("tasks\nothers/a\n")
    assert "another task is called a too" in "\n".join(problems(names))


@pytest.mark.parametrize("spec", ["builtin:desk/none", "builtin:other", "nowhere", "."])
def test_tasks_that_are_not_there_are_named(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FinetuneError) as caught:
        load_tasks(spec)
    assert caught.value.code == "file_missing"


def test_digests_follow_content_and_not_names_or_places(tmp_path):
    one = make_task(tmp_path / "one", environment__a_DOT_txt="1")
    two = shutil.copytree(one, tmp_path / "far" / "two")
    (first,), (second,) = load_tasks(str(one)), load_tasks(str(two))
    assert (first.digest, first.problem) == (second.digest, second.problem)
    (two / "verifier" / "test.sh").write_text("exit 0\n")
    (changed,) = load_tasks(str(two))
    assert changed.digest != first.digest
    assert changed.problem == first.problem


def test_held_out_tasks_that_are_trained_on_are_refused_by_content(tmp_path):
    one = make_task(tmp_path / "train" / "one", environment__a_DOT_txt="1")
    make_task(tmp_path / "train" / "other", task_DOT_md=HEAD + "Do something else.\n")
    renamed = shutil.copytree(one, tmp_path / "eval" / "renamed")
    (renamed / "task.md").write_text("---\nversion: 1\ntimeout_s: 5\n---\nDo   it.\n\n")
    train, held_out = load_tasks(str(tmp_path / "train")), load_tasks(str(tmp_path / "eval"))
    with pytest.raises(FinetuneError) as caught:
        require_apart(train, held_out)
    assert caught.value.code == "task_overlap"
    assert caught.value.evidence["shared"] == [("one", "renamed")]
    (renamed / "environment" / "a.txt").write_text("2")
    require_apart(train, load_tasks(str(tmp_path / "eval")))


def test_a_workspace_holds_the_environment_after_its_setup(tmp_path):
    files = {
        "environment__sub__a_DOT_txt": "1",
        "environment__setup_DOT_sh": "cp sub/a.txt made.txt; pwd > where\n",
    }
    (task,) = load_tasks(str(make_task(tmp_path / "one", **files)))
    workspace = tmp_path / "work"
    workspace.mkdir()
    prepare_workspace(task, workspace, ProcessBox())
    found = sorted(path.relative_to(workspace).as_posix() for path in workspace.rglob("*"))
    assert found == ["made.txt", "sub", "sub/a.txt", "where"]
    (tmp_path / "one" / "environment" / "setup.sh").write_text("echo broken >&2; exit 4\n")
    (tmp_path / "again").mkdir()
    with pytest.raises(FinetuneError) as caught:
        prepare_workspace(task, tmp_path / "again", ProcessBox())
    assert caught.value.code == "bad_task"
    assert "broken" in caught.value.message


@pytest.mark.parametrize(
    ("script", "reward", "status"),
    [
        ("exit 0", 1.0, "scored"),
        ("exit 1", 0.0, "scored"),
        ("exit 2", None, "verifier"),
        ("no-such-command", None, "verifier"),
        ("if then", None, "verifier"),
        ("kill -9 $$", None, "verifier"),
        ("echo 0.25 > $REWARD_DIR/reward.txt", 0.25, "scored"),
        ("echo 0.25 > $REWARD_DIR/reward.txt; exit 1", 0.25, "scored"),
        ("echo 0.25 > $REWARD_DIR/reward.txt; exit 3", None, "verifier"),
        ("echo nan > $REWARD_DIR/reward.txt", None, "verifier"),
        ("echo inf > $REWARD_DIR/reward.txt", None, "verifier"),
        ("echo much > $REWARD_DIR/reward.txt", None, "verifier"),
        (": > $REWARD_DIR/reward.txt", None, "verifier"),
        ("exit 1; touch $REWARD_DIR/reward.txt", None, "verifier"),  # died before it wrote
        ("""echo '{"reward": 0.5, "style": 1}' > $REWARD_DIR/reward.json""", 0.5, "scored"),
        ("echo 0.5 > $REWARD_DIR/reward.json", 0.5, "scored"),
        ("""echo '{"style": 1}' > $REWARD_DIR/reward.json""", None, "verifier"),
        ("""echo '{"reward": true}' > $REWARD_DIR/reward.json""", None, "verifier"),
        ("""echo '{"reward": "1"}' > $REWARD_DIR/reward.json""", None, "verifier"),
        ("""echo '{"reward": NaN}' > $REWARD_DIR/reward.json""", None, "verifier"),
        ("""echo '{"reward": 1' > $REWARD_DIR/reward.json""", None, "verifier"),
        ("mkdir $REWARD_DIR/reward.txt", None, "verifier"),
        ("yes | head -c 5000000; exit 0", 1.0, "scored"),
    ],
)
def test_a_reward_is_what_a_script_says_and_nothing_else_becomes_one(tmp_path, script, reward, status):
    score = scored(tmp_path / "task", script, tmp_path / "work")
    assert (score.reward, score.status) == (reward, status), score.log


def test_parts_of_a_reward_are_kept(tmp_path):
    script = """echo '{"reward": 0.5, "style": 1}' > $REWARD_DIR/reward.json; echo seen"""
    score = scored(tmp_path / "task", script, tmp_path / "work")
    assert (score.parts, score.log) == ({"style": 1.0}, "seen\n")


def test_a_reward_file_where_the_exit_code_counts_is_a_contradiction(tmp_path):
    front = "---\nversion: 1\nreward: exit_code\n---\nDo.\n"
    score = scored(tmp_path / "task", "echo 1 > $REWARD_DIR/reward.txt", tmp_path / "work", task_DOT_md=front)
    assert (score.status, score.reward) == ("verifier", None)
    assert "exit code is the reward" in score.log


def test_a_verifier_that_hangs_is_a_timeout_and_no_zero(tmp_path):
    front = "---\nversion: 1\nverifier_timeout_s: 1\n---\nDo.\n"
    score = scored(tmp_path / "task", "sleep 60", tmp_path / "work", task_DOT_md=front)
    assert (score.status, score.reward) == ("timeout", None)


@pytest.mark.parametrize(
    ("tests", "reward", "status"),
    [
        ("def test_a(): pass\ndef test_b(): assert open('f').read() == 'x'\n", 1.0, "scored"),
        ("def test_a(): pass\ndef test_b(): assert open('g').read() == 'x'\n", 0.0, "scored"),
        ("def other(): pass\n", None, "verifier"),
        ("import nothing_of_that_name\n", None, "verifier"),
        ("def test_a(:\n", None, "verifier"),
        ("import os\ndef test_a(): os._exit(0)\n", None, "verifier"),
        ("def test_a(): raise SystemExit(0)\n", None, "verifier"),
        ("print('noise')\ndef test_a(): print('noise')\n", 1.0, "scored"),
    ],
)
def test_test_functions_are_all_or_nothing(tmp_path, tests, reward, status):
    (task,) = load_tasks(str(make_task(tmp_path / "task", verifier__test_outputs_DOT_py=tests)))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "f").write_text("x")
    score = verify(task, tmp_path / "work", ProcessBox())
    assert (score.reward, score.status) == (reward, status), score.log
    share = verify(replace(task, reward="share_of_tests"), tmp_path / "work", ProcessBox())
    assert share.reward == (0.5 if reward == 0.0 else reward)


def test_a_box_that_cannot_be_set_up_is_no_zero(tmp_path):
    class Broken(ProcessBox):
        def run(self, *told, **given):
            raise FinetuneError("no_sandbox", "no namespace left")

    (task,) = load_tasks(str(make_task(tmp_path / "task")))
    (tmp_path / "work").mkdir()
    score = verify(task, tmp_path / "work", Broken())
    assert (score.reward, score.status, score.log) == (None, "sandbox", "no namespace left")


def test_what_is_judged_is_a_copy(tmp_path):
    workspace = tmp_path / "work"
    score = scored(tmp_path / "task", "touch new; rm -f old; exit 1", workspace)
    (workspace / "old").write_text("kept")
    assert score.reward == 0.0
    assert [path.name for path in workspace.iterdir()] == ["old"]


def test_a_sealed_copy_holds_only_what_stays_inside(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "f").write_text("1")
    (source / "a" / "f").chmod(0o6755)
    os.link(source / "a" / "f", source / "hard")
    os.mkfifo(source / "pipe")
    for name, to in {
        "in": "a/f",
        "a/b/up": "../f",
        "abs": str(source / "a" / "f"),
        "out": "../x",
        "a/b/top": "../..",
        "via": "a/b/top/../x",
    }.items():
        (source / name).symlink_to(to)
    left_out = sealed_copy(source, target)
    assert sorted(line.split(":")[0] for line in left_out) == ["abs", "out", "pipe", "via"]
    assert (
        (target / "in").read_text() == (target / "a/b/up").read_text() == (target / "hard").read_text() == "1"
    )
    assert (target / "a" / "f").stat().st_mode & 0o7777 == 0o755
    assert (target / "hard").stat().st_nlink == 1


def test_a_folder_too_large_or_too_deep_is_not_copied(tmp_path):
    (tmp_path / "source").mkdir()
    with (tmp_path / "source" / "holes").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(TooLarge):
        sealed_copy(tmp_path / "source", tmp_path / "a", 1 << 20)
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "/".join(["d"] * 120)).mkdir(parents=True)
    with pytest.raises(TooLarge):
        sealed_copy(deep, tmp_path / "b")


@needs_bwrap
@pytest.mark.slow
def test_the_desk_holds_eight_tasks_that_pay_for_their_oracle_alone():
    tasks = load_tasks("builtin:desk")
    assert [task.name for task in tasks] == DESK_NAMES
    assert len({task.problem for task in tasks}) == 8
    for check in check_tasks(tasks, open_box()):
        assert check.problems == (), check.oracle.log
        assert (check.oracle.reward, check.idle.reward) == (1.0, 0.0)


@needs_bwrap
def test_the_three_easy_tasks_are_one_command_each():
    for name in ("append-line", "copy-file", "write-note"):
        lines = (DESK / name / "oracle" / "solve.sh").read_text().splitlines()
        assert len(lines) == 1
        assert "difficulty: easy" in (DESK / name / "task.md").read_text()


@needs_bwrap
@pytest.mark.slow
def test_a_check_names_what_is_wrong_with_a_task(tmp_path):
    box = open_box()
    good = make_task(tmp_path / "good")
    generous = make_task(tmp_path / "generous", verifier__test_DOT_sh="exit 0\n")
    stingy = make_task(tmp_path / "stingy", verifier__test_DOT_sh="exit 1\n")
    broken = make_task(tmp_path / "broken", oracle__solve_DOT_sh="exit 7\n")
    setup = make_task(tmp_path / "setup", environment__setup_DOT_sh="exit 7\n")
    tasks = [load_tasks(str(folder))[0] for folder in (good, generous, stingy, broken, setup)]
    found = {check.task.name: " ".join(check.problems) for check in check_tasks(tasks, box)}
    assert found["good"] == ""
    assert "doing nothing is worth 1 and should be 0" in found["generous"]
    assert "the oracle's work is worth 0 and should be 1" in found["stingy"]
    assert "solve.sh failed (exit code 7)" in found["broken"]
    assert found["setup"].count("setup.sh failed") == 2


@needs_bwrap
@pytest.mark.slow
def test_a_verifier_that_the_agent_can_find_is_told(tmp_path):
    """Its setup takes the secret from the verifier by content: what the environment does not hold must not be in the box."""
    secret = "expected: 4711\n"
    (task,) = load_tasks(
        str(
            make_task(
                tmp_path / "leaky",
                verifier__test_DOT_sh="test -e done\n",
                verifier__expected=secret,
                environment__setup_DOT_sh="echo 'expected: 4711' > hint\n",
            )
        )
    )
    (check,) = check_tasks([task], open_box())
    assert any("shows what is to be hidden: /tasks/leaky/hint" in problem for problem in check.problems)
    (plain,) = check_tasks([task], ProcessBox())
    assert any(str(task.folder / "verifier") in problem for problem in plain.problems)
