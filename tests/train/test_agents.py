"""Agents on real tasks in real boxes, answered by a script: what becomes of each way in which a rollout can go."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.boxes.process import ProcessBox
from finetune.data.prepare import Prepared
from finetune.domains.tasks import TaskScore
from finetune.errors import FinetuneError
from finetune.knobs import build
from finetune.methods import METHODS
from finetune.records import Example, Ledger, Row
from finetune.rollout.engine import Fault
from finetune.rollout.ledger import Rollout, RolloutBatch, RolloutFiles, account
from finetune.rollout.served import ServedEngine
from finetune.train import agents
from finetune.train.agents import AgentSampler, all_done
from finetune.train.rollouts import Maker
from finetune.train.sampling import Draw
from finetune.train.segments import batch_segments
from tests.rollout.scripted import CONTEXT, ScriptedEngine, call_text, tiny_chat

DESK = Path(agents.__file__).parents[1] / "domains" / "desk"
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
SOLVED = {
    "Append the line milk": call_text("echo milk >> list.txt"),
    "Copy the file report.txt": call_text("cp report.txt backup.txt"),
    "Create a file named note.txt": call_text("echo hello desk > note.txt"),
}


def solving(prompt: str) -> str:
    """Return the oracle's command to a task, and a last word once it was run."""
    if "[exit code" in prompt:
        return "It is done."
    return next(answer for asked, answer in SOLVED.items() if asked in prompt)


@pytest.fixture(scope="module")
def chat() -> Any:
    return tiny_chat()


@pytest.fixture
def work(chat: Any) -> Callable[..., list[Rollout]]:
    """Have agents work on tasks of the desk, one rollout each; the engine stays at work.engine, work.base is its base."""

    def start(
        script: Any,
        tasks: tuple[str, ...] = ("append-line",),
        beat: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> list[Rollout]:
        values = {
            "model": "builtin:tiny",
            "data": ["tasks:builtin:desk"],
            "tasks": ["builtin:desk"],
            "max_length": CONTEXT,
            "max_completion_tokens": 64,
            "box": "process",
            "agents": 2,
        }
        config = build(METHODS["grpo"].config, values | settings)
        sampler = AgentSampler(config, chat, beat)  # type: ignore[arg-type]
        base = getattr(start, "base", None)
        start.engine = ServedEngine(ScriptedEngine(chat, script), base)  # type: ignore[attr-defined]
        rollouts = [
            Rollout(f"1-0-{place}", 0, place, place, f"{name}:1", 50 + place, "step-1", [])
            for place, name in enumerate(tasks)
        ]
        rows = [Row({"folder": str(DESK / name)}, name, 1) for name in tasks]
        draw = Draw(start.engine, 1.0)  # type: ignore[attr-defined]
        made = sampler.sample(rollouts, rows, draw)
        assert draw.sampling_s > draw.scoring_s >= 0
        return made

    return start


def test_work_that_solves_its_task_is_worth_one_and_other_work_nothing(work: Any) -> None:
    names = ("append-line", "copy-file", "write-note")
    made = work(solving, names)
    assert [one.reward for one in made] == [1.0, 1.0, 1.0], [one.error for one in made]
    assert [one.agent["task"] for one in made] == list(names)
    assert [len(one.calls) for one in made] == [2, 2, 2]
    (idle,) = work(lambda prompt: "I would rather not.")
    assert (idle.status, idle.reward, idle.text) == ("scored", 0.0, "I would rather not.")


@needs_bwrap
def test_agents_and_verifiers_work_in_boxes_that_isolate(work: Any) -> None:
    (made,) = work(solving, box="bubblewrap")
    assert (made.status, made.reward) == ("scored", 1.0)
    where = [call_text("cat /proc/self/cgroup >/dev/null; pwd; ls /verifier"), "done"]
    (looked,) = work(where, box="bubblewrap")
    assert "/workspace" in looked.agent["log"]
    assert "No such file" in looked.agent["log"]


def test_what_is_recorded_is_what_the_engine_served_and_all_of_it_is_trained(work: Any) -> None:
    made = work(solving, ("append-line", "copy-file"))
    calls = [call for one in made for call in one.calls]
    served = sorted((one["seed"], one["completion_tokens"]) for one in work.engine.records)
    assert served == sorted((call.sampling["seed"], len(call.completion_ids)) for call in calls)
    segments = batch_segments(made)
    assert [one.rollout for one in segments] == [0, 1], "both calls of a conversation are one segment"
    assert account(made)["calls"] == {
        "sampled": 4,
        "trained": 4,
        "excluded": {},
        "unanswered": 0,
        "trained_tokens": sum(len(call.completion_ids) for call in calls),
    }


def test_a_server_that_fails_is_tried_again_and_what_the_lost_try_sampled_is_excluded(work: Any) -> None:
    answers = iter([call_text("true"), *[Fault("server", "it broke")] * 3])

    def script(prompt: str) -> Any:
        return next(answers, None) or solving(prompt)

    (made,) = work(script)
    assert (made.status, made.reward, made.agent["tries"]) == ("scored", 1.0, 2)
    assert [call.rollout for call in made.calls].count("1-0-0.try2") == 2
    found = account([made])["calls"]
    assert (found["trained"], found["excluded"], found["unanswered"]) == (2, {"retried": 1}, 3)
    seeds = [call.sampling["seed"] for call in made.calls if call.completion_ids]
    assert len(set(seeds)) == 3, "another try draws anew"


@pytest.mark.parametrize(
    ("script", "settings", "status", "tries"),
    [
        (Fault("server", "it broke"), {}, "server", 2),
        ("none", {"harness": "command", "harness_command": ["sh", "-c", "exit 3"]}, "agent", 2),
        ("none", {"harness": "command", "harness_command": ["sleep", "30"]}, "timeout", 1),
        (call_text("true"), {}, "scored", 1),
    ],
)
def test_failures_have_names_and_no_reward(
    script: Any, settings: dict[str, Any], status: str, tries: int, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = agents.load_tasks
    if status == "timeout":
        monkeypatch.setattr(agents, "load_tasks", lambda spec: [hurried(task) for task in real(spec)])
    (made,) = work([script], **settings)
    assert (made.status, made.agent["tries"]) == (status, tries), made.error
    assert made.reward is None if status != "scored" else made.reward == 0.0
    if status == "scored":
        assert made.truncated, "its steps were used up"


def hurried(task: Any) -> Any:
    """Return the task with a second for the agent."""
    return replace(task, limits=replace(task.limits, seconds=1.0))


ASKS_ON = """
import json, os, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
for number in range(9):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": str(number)}]}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
"""


def test_a_program_that_asks_on_and_on_gets_no_more_answers_than_its_budget(work: Any) -> None:
    command = [ProcessBox().python, "-c", ASKS_ON]
    (made,) = work(["an answer"], harness="command", harness_command=command, max_agent_steps=3)
    assert [bool(call.completion_ids) for call in made.calls] == [True, True, True], made.agent
    assert (made.agent["status"], made.truncated) == ("step_limit", True)


def test_an_engine_that_cannot_go_on_ends_the_training_and_is_no_lost_rollout(work: Any) -> None:
    with pytest.raises(FinetuneError, match="a restarted server") as caught:
        work([FinetuneError("sync_unproved", "a restarted server was not proved")])
    assert caught.value.code == "sync_unproved"


class Closed(ProcessBox):
    """A box that opens once, for the check before a run, and no more."""

    def run(self, *args: Any, **more: Any) -> Any:
        raise FinetuneError("no_sandbox", "no room for a box")


def test_a_box_that_breaks_is_a_lost_rollout_and_no_zero(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "open_box", lambda name: Closed())
    (made,) = work(solving)
    assert (made.status, made.reward, made.agent["tries"]) == ("sandbox", None, 2)
    assert "no room for a box" in made.error


@pytest.mark.parametrize(
    ("told", "status"), [("verifier", "verifier"), ("timeout", "verifier"), ("limit", "limit")]
)
def test_a_verifier_that_fails_gives_no_reward(
    told: str, status: str, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "verify", lambda *args: TaskScore(None, {}, told, "it says why"))
    (made,) = work(solving)
    assert (made.status, made.reward, made.error) == (status, None, "it says why")
    assert batch_segments([made]) == []


def test_an_engine_of_another_version_is_found(work: Any, chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ScriptedEngine._one

    def renamed(self: ScriptedEngine, call: Any) -> Any:
        self.version = "step-0" if self.given else "step-1"
        return real(self, call)

    monkeypatch.setattr(ScriptedEngine, "_one", renamed)
    (made,) = work(solving, agent_retries=0)
    assert (made.status, made.reward) == ("protocol", None)


ASKS_A_TITLE = """
import json, os, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
for model in ("helper", "policy"):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}]}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
"""


def test_helper_calls_bear_the_version_of_the_base_and_are_no_change_of_version(work: Any, chat: Any) -> None:
    work.base = ScriptedEngine(chat, ["a title"], version="base")
    command = [ProcessBox().python, "-c", ASKS_A_TITLE]
    (made,) = work(["hi"], harness="command", harness_command=command)
    assert [call.version for call in made.calls] == ["base", "step-1"]
    assert (made.status, made.reward) == ("scored", 0.0), made.error


def test_a_command_that_no_shell_can_be_given_is_told_to_the_policy(work: Any) -> None:
    (made,) = work([call_text("echo a\0b"), "done"])
    assert (made.status, made.reward) == ("scored", 0.0), made.error
    assert "null byte" in made.agent["log"]


@pytest.mark.parametrize("left", ["ln -s /etc/passwd $(printf 'a\\377')", "mkfifo $(printf 'a\\377')"])
def test_a_name_that_is_no_text_is_left_out_by_a_note_that_can_be_written(
    left: str, work: Any, tmp_path: Path
) -> None:
    (made,) = work([call_text(left), "done"])
    assert r"a\udcff" in made.agent["verifier_log"]
    RolloutFiles(tmp_path).write(RolloutBatch(1, 1, "d", [made]))
    assert RolloutFiles(tmp_path).read(1) is not None


def test_folders_whose_paths_are_too_long_are_a_limit(work: Any) -> None:
    deep = "n=$(printf 'a%.0s' $(seq 250)); for i in $(seq 20); do mkdir $n && cd -P $n || break; done"
    (made,) = work([call_text(deep), "done"])
    assert (made.status, made.reward) == ("limit", None), made.error


def test_an_answer_that_the_limit_cut_at_the_end_is_truncated(work: Any) -> None:
    (cut,) = work([call_text("true"), "I have don..."])
    assert (cut.status, cut.agent["status"], cut.truncated) == ("scored", "finished", True)
    (whole,) = work([call_text("true..."), "It is done."])
    assert not whole.truncated


def test_where_no_prompt_is_left_to_sample_in_place_of_flat_groups_the_batch_stays(chat: Any) -> None:
    names = ["append-line", "copy-file"]
    values: dict[str, Any] = {
        "model": "builtin:tiny",
        "data": ["tasks:builtin:desk"],
        "tasks": ["builtin:desk"],
    }
    values |= {"max_length": CONTEXT, "max_completion_tokens": 64, "box": "process", "agents": 2}
    values |= {"group_size": 2, "global_batch_size": 4, "resample_zero_variance": 1}
    config: Any = build(METHODS["grpo"].config, values)
    examples = [Example([1, 2, 3], [0.0] * 3, place, name, 1) for place, name in enumerate(names)]
    rows = [Row({"folder": str(DESK / name)}, name, 1) for name in names]
    prepared = Prepared(examples, [], [], Ledger(read=2, trained=2), {}, [], rows)
    engine = ScriptedEngine(chat, ["no"])
    sampler = AgentSampler(config, chat, lambda: None)
    batch = Maker(config, prepared, engine, sampler, chat.tokenizer).batch(1, 1, "d", "step-1")
    assert [(one.status, one.reward) for one in batch.rollouts] == [("scored", 0.0)] * 4


def test_what_agents_left_is_gone_once_the_training_is_told_to_stop(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def beat() -> None:
        if list(tmp_path.rglob("left")):
            raise FinetuneError("stopped", "told to stop")

    with pytest.raises(FinetuneError, match="told to stop"):
        work([call_text("touch left; sleep 5")], beat=beat)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_training_that_is_told_to_stop_waits_for_no_agent() -> None:
    begun, forever = threading.Event(), threading.Event()

    def job() -> int:
        begun.set()
        return int(forever.wait(60))

    def beat() -> None:
        if begun.is_set():
            raise FinetuneError("stopped", "told to stop")

    with pytest.raises(FinetuneError, match="told to stop"):
        all_done([job, job], 1, beat)
    forever.set()


def test_what_a_job_raises_is_raised_and_ends_the_others() -> None:
    done: list[int] = []

    def broken() -> int:
        raise ZeroDivisionError("of its own")

    with pytest.raises(FinetuneError, match="of its own"):
        all_done([broken, lambda: done.append(1) or 1], 1, lambda: None)
    assert done == []
    assert all_done([lambda place=place: place for place in range(5)], 2, lambda: None) == [0, 1, 2, 3, 4]
