"""Jobs: a handle at once, the whole answer later, the same one for the same command; what is killed is told."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.handles import find_job
from agent.processes import wait_until
from tests.agent.calls import Standin, checked


def job_folder(standin: Standin, answer: dict[str, Any]) -> Path:
    folder = Path(answer["data"]["job_dir"])
    assert folder == Path(standin.environ["FINETUNE_HOME"]) / "jobs" / answer["data"]["job_id"]
    return folder


def pid_of(folder: Path) -> int:
    return int(json.loads((folder / "state.json").read_text())["pid"])


def test_a_job_answers_what_the_command_does(standin: Standin, flags: list[str]) -> None:
    foreground, code = standin("plan", *flags, "--checks", "full")
    assert code == 0
    answer, code = standin("plan", *flags, "--checks", "full", "--detach", how="checks:0.5")
    assert (code, answer["command"], answer["status"]) == (0, "plan", "running")
    job_id = answer["data"]["job_id"]
    assert re.fullmatch(r"plan-\d{8}-\d{6}-[0-9a-f]{8}", job_id)
    assert answer["next_actions"][0]["argv"][1:] == ["status", job_id, "--wait", "50"]
    done, code = standin("status", job_id, "--wait", "60")
    assert (code, done["command"], done["status"]) == (0, "status", "succeeded")
    assert done["data"]["job"]["exit_code"] == 0
    assert done["data"]["result"]["plan_id"] == foreground["data"]["plan_id"]
    assert done["artifacts"] == foreground["artifacts"]
    assert done["data"]["errors"] == []
    stored = checked((job_folder(standin, answer) / "answer.json").read_text(), 0)
    assert {name: stored[name] for name in ("command", "status", "summary", "artifacts", "next_actions")} == {
        name: foreground[name] for name in ("command", "status", "summary", "artifacts", "next_actions")
    }


def test_the_same_command_while_it_runs_is_the_same_job(standin: Standin, flags: list[str]) -> None:
    argv = ["plan", *flags, "--checks", "full", "--detach"]
    started = [standin.start(*argv, how="checks:60") for _ in range(3)]
    answers = [standin.finish(process)[0] for process in started]
    job_id = answers[0]["data"]["job_id"]
    assert {answer["data"]["job_id"] for answer in answers} == {job_id}
    other, _ = standin("plan", *flags, "--seed", "5", "--checks", "full", "--detach", how="checks:60")
    assert other["data"]["job_id"] != job_id
    waiting, code = standin("status", job_id, "--wait", "0.2")
    assert (code, waiting["status"], waiting["errors"][0]["code"]) == (9, "running", "still_running")
    assert waiting["data"]["suggested_poll_s"] > 0
    assert standin("status", job_id)[1] == 0
    listed, _ = standin("list", "--jobs")
    assert {row["job_id"]: row["status"] for row in listed["data"]["jobs"]} == {
        job_id: "running",
        other["data"]["job_id"]: "running",
    }
    for answer in (answers[0], other):
        stopped, code = standin("stop", answer["data"]["job_id"])
        assert (code, stopped["status"], stopped["data"]["killed"]) == (0, "stopped", False)
    again, _ = standin(*argv)  # the first has ended: this is another one
    assert again["data"]["job_id"] != job_id
    assert standin("status", again["data"]["job_id"], "--wait", "60")[0]["status"] == "succeeded"


def test_a_job_that_fails_tells_its_errors_and_the_look_at_it_succeeds(
    standin: Standin, flags: list[str]
) -> None:
    answer, _ = standin("check-data", *flags, "--detach", how="refuse")
    failed, code = standin("status", answer["data"]["job_id"], "--wait", "60")
    assert (code, failed["ok"], failed["status"]) == (0, True, "failed")
    assert failed["data"]["job"]["exit_code"] == 3
    assert [error["code"] for error in failed["data"]["errors"]] == ["too_long", "bad_row"]
    assert failed["data"]["errors"][0]["fix"]


@pytest.mark.parametrize("grace", ["30", "0"])
def test_a_killed_job_leaves_nothing_and_is_told(standin: Standin, flags: list[str], grace: str) -> None:
    answer, _ = standin("prepare", *flags, "--detach", how="checks:60")
    folder = job_folder(standin, answer)
    if grace == "0":
        standin("stop", answer["data"]["job_id"], "--grace", "0")
    else:
        os.kill(pid_of(folder), signal.SIGKILL)
    job = find_job(answer["data"]["job_id"], standin.environ)
    assert job is not None
    assert wait_until(lambda: not job.is_running, 10)
    told, code = standin("status", answer["data"]["job_id"])
    assert (code, told["status"]) == (0, "stopped" if grace == "0" else "failed")
    assert told["data"]["errors"][0]["code"] == ("stopped" if grace == "0" else "job_died")
    assert told["next_actions"][0]["argv"][-1] == "--detach"


def test_a_job_on_another_machine_is_not_stopped_from_here(standin: Standin, flags: list[str]) -> None:
    answer, _ = standin("prepare", *flags, "--detach", how="checks:60")
    state = job_folder(standin, answer) / "state.json"
    here = state.read_text()
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    away = json.loads(here) | {"host": "elsewhere", "pid": bystander.pid, "boot_id": "another"}
    state.write_text(json.dumps(away))
    told, code = standin("stop", answer["data"]["job_id"], "--grace", "0")
    assert (code, told["errors"][0]["code"], bystander.poll()) == (7, "run_in_use", None)
    bystander.kill()
    bystander.wait()
    state.write_text(here)
    assert standin("stop", answer["data"]["job_id"])[1] == 0


def test_a_job_survives_the_process_group_of_its_caller(standin: Standin, flags: list[str]) -> None:
    answer, _ = standin("check-data", *flags, "--detach", how="checks:60")
    pid = pid_of(job_folder(standin, answer))
    assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert standin("stop", answer["data"]["job_id"])[0]["status"] == "stopped"


def test_problems_of_the_command_line_are_told_at_once(standin: Standin, flags: list[str]) -> None:
    unknown, code = standin("check-data", *flags, "--detach", "--lerning-rate", "1")
    assert (code, unknown["errors"][0]["code"]) == (2, "unknown_setting")
    idle, code = standin("plan", *flags, "--detach")
    assert (code, idle["errors"][0]["code"]) == (2, "setting_without_effect")
    missing, code = standin("export", "nowhere", "--detach")
    assert (code, missing["errors"][0]["code"]) == (3, "run_missing")
    assert not (Path(standin.environ["FINETUNE_HOME"]) / "jobs").exists()


def test_secrets_reach_no_file_of_a_job(standin: Standin, flags: list[str]) -> None:
    planted = {"HF_TOKEN": "hf_TESTTESTTEST", "OPENAI_API_KEY": "sk-TEST"}
    answer, _ = standin("check-data", *flags, "--detach", how="checks:0.2", **planted)
    assert standin("status", answer["data"]["job_id"], "--wait", "60")[1] == 0
    for path in job_folder(standin, answer).iterdir():
        assert not re.search("hf_TEST|sk-TEST", path.read_text()), path
