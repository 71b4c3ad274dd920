"""The real OpenCode and the real mini-swe-agent in a bubblewrap box, against the bridge with an engine that follows a script.

FINETUNE_OPENCODE names OpenCode's executable (bin/opencode of the npm package opencode-linux-x64), FINETUNE_MINI the
folder of a virtual environment with mini-swe-agent.
"""

import os
import shutil
from pathlib import Path

import pytest

from finetune.boxes.bubblewrap import open_box
from finetune.boxes.launching import Limits
from finetune.rollout.bridge import Bridge, BridgeSettings
from finetune.rollout.engine import Fault
from finetune.rollout.harness import HarnessSettings, open_harness
from tests.rollout.scripted import ScriptedEngine, call_text, tiny_chat

CONTEXT = 65536  # the tokens of builtin:tiny are hardly more than letters
LIMITS = Limits(seconds=90, processes=256, memory_bytes=None)
TASK = "Write the word moon into the file out.txt."

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed"),
]
needs_opencode = pytest.mark.skipif(
    not Path(os.environ.get("FINETUNE_OPENCODE", "/nowhere")).is_file(),
    reason="FINETUNE_OPENCODE names no executable",
)
needs_mini = pytest.mark.skipif(
    not Path(os.environ.get("FINETUNE_MINI", "/nowhere")).is_dir(), reason="FINETUNE_MINI names no folder"
)


@pytest.fixture(scope="module")
def chat():
    return tiny_chat(context=CONTEXT)


@pytest.fixture
def engine(chat):
    return ScriptedEngine(chat)


@pytest.fixture
def bridge(engine, chat):
    base = ScriptedEngine(chat, ["A title"], version="base")
    with Bridge(engine, chat, base, BridgeSettings(CONTEXT, 512)) as bridge:
        yield bridge


@pytest.fixture
def run(bridge, engine, tmp_path):
    """Run an agent program on a script of answers; return the outcome and the records."""

    def start(name, script, limits=LIMITS, **settings):
        engine.script = script
        program = Path(os.environ["FINETUNE_OPENCODE" if name == "opencode" else "FINETUNE_MINI"])
        given = {"context": CONTEXT, "max_new_tokens": 512, "program": program} | settings
        harness = open_harness(name, HarnessSettings(**given))
        session = bridge.open("r", seed=1, max_calls=30, helper_prompts=harness.helper_prompts)
        outcome = harness.run(TASK, tmp_path, session, open_box("bubblewrap"), limits)
        return outcome, bridge.close(session)

    return start


def opencode_call(command: str) -> str:
    text = call_text(command)
    return text.replace('"arguments": {', '"arguments": {"description": "runs it", ')


def checked(records, engine) -> None:
    """Check that each call goes on from the one before it by its very ids, and that the engine was asked just these."""
    assert [record.status for record in records] == ["used"] * len(records)
    assert [record.history for record in records] == ["first"] + ["extended"] * (len(records) - 1)
    assert [call.prompt_ids for call in engine.calls] == [record.prompt_ids for record in records]


@needs_opencode
def test_opencode_works_on_a_task_and_its_calls_are_continued_exactly(run, engine, tmp_path):
    outcome, records = run(
        "opencode",
        ["I write. " + opencode_call("echo moon > out.txt"), opencode_call("cat out.txt"), "It is done."],
    )
    assert (outcome.status, outcome.steps) == ("finished", 3), outcome.log
    assert (tmp_path / "out.txt").read_text() == "moon\n"
    checked(records, engine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt"]


@needs_opencode
def test_opencodes_own_agent_with_all_its_tools(run, engine):
    outcome, records = run("opencode", [opencode_call("echo moon > out.txt"), "Done."], agent="build")
    assert outcome.status == "finished", outcome.log
    checked(records, engine)


@needs_opencode
def test_opencodes_compaction_is_the_policys_own_work(run):
    outcome, records = run(
        "opencode",
        [opencode_call("seq 1000"), opencode_call("seq 10"), "The summary: numbers.", "Done."],
        context=8192,
    )
    assert outcome.status == "finished", outcome.log
    assert [(record.purpose, record.status) for record in records] == [("policy", "used")] * len(records)
    assert [record.history for record in records] == ["first", "extended", "first", "rewritten"]


@needs_opencode
def test_opencode_stops_at_its_steps_and_a_denied_command_is_a_turn(run, tmp_path):
    outcome, records = run(
        "opencode",
        [opencode_call("touch denied.txt"), opencode_call("echo 1 > other.txt"), "I stop."],
        max_steps=3,
        denied=("touch*",),
    )
    assert outcome.status == "step_limit", outcome.log
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]
    assert len(records) == 3


@needs_opencode
def test_opencode_without_an_engine_is_a_server_failure(run):
    outcome, records = run(
        "opencode", [Fault("server", "it broke")], Limits(seconds=45, processes=256, memory_bytes=None)
    )
    assert outcome.status == "server", outcome.log
    assert {record.status for record in records} <= {"server", "aborted"}


@needs_mini
def test_mini_works_on_a_task_and_its_calls_are_continued_exactly(run, engine, tmp_path):
    outcome, records = run(
        "mini",
        [
            "I write. " + call_text("echo moon > out.txt"),
            "No call at all.",
            call_text("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ],
    )
    assert (outcome.status, outcome.steps) == ("finished", 3), outcome.log
    assert (tmp_path / "out.txt").read_text() == "moon\n"
    checked(records, engine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt"]


@needs_mini
def test_mini_stops_at_its_steps(run):
    outcome, records = run("mini", [call_text("true")], max_steps=2)
    assert (outcome.status, len(records)) == ("step_limit", 2), outcome.log
