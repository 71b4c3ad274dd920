"""Each way in which an agent can end is told apart; what an agent program finds in its box."""

import json
import shutil
from pathlib import Path

import pytest

from finetune.boxes.bubblewrap import open_box
from finetune.boxes.launching import Limits
from finetune.boxes.process import ProcessBox
from finetune.errors import FinetuneError
from finetune.rollout.bridge import Bridge, BridgeSettings
from finetune.rollout.engine import Fault
from finetune.rollout.harness import HARNESSES, HarnessSettings, open_harness
from finetune.rollout.harness_opencode import OpencodeHarness
from tests.rollout.scripted import CONTEXT, ScriptedEngine, call_text, tiny_chat

SETTINGS = HarnessSettings(CONTEXT, 64, max_steps=3, tool_timeout_s=5)
LIMITS = Limits(seconds=30)
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
CLIENT = """
import json, os, sys, urllib.request
def ask():
    task = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": task}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
# What a program of the harness `command` may look like.
ASKING = f"{CLIENT}ask()\nassert sys.stdin.read() == os.environ['TASK_PROMPT']\n"


@pytest.fixture(scope="module")
def chat():
    return tiny_chat()


@pytest.fixture
def engine(chat):
    return ScriptedEngine(chat)


@pytest.fixture
def bridge(engine, chat):
    with Bridge(engine, chat, None, BridgeSettings(CONTEXT, 64)) as bridge:
        yield bridge


@pytest.fixture
def run(bridge, engine, tmp_path):
    """Run a harness on a script of answers; the session stays open at run.session."""

    def start(name, script, box=None, limits=LIMITS, settings=SETTINGS, max_calls=None):
        engine.script = script
        start.session = bridge.open("r", seed=1, max_calls=max_calls)
        harness = open_harness(name, settings)
        return harness.run("the task", tmp_path, start.session, box or ProcessBox(), limits)

    return start


def ran(code: str) -> HarnessSettings:
    return HarnessSettings(CONTEXT, 64, command=(ProcessBox().python, "-c", code))


def test_the_loop_runs_commands_until_the_policy_is_done(run, bridge, tmp_path):
    script = [call_text("echo 7 > out; ls") + call_text("cat out; exit 3"), "It is done."]
    outcome = run("loop", script)
    assert (outcome.status, outcome.exit_code, outcome.steps) == ("finished", 0, 2)
    assert (tmp_path / "out").read_text() == "7\n"
    assert "7\n[exit code 3]" in outcome.log
    records = bridge.close(run.session)
    assert [record.history for record in records] == ["first", "extended"]
    assert [record.status for record in records] == ["used", "used"]


@needs_bwrap
def test_the_loop_works_in_a_box_that_isolates(run, tmp_path):
    outcome = run("loop", [call_text("pwd > where"), "done"], box=open_box("bubblewrap"))
    assert outcome.status == "finished"
    assert (tmp_path / "where").read_text() == "/workspace\n"


def test_the_loop_tells_the_policy_what_it_did_wrong(run, engine, chat):
    wrong = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
    outcome = run(
        "loop", [wrong, '<tool_call>{"name": "bash", "arguments": {"command": 5}}</tool_call>', "well"]
    )
    assert outcome.status == "finished"
    assert chat.tokens.decoded(engine.calls[-1].prompt_ids).count("error: there is one tool, bash") == 2


def test_the_loop_ends_at_its_steps(run):
    outcome = run("loop", [call_text("true")])
    assert (outcome.status, outcome.steps) == ("step_limit", 3)


def test_the_loop_ends_where_the_endpoint_has_no_more_calls_or_no_more_room(run):
    assert run("loop", [call_text("true")], max_calls=2).status == "step_limit"
    words = call_text("echo " + "w" * 1300)
    outcome = run("loop", [words, words, words, words], settings=HarnessSettings(CONTEXT, 64, max_steps=9))
    assert (outcome.status, "tokens" in outcome.log) == ("step_limit", True)


def test_the_loop_ends_at_the_time_of_the_task_and_a_command_at_its_own(run):
    settings = HarnessSettings(CONTEXT, 64, max_steps=3, tool_timeout_s=0.3)
    outcome = run("loop", [call_text("sleep 20"), "done"], settings=settings)
    assert (outcome.status, "[timed out]" in outcome.log) == ("finished", True)
    assert run("loop", [call_text("sleep 20")], limits=Limits(seconds=0.5)).status == "timeout"


def test_the_loop_tells_a_server_that_fails_and_a_box_that_does_not_open(run, engine):
    outcome = run("loop", [Fault("server", "it broke")])
    assert (outcome.status, "it broke" in outcome.log) == ("server", True)
    assert len(engine.calls) == 3
    assert run("loop", [Fault("server", "once"), "done"]).status == "finished"
    assert run("loop", [call_text("true")], box=Closed()).status == "sandbox"


class Closed(ProcessBox):
    """A box that cannot be set up."""

    def run(self, *args, **kwargs):
        raise FinetuneError("no_sandbox", "no room for a box")


def test_any_program_finds_the_endpoint_and_the_task(run, bridge):
    outcome = run("command", ["an answer"], settings=ran(ASKING))
    assert (outcome.status, outcome.exit_code, outcome.steps) == ("finished", 0, 1), outcome.log
    assert "an answer" in outcome.log
    assert bridge.close(run.session)[0].status == "used"


@needs_bwrap
def test_in_a_box_that_isolates_the_endpoint_is_all_that_a_program_reaches(run, bridge, tmp_path):
    box = open_box("bubblewrap")
    program = tmp_path.parent / "agent.py"
    program.write_text(ASKING + "print(os.environ['OPENAI_BASE_URL'], sorted(os.listdir('/opt')))")
    settings = HarnessSettings(CONTEXT, 64, program=program, command=(box.python, "/opt/agent"))
    outcome = run("command", ["from inside"], box=box, settings=settings)
    assert outcome.status == "finished", outcome.log
    assert "from inside\nhttp://127.0.0.1:8000/v1" in outcome.log
    assert bridge.close(run.session)[0].status == "used"


@pytest.mark.parametrize(
    ("code", "limits", "status"),
    [
        (ASKING + "sys.exit(4)", LIMITS, "crashed"),
        (ASKING + "os.kill(os.getpid(), 11)", LIMITS, "crashed"),
        ("print('nothing asked')", LIMITS, "crashed"),
        ("import time; time.sleep(30)", Limits(seconds=0.7), "timeout"),
    ],
)
def test_a_program_that_ends_otherwise_is_told_apart(run, code, limits, status):
    assert run("command", ["x"], settings=ran(code), limits=limits).status == status


def test_a_program_that_its_box_ends_is_told_with_the_limit(run):
    code = ASKING + "import time\nopen('big', 'wb').write(bytes(3_000_000))\ntime.sleep(20)"
    outcome = run("command", ["x"], settings=ran(code), limits=Limits(seconds=20, workspace_bytes=1_000_000))
    assert (outcome.status, "its limit of workspace" in outcome.log) == ("crashed", True), outcome.log


def test_a_program_that_gets_no_answer_failed_by_the_server_and_not_by_itself(run):
    assert run("command", [Fault("server", "it broke")], settings=ran(ASKING)).status == "server"
    stubborn = f"{CLIENT}try:\n    ask()\nexcept OSError:\n    ask()\n"
    assert run("command", [Fault("server", "once"), "ok"], settings=ran(stubborn)).status == "finished"


@pytest.mark.slow
def test_a_program_that_asked_a_failed_server_until_its_time_was_over_failed_by_the_server(run):
    waiting = f"{CLIENT}import time\ntry:\n    ask()\nexcept OSError:\n    time.sleep(30)\n"
    limits = Limits(seconds=5)
    assert (
        run("command", [Fault("server", "it broke")], settings=ran(waiting), limits=limits).status == "server"
    )


def test_a_program_past_its_calls_is_at_the_step_limit_however_it_ends(run):
    assert run("command", ["x"], settings=ran(f"{CLIENT}ask()\nask()\n"), max_calls=1).status == "step_limit"
    assert run("command", ["x"], box=Closed(), settings=ran(ASKING)).status == "sandbox"


def test_harnesses_that_lack_their_program_or_name_are_refused(run, tmp_path):
    with pytest.raises(FinetuneError) as caught:
        open_harness("claude", SETTINGS)
    assert (caught.value.code, "loop, mini, opencode, command" in caught.value.message) == ("bad_value", True)
    for name in ("mini", "opencode"):
        for program in (None, tmp_path / "nowhere"):
            with pytest.raises(FinetuneError) as caught:
                run(name, [], settings=HarnessSettings(CONTEXT, 64, program=program))
            assert (caught.value.code, caught.value.exit_code) == ("missing_package", 4)
    with pytest.raises(FinetuneError, match="not installed there"):
        run("mini", [], settings=HarnessSettings(CONTEXT, 64, program=tmp_path))
    with pytest.raises(FinetuneError, match="needs the command"):
        run("command", [])
    assert list(HARNESSES) == ["loop", "mini", "opencode", "command"]


def test_opencode_is_told_to_stay_offline_and_within_its_budget(tmp_path):
    own = tmp_path / "opencode.json"
    own.write_text(
        json.dumps(
            {
                "agent": {
                    "mine": {"prompt": "p", "permission": {"bash": "ask", "read": "deny"}},
                    "build": {"steps": 2},
                },
                "provider": {"other": {}},
                "model": "other/x",
                "permission": {"webfetch": "deny"},
            }
        )
    )
    settings = HarnessSettings(8192, 512, 7, agent="mine", config=own, denied=("git push*",))
    config = OpencodeHarness(settings).config()
    assert (config["model"], config["small_model"], list(config["provider"])) == (
        "local/policy",
        "local/helper",
        ["local"],
    )
    assert (config["default_agent"], config["enabled_providers"]) == ("mine", ["local"])
    assert {name: agent["steps"] for name, agent in config["agent"].items()} == {
        **dict.fromkeys(("plan", "general", "explore", "tiny", "mine"), 7),
        "build": 2,
    }
    bash = {"*": "allow", "git push*": "deny"}
    assert config["permission"] == {"*": "allow", "webfetch": "deny", "bash": bash}
    assert config["agent"]["tiny"]["permission"] == {"bash": bash}
    assert config["agent"]["mine"]["permission"] == {
        "bash": {"*": "ask", "git push*": "deny"},
        "read": "deny",
    }
    assert config["provider"]["local"]["models"]["policy"]["limit"] == {"context": 8192, "output": 512}
    assert config["provider"]["local"]["options"]["apiKey"] == "{env:FINETUNE_TOKEN}"
    own.write_text("[")
    with pytest.raises(FinetuneError) as caught:
        OpencodeHarness(settings).config()
    assert caught.value.code == "bad_value"
    assert Path(own).exists()
