"""Stop, resume and what interrupts a run, with children that load no model (standin.py)."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from agent.folder import RunFolder
from agent.processes import ProcessId, wait_until
from finetune.model.catalogue import tiny_config, tiny_options
from tests.agent.calls import SLOW, Standin, document, wait_for_step


def write_model(folder: str) -> None:
    """Write what a plan reads of a model: its config, one weight and that it has a tokenizer."""
    Path(folder).mkdir()
    (Path(folder) / "config.json").write_text(json.dumps(tiny_config(tiny_options(""))))
    save_file({"model.norm.weight": np.ones(128, np.float32)}, Path(folder) / "model.safetensors")
    (Path(folder) / "tokenizer.json").write_text("{}")


def test_a_run_under_way_answers_with_its_handle_and_stops_when_told(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    first = standin.start("run", *flags, how=SLOW)
    wait_for_step(folder, 1)
    second, code = standin("run", *flags)
    assert (code, second["status"], second["run_dir"]) == (0, "running", str(folder.path))
    waited, code = standin("status", str(folder.path), "--wait", "0.3")
    assert (code, waited["errors"][0]["code"], waited["status"]) == (9, "still_running", "running")
    assert waited["data"]["ranks"][0]["operation"] == "training"
    assert waited["data"]["suggested_poll_s"] >= 5
    stopped, code = standin("stop", str(folder.path))
    assert (code, stopped["status"], stopped["data"]["killed"]) == (0, "stopped", False)
    ended, code = standin.finish(first)
    assert (code, ended["status"], ended["errors"][0]["code"]) == (10, "stopped", "stopped")
    assert ended["run_id"] == second["run_id"]
    run = document(folder.manifest, "run")
    assert (run["status"], run["exit_code"], run["error"]) == ("stopped", 10, None)
    idle, code = standin("stop", str(folder.path))
    assert (code, idle["status"]) == (0, "stopped")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, "preempted"), (signal.SIGINT, "stopped")])
def test_a_signal_ends_the_run_with_a_checkpoint_and_the_same_command_goes_on(
    standin: Standin, flags: list[str], folder: RunFolder, number: signal.Signals, status: str
) -> None:
    process = standin.start("run", *flags, how="steps:12,pause:0.2")
    wait_for_step(folder, 2)
    process.send_signal(number)
    process.send_signal(number)  # it may come twice
    answer, code = standin.finish(process)
    assert (code, answer["status"]) == (10, status)
    step = answer["errors"][0]["evidence"]["step"]
    assert document(folder.state, "state")["checkpoint"] == str(folder.path / f"checkpoints/step-{step}")
    resumed, code = standin("run", *flags, how="steps:12")
    assert (code, resumed["status"], resumed["data"]["resumed_from"]) == (0, "succeeded", step)
    run = document(folder.manifest, "run")
    assert [attempt["status"] for attempt in run["attempts"]] == [status, "succeeded"]
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == list(
        range(1, 13)
    )


def test_a_killed_run_is_lost_leaves_no_process_and_goes_on(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    process = standin.start("run", *flags, how=SLOW)
    wait_for_step(folder, 1)
    child = document(folder.state, "state")["child"]
    trainer = ProcessId(child["pid"], child["pid_start"], child["boot_id"])
    assert trainer.is_alive
    process.kill()
    process.wait()
    assert wait_until(lambda: not trainer.is_alive, 5)
    lost, code = standin("status", str(folder.path))
    assert (code, lost["status"]) == (0, "lost")
    answer, code = standin("run", *flags)
    assert (code, answer["status"]) == (0, "succeeded")


def test_a_run_that_does_not_listen_is_killed(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    process = standin.start("run", *flags, how=SLOW + ",deaf")
    wait_for_step(folder, 1)
    stopped, code = standin("stop", str(folder.path), "--grace", "0.5")
    assert (code, stopped["status"], stopped["data"]["killed"]) == (0, "stopped", True)
    answer, code = standin.finish(process)
    assert (code, answer["errors"][0]["evidence"]["killed"]) == (10, True)


def test_a_finished_run_is_extended(standin: Standin, flags: list[str], folder: RunFolder) -> None:
    first, _ = standin("run", *flags, "--max-steps", "3")
    assert standin("resume", str(folder.path), "--extend", "3")[1] == 2
    answer, code = standin("resume", str(folder.path), "--extend", "5")
    assert (code, answer["data"]["resumed_from"], answer["data"]["result"]["steps"]) == (0, 3, 5)
    run = document(folder.manifest, "run")
    assert (run["run_id"], run["settings"]["max_steps"]) == (first["run_id"], {"value": 5, "source": "user"})
    assert run["plan_id"] == document(folder.plan, "plan")["plan_id"] != first["data"]["plan_id"]


def test_an_extension_above_what_was_agreed_to_waits_for_a_confirmation(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    assert standin("run", *flags, "--max-steps", "3")[1] == 0
    little = {"FINETUNE_YES_UNDER": "disk_gb=1e-9"}
    assert standin("run", *flags, "--max-steps", "3", **little)[1] == 0  # finished: nothing is spent
    for more in ([], ["--detach"]):
        answer, code = standin("resume", str(folder.path), "--extend", "5", *more, **little)
        assert (code, answer["errors"][0]["code"]) == (6, "needs_confirmation")
        assert answer["next_actions"][0]["argv"][1:] == [
            "resume",
            str(folder.path),
            "--extend",
            "5",
            "--confirm",
        ]
    answer, code = standin("resume", str(folder.path), "--extend", "5", "--confirm", **little)
    assert (code, answer["data"]["result"]["steps"]) == (0, 5)


def test_a_run_of_verified_weights_is_resumed_as_one(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    model = str(folder.path.parent / "model")
    write_model(model)
    flags = [*flags, "--model", model]
    flags.remove("builtin:tiny")
    flags.remove("--model")
    assert standin("run", *flags, "--verify-model", how="fail:non_finite")[1] == 8
    assert standin("resume", str(folder.path))[1] == 0
    assert standin("run", *flags)[1] == 7  # a digest of headers is another digest


def test_a_run_that_is_resumed_in_the_foreground_is_stopped_with_a_save_whatever_ended_it(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    assert standin("run", *flags, how="fail:non_finite")[1] == 8
    for _ in range(2):
        process = standin.start("run", *flags, how="checks:4," + SLOW)
        assert wait_until(lambda: standin("status", str(folder.path))[0]["status"] == "starting", 20)
        stopped, code = standin("stop", str(folder.path), "--grace", "30")
        assert (code, stopped["status"], stopped["data"]["killed"]) == (0, "stopped", False)
        assert standin.finish(process)[1] == 10
        # The second time after a kill: what stands there is the state of a run that has gone.
        process = standin.start("run", *flags, how=SLOW)
        wait_for_step(folder, 1)
        assert wait_until(lambda: document(folder.state, "state")["state"] == "running", 20)
        process.kill()
        process.wait()


def test_an_interrupt_during_the_checks_leaves_nothing(
    standin: Standin, flags: list[str], folder: RunFolder
) -> None:
    process = standin.start("run", *flags, how="checks:30")
    assert wait_until(folder.state.exists, 20)
    seen, _ = standin("status", str(folder.path))
    assert seen["status"] == "planned"
    other, code = standin("run", *flags)
    assert (code, other["status"]) == (0, "planned")
    process.send_signal(signal.SIGTERM)
    answer, code = standin.finish(process)
    assert (code, answer["errors"][0]["code"]) == (10, "stopped")
    assert not folder.path.exists()
