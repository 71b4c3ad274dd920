"""Odd things that verifiers say, or that code which they run says in their place: no reward, or one that can be written."""

import json
from pathlib import Path

import pytest

from finetune.boxes.process import ProcessBox
from finetune.domains.tasks import load_tasks, verify
from tests.domains.test_tasks import make_task, scored

# Writes to every descriptor, among which is the one that the judge keeps for its verdict.
SAYS = """
import os
for fd in range(3, 30):
    try:
        os.write(fd, {said!r}.encode())
    except OSError:
        pass
os._exit(0)
"""


def judged(folder: Path, tests: str):
    (task,) = load_tasks(str(make_task(folder / "task", verifier__test_outputs_DOT_py=tests)))
    (folder / "work").mkdir()
    return verify(task, folder / "work", ProcessBox())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reward.json", "1" + "0" * 400),
        ("reward.json", '{"reward": 1, "sum": 1' + "0" * 400 + "}"),
        ("reward.json", "[" * 60_000),
        ("reward.json", "1" * 5000),
        ("reward.txt", "1_0"),
        ("reward.txt", "\u0661"),
        ("reward.txt", "0x1"),
        ("reward.txt", "1 2"),
        ("reward.txt", "0.5" + " " * 70_000 + "garbage"),
        ("reward.txt", "1e999"),
    ],
    ids=lambda given: given[:12],
)
def test_a_number_that_is_none_is_no_reward(tmp_path, name, text):
    (tmp_path / "said").write_text(text)
    score = scored(tmp_path / "task", f"cp {tmp_path / 'said'} $REWARD_DIR/{name}", tmp_path / "work")
    assert (score.reward, score.status) == (None, "verifier"), score.log


@pytest.mark.parametrize(("text", "reward"), [("+.5\n", 0.5), (" -1e-2 ", -0.01), ("3.", 3.0), ("7", 7.0)])
def test_a_number_may_be_written_in_each_usual_way(tmp_path, text, reward):
    (tmp_path / "said").write_text(text)
    score = scored(tmp_path / "task", f"cp {tmp_path / 'said'} $REWARD_DIR/reward.txt", tmp_path / "work")
    assert (score.reward, score.status) == (reward, "scored"), score.log


def test_a_part_whose_name_is_no_text_can_be_written(tmp_path):
    (tmp_path / "said").write_text(r'{"reward": 1, "\ud800": 0}')
    score = scored(tmp_path / "task", f"cp {tmp_path / 'said'} $REWARD_DIR/reward.json", tmp_path / "work")
    assert score.parts == {r"\ud800": 0.0}
    json.dumps(score.parts, ensure_ascii=False).encode()
    (tmp_path / "said").write_text(r'{"reward": 1, "\ud800": "no number"}')
    score = scored(tmp_path / "task2", f"cp {tmp_path / 'said'} $REWARD_DIR/reward.json", tmp_path / "work")
    assert score.status == "verifier"
    score.log.encode()


@pytest.mark.parametrize(
    "said",
    [
        "[]",
        "{}",
        "1",
        '{"tests": {"a": "x"}}',
        '{"tests": []}',
        '{"exit_code": 0}',
        '{"exit_code": "0", "files": {"reward.txt": null, "reward.json": null}}',
        '{"exit_code": 0, "files": {"reward.txt": 1, "reward.json": null}}',
    ],
)
def test_what_is_printed_in_the_judges_place_is_no_reward_and_no_fault(tmp_path, said):
    score = judged(tmp_path, SAYS.format(said=said))
    assert (score.reward, score.status) == (None, "verifier"), score.log


@pytest.mark.parametrize(
    "tests",
    [
        "def test_a():\n    yield\n",
        "async def test_a():\n    assert False\n",
        "async def test_a():\n    yield\n",
        "async def run():\n    assert False\ndef test_a():\n    return run()\n",
    ],
)
def test_a_test_that_would_not_run_is_no_passed_one(tmp_path, tests):
    score = judged(tmp_path, tests)
    assert (score.reward, score.status) == (None, "verifier"), score.log
