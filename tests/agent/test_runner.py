"""A run from start to end as an agent meets it, with children that load no model (standin.py)."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.folder import RunFolder
from finetune.errors import EXIT_CODES
from tests.agent.calls import SLOW, TINY, Standin, codes, document, wait_for_step


def test_a_run_tells_what_it_did(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    answer, code = standin("run", *flags)
    assert (code, answer["status"], answer["run_dir"]) == (0, "succeeded", str(folder.path))
    run, state = document(folder.manifest, "run"), document(folder.state, "state")
    assert (run["status"], run["exit_code"], run["run_id"], state["state"]) == (
        "succeeded",
        0,
        answer["run_id"],
        "succeeded",
    )
    assert run["result"]["steps"] == state["step"] == 3
    assert answer["artifacts"] == run["outputs"]
    assert len(run["outputs"][0]["sha256"]) == 64
    assert [item["hint_id"] for item in answer["warnings"]].count("duplicate_rows") == 1
    assert run["settings"]["model"] == {"value": "builtin:tiny", "source": "user"}
    assert run["data"]["ledger"]["read"] == 32
    assert run["data"]["files"][0]["rows"] == 32
    assert "step 1/3" in standin.stderr
    assert "step 3/3" in standin.stderr


def test_the_same_command_again_changes_nothing(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    first, _ = standin("run", *flags)
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.path.rglob("*")
        if path.is_file()
    }
    again, code = standin("run", *flags)
    assert (code, again["status"], again["run_id"]) == (0, "succeeded", first["run_id"])
    assert again["data"]["already_complete"] is True
    assert before == {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.path.rglob("*")
        if path.is_file()
    }
    resumed, code = standin("resume", str(folder.path))
    assert (code, resumed["data"]["already_complete"]) == (0, True)


def test_a_run_on_rollouts_tells_its_rewards(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    wanted = [*flags, "--method", "grpo", "--engine", "local", "--max-steps", "12"]
    answer, code = standin("run", *wanted[2:])
    assert (code, answer["status"]) == (0, "succeeded")
    assert answer["data"]["reward"] == {"first": 0.3, "last": 1.0}
    assert answer["summary"] == "12 steps, reward 0.3 -> 1"
    assert re.search(r"step 12/12  reward 1\.200  cut 50%  loss", standin.stderr)
    shown, code = standin("status", str(folder.path))
    assert (code, shown["data"]["figures"]["truncated_share"]) == (0, 0.5)
    assert shown["data"]["reward"]["highest"] == 1.2
    assert standin("resume", str(folder.path))[0]["data"]["already_complete"]


@pytest.mark.parametrize("code", ["non_finite", "out_of_memory", "too_long"])
def test_a_failure_has_its_code_its_hint_and_no_adapter(
    standin: Standin, flags: list[str], folder: RunFolder, code: str
) -> None:
    answer, found = standin("run", *flags, how=f"fail:{code}")
    assert (found, answer["status"], answer["errors"][0]["hint_id"]) == (EXIT_CODES[code], "failed", code)
    run, state = document(folder.manifest, "run"), document(folder.state, "state")
    assert (run["status"], run["exit_code"], run["error"]["code"], state["hint_id"]) == (
        "failed",
        found,
        code,
        code,
    )
    assert not folder.adapter.exists()
    seen, found = standin("status", str(folder.path))
    assert (found, seen["status"], seen["data"]["error"]["hint_id"]) == (0, "failed", code)
    explained, _ = standin("explain-error", str(folder.path))
    assert explained["data"]["hint_id"] == code
    assert standin("run", *flags)[0]["status"] == "succeeded"


def test_a_child_that_dies_is_described_by_its_log(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    killed, code = standin("run", *flags, how="die")
    assert (code, killed["errors"][0]["code"], killed["errors"][0]["evidence"]["signal"]) == (
        8,
        "rank_died",
        "SIGKILL",
    )
    unknown, code = standin("run", *flags, how="crash:something new")
    assert (code, unknown["errors"][0]["code"]) == (8, "training_failed")
    assert "something new" in unknown["errors"][0]["cause"]
    assert "unknown" in unknown["errors"][0]["cause"]
    known, code = standin("run", *flags, how="crash:No space left on device")
    assert (code, known["errors"][0]["hint_id"]) == (8, "disk_full")
    assert sorted(path.name for path in folder.logs.iterdir()) == ["attempt-1", "attempt-2", "launch.log"]


def test_another_plan_is_a_conflict_field_by_field(standin: Standin, flags: list[str], rows: Path) -> None:
    standin("run", *flags)
    answer, code = standin("run", *flags, "--learning-rate", "1e-3", "--seed", "5")
    assert (code, answer["errors"][0]["code"]) == (7, "plan_conflict")
    assert answer["errors"][0]["evidence"]["mismatch"] == [
        {"field": "learning_rate", "old": 0.0002, "new": 0.001},
        {"field": "seed", "old": 0, "new": 5},
    ]
    assert standin("plan", *flags, "--seed", "5")[1] == 7  # the dry run knows it as well
    rows.write_text(rows.read_text().replace("31", "13"))
    changed, code = standin("run", *flags)
    assert (code, [item["field"] for item in changed["errors"][0]["evidence"]["mismatch"]]) == (7, ["data"])


def test_more_ranks_are_a_difference_not_a_conflict(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    standin("run", *flags, how="fail:non_finite")
    answer, code = standin("run", *flags, "--num-gpus", "2")
    assert code == 0
    assert "num_gpus was 1, is 2" in [
        item["text"] for item in answer["warnings"] if item["hint_id"] == "differs_from_last_attempt"
    ]


def test_a_folder_of_something_else_is_left_alone(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    folder.path.mkdir()
    (folder.path / "notes.txt").write_text("mine")
    answer, code = standin("run", *flags)
    assert (code, answer["errors"][0]["code"]) == (7, "target_exists")
    assert os.listdir(folder.path) == ["notes.txt"]


def test_failed_checks_leave_nothing(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    answer, code = standin("run", *flags, how="refuse")
    assert (code, codes(answer)) == (3, ["too_long", "bad_row"])
    assert not folder.path.exists()
    assert not list(Path(standin.environ["FINETUNE_HOME"]).rglob("*.json"))


def test_checks_that_die_are_told_by_their_log_and_leave_nothing(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    answer, code = standin("run", *flags, how="die-in-checks")
    assert (code, codes(answer)) == (3, ["preflight_failed"])
    assert answer["errors"][0]["hint_id"] == "missing_package"
    assert not folder.path.exists()
    assert not list(Path(standin.environ["FINETUNE_HOME"]).rglob("*.json"))


def test_a_forecast_beyond_the_memory_is_refused_before_training(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    answer, code = standin("run", *flags, how=f"memory:{1 << 50}")
    assert (code, answer["errors"][0]["code"]) == (3, "not_enough_memory")
    assert not folder.path.exists()


def test_full_checks_of_a_plan_find_all_problems_and_write_nothing(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    answer, code = standin("plan", *flags, "--checks", "full", how="refuse")
    assert (code, [error["code"] for error in answer["errors"]], answer["data"]["level"]) == (
        3,
        ["too_long", "bad_row"],
        "full",
    )
    answer, code = standin("run", *flags, "--dry-run", "--checks", "full")
    assert (code, answer["status"], answer["data"]["level"]) == (0, "planned", "full")
    assert answer["data"]["report"]["ledger"]["read"] == 32
    assert not folder.path.exists()


@pytest.mark.slow
def test_runs_that_start_together_have_their_own_ids(standin: Standin, rows: Path, tmp_path: Path) -> None:
    """CA-10."""
    started = [standin.start("run", *TINY, "--data", str(rows), cwd=tmp_path) for _ in range(20)]
    answers = [standin.finish(process)[0] for process in started]
    assert len({answer["run_id"] for answer in answers}) == 20
    assert sorted(os.listdir(tmp_path / "runs")) == sorted(answer["run_id"] for answer in answers)
    for answer in answers:
        assert document(Path(answer["run_dir"]) / "run.json", "run")["run_id"] == answer["run_id"]
    listed, _ = standin("list")
    assert sorted(run["run_id"] for run in listed["data"]["runs"]) == sorted(
        answer["run_id"] for answer in answers
    )


def test_one_folder_holds_one_run_however_many_ask(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    started = [standin.start("run", *flags, how="steps:3,pause:0.5") for _ in range(4)]
    answers = [standin.finish(process) for process in started]
    assert {code for _, code in answers} == {0}
    assert len({answer["run_id"] for answer, _ in answers}) == 1
    assert len(document(folder.manifest, "run")["attempts"]) == 1


def test_awkward_paths_work_from_anywhere(standin: Standin, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "d ä 1").mkdir()
    shutil.copy(rows, tmp_path / "d ä 1" / "a b.jsonl")
    answer, code = standin(
        "run", *TINY, "--data", "./d ä 1/a b.jsonl", "--out", "./o ü/", how="fail:non_finite", cwd=tmp_path
    )
    assert (code, answer["run_dir"]) == (8, str(tmp_path / "o ü"))
    _resumed, code = standin("resume", str(tmp_path / "o ü"), cwd=Path("/"))
    assert code == 0
    run = document(tmp_path / "o ü" / "run.json", "run")
    assert run["data"]["files"][0]["path"] == str(tmp_path / "d ä 1" / "a b.jsonl")


def test_secrets_are_stored_nowhere(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    planted = {"HF_TOKEN": "hf_TESTTESTTEST", "WANDB_API_KEY": "k_TEST", "OPENAI_API_KEY": "sk-TEST"}
    answer, code = standin("run", *flags, how="print:hf_TESTTESTTEST http://u:pw_TEST@h/", **planted)
    assert code == 0
    text = json.dumps(answer) + standin.stderr
    text += "".join(
        path.read_text()
        for root in (folder.path, Path(standin.environ["FINETUNE_HOME"]))
        for path in root.rglob("*")
        if path.is_file()
    )
    assert not re.search("hf_TEST|k_TEST|sk-TEST|pw_TEST", text)
    assert "*** http://***@h/" in (folder.logs / "launch.log").read_text()
    refused, code = standin("run", *flags, "--system-prompt", "sk-TEST", **planted)
    assert code == 2
    assert "sk-TEST" not in json.dumps(refused)


def child_of(
    standin: Standin, flags: list[str], folder: RunFolder, how: str, **environ: str
) -> tuple[list[str], dict[str, str]]:
    """Start a run and return command line and environment of its training child, as the kernel knows them."""
    process = standin.start("run", *flags, how=how, **environ)
    wait_for_step(folder, 1, 60)
    child = Path("/proc") / str(document(folder.state, "state")["child"]["pid"])
    pairs = (entry.partition("=") for entry in (child / "environ").read_text().split("\0") if entry)
    argv = (child / "cmdline").read_text().split("\0")[:-1]
    process.terminate()
    standin.finish(process)
    return argv, {name: value for name, _, value in pairs}


def test_the_child_gets_what_the_dry_run_says(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    stray = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.9",
        "WANDB_API_KEY": "k_TEST",
        "OMP_NUM_THREADS": "1",
    }
    planned, _ = standin("run", *flags, "--dry-run", how=SLOW, **stray)
    argv, environ = child_of(standin, flags, folder, SLOW, **stray)
    assert argv == planned["data"]["launch"]["argv"]
    assert sorted(environ) == planned["data"]["launch"]["environment_names"]
    assert not environ.keys() & {"RANK", "WORLD_SIZE", "MASTER_ADDR", "WANDB_API_KEY"}


def test_the_child_sees_the_devices_that_the_dry_run_names(
    standin: Standin, rows: Path, folder: RunFolder
) -> None:
    flags = ["--method", "sft", "--model", "builtin:tiny", "--data", str(rows), "--out", str(folder.path)]
    flags += ["--device", "cuda", "--num-gpus", "2"]
    how, seen = f"{SLOW},devices:4", {"CUDA_VISIBLE_DEVICES": "3,1,0"}
    planned, code = standin("run", *flags, "--dry-run", how=how, **seen)
    assert code == 0, planned["summary"]
    environ = child_of(standin, flags, folder, how, **seen)[1]
    named = [device["id"] for device in planned["data"]["parallel"]["devices"]]
    assert (environ["CUDA_VISIBLE_DEVICES"], named) == ("3,1", ["3", "1"])
    assert sorted(environ) == planned["data"]["launch"]["environment_names"]


def test_the_replayed_command_works_when_pasted(
    standin: Standin, flags: list[str], folder: RunFolder, tmp_path: Path
) -> None:
    standin("run", *flags, "--seed", "4", OMP_NUM_THREADS="1", FINETUNE_MARK="a b")
    run = document(folder.manifest, "run")
    shutil.rmtree(folder.path)
    # The pasted command starts the real children; here it only has to come as far as a plan.
    pasted = run["cmd_replay"] + " --dry-run"
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", pasted], env=environ, cwd="/", capture_output=True, text=True, check=False
    )
    answer = json.loads(done.stdout)
    assert answer["ok"], answer["summary"]
    assert answer["data"]["plan_id"] == run["plan_id"]
    assert answer["data"]["settings"]["threads"]["value"] == 1
    assert answer["data"]["launch"]["environment"]["FINETUNE_MARK"] == "a b"
    assert answer["data"]["settings"]["out"]["value"] == str(folder.path)


def test_logs_are_paged(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    standin("run", *flags)
    (folder.logs / "launch.log").write_text("".join(f"line {n} {'x' * 80}\n" for n in range(500)))
    last, _ = standin("logs", str(folder.path))
    assert last["data"]["lines"][-2].startswith("line 499 ")
    first, _ = standin("logs", str(folder.path), "--offset", "0", "--limit", "20")
    assert (len(first["data"]["lines"]), first["next_offset"]) == (20, 20)
    found, _ = standin("logs", str(folder.path), "--grep", "line 49[89]")
    assert len(found["data"]["lines"]) == 2
    assert standin("logs", str(folder.path), "--grep", "(")[1] == 2


def test_a_search_that_would_never_end_is_ended(
    standin: Standin, flags: list[str], folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("run", *flags)
    (folder.logs / "launch.log").write_text("a" * 40 + "!\n")
    monkeypatch.setattr("agent.verbs._SEARCH_S", 0.5)
    answer, code = standin("logs", str(folder.path), "--grep", "(a+)+$")
    assert (code, answer["errors"][0]["code"]) == (2, "bad_value")
    assert "a simpler one" in answer["errors"][0]["cause"]
