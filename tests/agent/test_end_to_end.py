"""The console command with its real children, on builtin:tiny: a run, what can be done with it, and a stop with two ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from agent.folder import RunFolder, check_against_schema
from agent.processes import wait_until
from tests.agent.calls import TINY, checked

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
Runner = Callable[..., tuple[dict[str, Any], int]]


def start(*argv: str, home: Path) -> subprocess.Popen[str]:
    environ = os.environ | {"FINETUNE_HOME": str(home), "FINETUNE_CACHE": str(home / "cache")}
    command = [sys.executable, str(ROOT / "scripts" / "finetune_cli.py"), *argv]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, Any], int]:
    output, errors = process.communicate(timeout=240)
    try:
        return checked(output, process.returncode), process.returncode
    except AssertionError:
        print(output, errors)
        raise


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows.jsonl: 24 rows."""
    folder = tmp_path_factory.mktemp("end to end")
    turns = [(f"Say {n}.", f"Number {n}!") for n in range(24)]
    lines = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]}
        for ask, say in turns
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def call(place: Path) -> Runner:
    return lambda *argv: finish(start(*argv, home=place / "home"))


@pytest.fixture(scope="module")
def flags(place: Path) -> list[str]:
    batch = [
        "--global-batch-size",
        "4",
        "--eval-fraction",
        "0.25",
        "--learning-rate",
        "1e-2",
        "--dtype",
        "fp32",
        "--threads",
        "1",
    ]
    return [*TINY, "--data", str(place / "rows.jsonl"), *batch]


@pytest.fixture(scope="module")
def finished(place: Path, call: Runner, flags: list[str]) -> tuple[dict[str, Any], RunFolder]:
    """Return the answer and the folder of a finished run of 4 steps."""
    answer, code = call("run", *flags, "--max-steps", "4", "--out", str(place / "run"))
    assert code == 0, answer
    return answer, RunFolder(place / "run")


def test_a_real_run_writes_a_manifest_of_what_was_measured(
    finished: tuple[dict[str, Any], RunFolder],
) -> None:
    answer, folder = finished
    run = json.loads(folder.manifest.read_text())
    check_against_schema("run", run)
    assert (answer["status"], run["status"], run["result"]["steps"]) == ("succeeded", "succeeded", 4)
    assert run["result"]["eval_after"]["loss"] < run["result"]["eval_before"]["loss"]
    assert run["data"]["ledger"]["read"] == 24
    assert run["result"]["eval_after"]["num_rows"] == 6
    assert (run["parallel"]["kind"], run["parallel"]["world_size"]) == ("single", 1)
    assert run["parallel"]["local_parameter_bytes"][0] > 0
    assert run["peak_memory_bytes_per_rank"][0] > 0
    assert {Path(item["path"]).name for item in run["outputs"]} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_the_memory_that_was_foreseen_is_what_was_taken(finished: tuple[dict[str, Any], RunFolder]) -> None:
    """Larger models are in the proof row memory-forecast."""
    folder = finished[1]
    said = json.loads(folder.plan.read_text())["estimates"]
    peak = json.loads(folder.manifest.read_text())["peak_memory_bytes_per_rank"][0]
    assert said["memory_bytes_per_rank"] == sum(said["memory_parts"].values())
    assert 0.85 < said["memory_bytes_per_rank"] / peak < 1.15
    assert (said["seconds"] > 0, said["tokens"] > 0) == (True, True)


def test_status_of_a_real_run(call: Runner, finished: tuple[dict[str, Any], RunFolder]) -> None:
    answer, code = call("status", finished[0]["run_id"])
    assert (code, answer["status"], answer["data"]["step"]) == (0, "succeeded", 4)
    assert answer["data"]["loss"]["last"] > 0
    assert answer["data"]["health"] == []


def test_a_trained_model_answers_is_measured_and_exported(
    call: Runner, finished: tuple[dict[str, Any], RunFolder], place: Path
) -> None:
    folder = str(finished[1].path)
    answers, code = call("generate", folder, "--prompt", "Say 3.", "Say 4.", "--max-new-tokens", "4")
    assert (code, len(answers["data"]["completions"])) == (0, 2)
    measured, code = call("evaluate", folder)
    result = json.loads(finished[1].manifest.read_text())["result"]
    assert code == 0
    assert measured["data"]["loss"] == pytest.approx(result["eval_after"]["loss"], abs=1e-4)
    exported, code = call("export", folder)
    assert code == 0
    assert {Path(item["path"]).name for item in exported["artifacts"]} >= {
        "model.safetensors",
        "generation_config.json",
    }
    again, code = call("export", folder)
    assert (code, again["data"]["reused"]) == (0, True)


def test_a_damaged_adapter_is_not_exported(
    call: Runner, finished: tuple[dict[str, Any], RunFolder], place: Path
) -> None:
    weights = finished[1].adapter / "adapter_model.safetensors"
    sound = weights.read_bytes()
    tensors = load_file(weights)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name] = tensors[name] * float("nan")
    try:
        save_file(tensors, weights)
        answer, code = call("export", str(finished[1].path), "--to", str(place / "damaged"))
    finally:
        weights.write_bytes(sound)
    assert code != 0
    assert name in answer["errors"][0]["cause"]
    assert not (place / "damaged").exists()


def test_problems_of_the_rows_stop_a_run_before_it_begins(
    call: Runner, flags: list[str], place: Path
) -> None:
    """CA-07: and the dry run, asked to read them all, is refused with the same."""
    argv = ["run", *flags, "--max-length", "16", "--out", str(place / "refused")]
    answer, code = call(*argv)
    assert (code, answer["errors"][0]["code"]) == (3, "too_long")
    dry, code = call(*argv, "--dry-run", "--checks", "full")
    assert (code, dry["errors"]) == (3, answer["errors"])
    assert not (place / "refused").exists()


def test_rows_are_shown_and_prepared_once(
    call: Runner, flags: list[str], finished: tuple[dict[str, Any], RunFolder]
) -> None:
    looked, code = call("check-data", *flags)
    assert code == 0
    assert looked["data"]["report"]["selfcheck"] == "ok"
    assert len(looked["data"]["report"]["preview"]) == 3
    prepared, code = call("prepare", *flags)  # as the finished run did
    assert code == 0
    assert Path(prepared["data"]["prepared"]).is_dir()
    assert prepared["data"]["reused"] is True


@pytest.mark.proof
def test_two_ranks_stop_together_and_go_on_where_they_were(
    place: Path, call: Runner, flags: list[str]
) -> None:
    folder = RunFolder(place / "two")
    argv = ["run", *flags, "--max-steps", "30", "--num-gpus", "2", "--out", str(folder.path)]
    process = start(*argv, home=place / "home")
    assert wait_until(lambda: folder.metrics.exists() and folder.metrics.stat().st_size > 0, 120)
    process.terminate()
    answer, code = finish(process)
    assert (code, answer["status"]) == (10, "preempted")
    step = answer["errors"][0]["evidence"]["step"]
    resumed, code = call(*argv)
    assert (code, resumed["status"], resumed["data"]["resumed_from"]) == (0, "succeeded", step)
    assert resumed["data"]["parallel"]["kind"] == "ddp"
    assert resumed["data"]["parallel"]["world_size"] == 2
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == list(
        range(1, 31)
    )


def test_the_doctor_imports_what_training_needs(call: Runner) -> None:
    answer, code = call("doctor")
    assert (code, answer["status"]) == (0, "healthy")
    assert "torch" in answer["data"]["packages"]
