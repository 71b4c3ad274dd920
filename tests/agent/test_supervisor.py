"""Detached runs: a handle at once, a life of their own, and the truth about them whatever is killed.

Most have children that load no model (standin.py); the last ones train builtin:tiny.
"""

import json
import os
import pty
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent.folder import RunFolder, locked, write_document
from agent.processes import ProcessId, wait_until
from agent.standing import standing
from agent.states import UNFINISHED, first_state, moved, owner
from tests.agent.calls import SLOW, STANDIN, TINY, Standin, document, wait_for_step

WITHIN_S = 10  # in which the death of a process must show
ROOT = Path(__file__).parents[2]


def processes_with(text: str) -> list[int]:
    """Return the processes whose command line holds a text, but for this one and zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        pid = int(path.parent.name)
        if text in command and pid != os.getpid() and ProcessId.of(pid) is not None:
            found.append(pid)
    return found


def state_of(folder: RunFolder) -> dict[str, Any]:
    return document(folder.state, "state")


def identity(section: dict[str, Any]) -> ProcessId:
    return ProcessId(section["pid"], section["pid_start"], section["boot_id"])


def ended(folder: RunFolder, seconds: float = 60) -> str:
    """Wait for the end of a run and return its state."""
    assert wait_until(lambda: state_of(folder)["state"] not in UNFINISHED, seconds), state_of(folder)
    assert wait_until(lambda: not identity(state_of(folder)).is_alive, WITHIN_S)
    return str(state_of(folder)["state"])


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Kill what a failed test leaves, which nobody else would."""
    yield
    for pid in processes_with(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


def test_start_answers_while_the_full_checks_still_run(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    answer, code = standin("start", *flags, how="checks:2")
    assert (code, answer["command"], answer["status"]) == (0, "start", "planned")
    state = state_of(folder)
    assert (state["state"], state["pid"]) == ("planned", answer["data"]["pid"])
    assert [action["argv"][1] for action in answer["next_actions"]] == ["status", "stop", "logs"]
    waited, code = standin("status", answer["run_id"], "--wait", "0.2")
    assert (code, waited["errors"][0]["code"]) == (9, "still_running")
    done, code = standin("status", str(folder.path), "--wait", "60")
    assert (code, done["status"], done["run_id"]) == (0, "succeeded", answer["run_id"])
    assert standin("list")[0]["data"]["runs"][0]["run_id"] == answer["run_id"]


def test_a_run_survives_its_terminal_its_parent_and_their_process_group(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    shell, terminal = pty.fork()
    if shell == 0:
        command = [*STANDIN, "start", *flags]
        os.environ |= {"FINETUNE_STANDIN": SLOW, "FINETUNE_HOME": standin.environ["FINETUNE_HOME"]}
        os.execvp("bash", ["bash", "-c", '"$@"; sleep 60', "bash", *command])
    wait_for_step(folder, 1)
    supervisor = state_of(folder)["pid"]
    held = [os.readlink(path) for path in Path(f"/proc/{supervisor}/fd").iterdir()]
    allowed = {"/dev/null", str(folder.supervisor_log), str(folder.lock)}
    foreign = [name for name in held if name not in allowed and str(folder.path) not in name]
    assert not [name for name in foreign if name.startswith(("pipe:", "socket:", "/dev/"))]
    assert (os.getsid(supervisor), os.getpgid(supervisor)) == (supervisor, supervisor)
    os.close(terminal)
    os.killpg(shell, signal.SIGKILL)
    os.waitpid(shell, 0)
    seen = folder.metrics.read_bytes().count(b"\n")
    wait_for_step(folder, seen + 3)
    stopped, code = standin("stop", str(folder.path))
    assert (code, stopped["status"], stopped["data"]["killed"]) == (0, "stopped", False)
    assert stopped["data"]["checkpoint"]


@pytest.mark.slow
def test_eight_starts_at_once_are_one_run(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    started = [standin.start("start", *flags, how="steps:200,pause:0.2") for _ in range(8)]
    answers = [standin.finish(process) for process in started]
    assert {code for _, code in answers} == {0}
    assert len({answer["run_id"] for answer, _ in answers}) == 1
    assert {answer["data"]["pid"] for answer, _ in answers} == {state_of(folder)["pid"]}
    assert standin("stop", str(folder.path))[0]["status"] == "stopped"
    assert len(document(folder.manifest, "run")["attempts"]) == 1


def test_who_asks_while_a_resumed_run_begins_is_told_its_new_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    gone = first_state("sft-1", "0" * 16, "here") | {"state": "stopped", "pid": 2**22 + 1}
    write_document(folder.state, "state", gone)
    named = moved(gone, "starting", **owner("here"))
    with locked(folder):
        later = threading.Timer(0.3, write_document, (folder.state, "state", named))
        later.start()
        answer = standing(folder, {"plan_id": "0" * 16}, "here", is_ours=False)
        later.join()
    assert answer is not None
    assert (answer.status, answer.data["pid"]) == ("starting", os.getpid())


@pytest.mark.slow
def test_a_plan_without_a_folder_is_one_run_unless_another_is_asked_for(
    standin: Standin, rows: Path, tmp_path: Path
) -> None:
    wanted = [*TINY, "--data", str(rows)]
    started = [standin.start("start", *wanted, cwd=tmp_path, how="pause:0.3") for _ in range(3)]
    answers = [standin.finish(process)[0] for process in started]
    assert len({answer["run_dir"] for answer in answers}) == 1
    folder = RunFolder(Path(answers[0]["run_dir"]))
    assert folder.path.parent == tmp_path / "runs"
    assert ended(folder) == "succeeded"
    again, code = standin("start", *wanted, cwd=tmp_path)
    assert (code, again["status"], again["data"]["already_complete"]) == (0, "succeeded", True)
    other, code = standin("start", *wanted, "--new", cwd=tmp_path)
    assert code == 0
    assert other["run_dir"] != answers[0]["run_dir"]
    assert ended(RunFolder(Path(other["run_dir"]))) == "succeeded"
    assert standin("start", *wanted, "--new", "--out", str(tmp_path / "o"))[1] == 2


def test_start_on_a_running_run_is_its_handle_and_stop_saves(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    first, _ = standin("run", "--detach", *flags, how=SLOW)
    wait_for_step(folder, 2)
    second, code = standin("start", *flags)
    assert (code, second["status"], second["data"]["already_running"]) == (0, "running", True)
    assert second["run_id"] == first["run_id"]
    stopped, code = standin("stop", str(folder.path))
    assert (code, stopped["status"]) == (0, "stopped")
    saved = int(Path(stopped["data"]["checkpoint"]).name.removeprefix("step-"))
    resumed, code = standin("resume", str(folder.path), "--detach", how="steps:50")
    assert (code, resumed["command"], resumed["data"]["resumed_from"]) == (0, "resume", saved)
    assert ended(folder) == "succeeded"
    run = document(folder.manifest, "run")
    assert [attempt["status"] for attempt in run["attempts"]] == ["stopped", "succeeded"]
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [*range(1, 51)]


def test_failed_checks_show_as_a_failed_run_which_mended_rows_may_replace(
    standin: Standin, flags: list[str], folder: RunFolder, rows: Path
) -> None:
    answer, _ = standin("start", *flags, how="checks:0.5,refuse")
    assert ended(folder) == "failed"
    seen, code = standin("status", answer["run_id"])
    assert (code, seen["status"], seen["data"]["hint_id"]) == (0, "failed", "too_long")
    assert [error["code"] for error in seen["data"]["errors"]] == ["too_long", "bad_row"]
    assert "--max-length" in seen["data"]["error"]["fix"]
    assert seen["data"]["exit_code"] == 3
    assert not folder.plan.exists()
    assert standin("logs", answer["run_id"])[0]["data"]["files"] == ["supervisor.log"]
    rows.write_text(rows.read_text().replace("31", "13"))  # another plan
    mended, code = standin("start", *flags)
    assert (code, mended["run_dir"]) == (0, answer["run_dir"])
    assert ended(folder) == "succeeded"
    assert state_of(folder)["errors"] == []


def test_a_resumed_run_whose_checks_fail_is_failed_again_and_goes_on_later(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    standin("run", *flags, how="fail:non_finite")
    standin("start", *flags, how="refuse")
    assert ended(folder) == "failed"
    seen, _ = standin("status", str(folder.path))
    assert seen["data"]["error"]["code"] == "too_long"
    standin("start", *flags)
    assert ended(folder) == "succeeded"
    assert standin("status", str(folder.path))[0]["data"]["error"] is None


def test_a_stop_during_the_checks_is_a_stopped_run(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    standin("start", *flags, how="checks:60")
    stopped, code = standin("stop", str(folder.path))
    assert (code, stopped["status"], stopped["data"]["killed"]) == (0, "stopped", False)
    assert wait_until(lambda: not processes_with(str(folder.path)), WITHIN_S)
    standin("start", *flags)
    assert ended(folder) == "succeeded"


def test_a_resumed_run_that_is_stopped_in_its_checks_tells_no_older_failure(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    standin("run", *flags, how="fail:non_finite")
    standin("start", *flags, how="checks:60")
    seen, _ = standin("status", str(folder.path))
    assert (seen["status"], seen["data"]["num_steps"]) == ("starting", 3)
    assert standin("stop", str(folder.path))[0]["status"] == "stopped"
    seen, code = standin("status", str(folder.path))
    assert (code, seen["status"], seen["data"]["exit_code"], seen["data"]["error"]) == (
        0,
        "stopped",
        10,
        None,
    )
    assert "told to" not in seen["summary"]


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["supervisor", "trainer", "all"])
def test_whatever_is_killed_the_truth_is_told_nothing_is_left_and_start_resumes(
    standin: Standin, flags: list[str], folder: RunFolder, victims: str
) -> None:
    standin("start", *flags, how=f"{SLOW},saves:4")
    wait_for_step(folder, 5)  # beyond what is saved, so that steps are done again
    state = state_of(folder)
    chosen = {"supervisor": [state["pid"]], "trainer": [state["child"]["pid"]]}
    for pid in chosen.get(victims, [state["pid"], state["child"]["pid"]]):
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not processes_with(str(folder.path)), WITHIN_S)
    seen, code = standin("status", str(folder.path))
    assert (code, seen["status"]) == (0, "failed" if victims == "trainer" else "lost")
    if victims == "trainer":
        assert seen["data"]["error"]["code"] == "rank_died"
    whole = folder.path.glob("checkpoints/step-*/manifest.json")
    saved = max(int(path.parent.name.removeprefix("step-")) for path in whole)
    assert saved >= 4
    answer, code = standin("start", *flags, how="steps:50")
    assert (code, answer["run_id"]) == (0, state["run_id"])
    assert ended(folder) == "succeeded"
    assert document(folder.manifest, "run")["attempts"][-1]["resumed_from"] == saved
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [*range(1, 51)]


def test_a_supervisor_that_cannot_begin_is_told(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    # The supervisor is a Python of its own: one that fails while it starts.
    answer, code = standin("start", *flags, how="dead-supervisor")
    assert (code, answer["errors"][0]["code"]) == (4, "supervisor_failed")
    assert "told to die" in answer["errors"][0]["evidence"]["log_tail"]
    assert standin("start", *flags)[1] == 0
    assert ended(folder) == "succeeded"


def test_events_are_told_from_a_number_on(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    standin("start", *flags, how=SLOW)
    wait_for_step(folder, 1)
    first, code = standin("status", str(folder.path), "--since", "0")
    assert code == 0
    assert [event["state"] for event in first["data"]["events"]][:2] == ["starting", "running"]
    last = first["data"]["last_event"]
    assert (last, first["data"]["more_events"]) == (len(first["data"]["events"]), False)
    idle, code = standin("status", str(folder.path), "--since", str(last), "--wait", "0.3")
    assert (code, idle["data"]["events"], idle["data"]["last_event"]) == (9, [], last)
    standin("stop", str(folder.path))
    news, code = standin("status", str(folder.path), "--since", str(last), "--wait", "30")
    assert code == 0
    assert [event["state"] for event in news["data"]["events"]] == ["stopping", "stopped"]
    assert news["data"]["events"][0]["number"] == last + 1


def test_a_stored_plan_is_done_exactly_or_not_at_all(
    standin: Standin, flags: list[str], folder: RunFolder, rows: Path
) -> None:
    planned, _ = standin("plan", *flags, "--learning-rate", "1e-3", "--threads", "1")
    plan_id = planned["data"]["plan_id"]
    assert planned["next_actions"][0]["argv"][1:] == ["start", "--plan", plan_id]
    beside, code = standin("start", "--plan", plan_id, "--seed", "3")
    assert (code, beside["errors"][0]["code"]) == (2, "settings_conflict")
    assert standin("start", "--plan", "0" * 16)[1] == 3
    kept = rows.read_text()
    rows.write_text(kept.replace("31", "13"))
    changed, code = standin("start", "--plan", plan_id)
    assert (code, changed["errors"][0]["code"]) == (7, "plan_conflict")
    assert [item["field"] for item in changed["errors"][0]["evidence"]["mismatch"]] == ["data"]
    assert not folder.path.exists()
    rows.write_text(kept)
    started, code = standin("start", "--plan", plan_id, cwd=Path("/"))
    assert (code, started["data"]["plan_id"]) == (0, plan_id)
    assert ended(folder) == "succeeded"
    settings = document(folder.plan, "plan")["settings"]
    assert settings == planned_settings(standin, plan_id)
    assert (settings["learning_rate"], settings["threads"]["source"]) == (
        {"value": 1e-3, "source": "user"},
        "user",
    )


def planned_settings(standin: Standin, plan_id: str) -> dict[str, Any]:
    path = Path(standin.environ["FINETUNE_HOME"]) / "plans" / f"{plan_id}.json"
    found: dict[str, Any] = document(path, "plan")["settings"]
    return found


def test_secrets_reach_no_file_of_a_detached_run(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    planted = {"HF_TOKEN": "hf_TESTTESTTEST", "WANDB_API_KEY": "k_TEST", "OPENAI_API_KEY": "sk-TEST"}
    standin("start", *flags, how="print:hf_TESTTESTTEST,checks:0.3", **planted)
    assert ended(folder) == "succeeded"
    for root in (folder.path, Path(standin.environ["FINETUNE_HOME"])):
        for path in root.rglob("*"):
            assert not path.is_file() or not re.search("hf_TEST|k_TEST|sk-TEST", path.read_text()), path
    assert "***" in (folder.logs / "launch.log").read_text()


# With the real children, on builtin:tiny.


@pytest.fixture
def real(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Standin:
    """Return the caller of the command itself, whose children are the real ones."""
    monkeypatch.setattr("tests.agent.calls.STANDIN", [sys.executable, str(ROOT / "scripts/finetune_cli.py")])
    return standin


@pytest.mark.slow
@pytest.mark.proof
def test_a_real_run_killed_while_its_ranks_begin_leaves_nothing_and_goes_on(
    real: Standin, flags: list[str], folder: RunFolder
) -> None:
    wanted = [*flags, "--max-steps", "40", "--global-batch-size", "4", "--num-gpus", "2", "--threads", "1"]
    real("start", *wanted)
    assert wait_until(lambda: len(processes_with(f"finetune.rank {folder.path}")) == 2, 120)
    os.kill(state_of(folder)["pid"], signal.SIGKILL)  # the ranks still import torch
    assert wait_until(lambda: not processes_with(str(folder.path)), WITHIN_S)
    assert real("status", str(folder.path))[0]["status"] == "lost"
    real("start", *wanted)
    wait_for_step(folder, 3, 120)
    stopped, code = real("stop", str(folder.path))
    assert (code, stopped["status"], stopped["data"]["killed"]) == (0, "stopped", False)
    assert wait_until(lambda: not processes_with(str(folder.path)), WITHIN_S)
    assert stopped["data"]["checkpoint"]


@pytest.mark.slow
def test_a_real_run_stops_while_held_out_rows_are_measured_before_its_first_step(
    real: Standin, folder: RunFolder
) -> None:
    wanted = [*TINY, "--data", "builtin:arithmetic", "--out", str(folder.path), "--eval-rows", "2000"]
    real("start", *wanted, "--eval-fraction", "0.5", "--threads", "1", "--max-steps", "4")

    def is_measuring() -> bool:
        beat = folder.path / "heartbeat" / "rank0"
        return beat.exists() and "held-out" in json.loads(beat.read_text())["operation"]

    assert wait_until(is_measuring, 120)
    stopped, code = real("stop", str(folder.path), "--grace", "20")
    assert (code, stopped["status"], stopped["data"]["killed"]) == (0, "stopped", False)
    assert stopped["data"]["step"] == 0
    assert not folder.metrics.exists() or not folder.metrics.read_bytes()
    assert "Traceback" not in (folder.logs / "rank0.log").read_text()


@pytest.mark.proof
def test_a_killed_supervisor_takes_its_engines_with_it(real: Standin, folder: RunFolder) -> None:
    flags = "--method grpo --model builtin:smollm2-135m --data builtin:arithmetic --device cpu --max-steps 50"
    real("start", *flags.split(), "--out", str(folder.path), "--vllm-args", "enforce-eager")
    supervisor = psutil.Process(state_of(folder)["pid"])

    def engines() -> list[psutil.Process]:
        return [one for one in supervisor.children(recursive=True) if "vllm" in " ".join(one.cmdline())]

    assert wait_until(lambda: (folder.path / "rollouts").is_dir() and len(engines()) >= 2, 300, every=1)
    family = supervisor.children(recursive=True)
    assert len(family) >= 5  # launcher, rank, guard, server, engine core
    supervisor.kill()
    assert wait_until(lambda: not [one for one in family if alive(one)], WITHIN_S)
    assert real("status", str(folder.path))[0]["status"] == "lost"


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
