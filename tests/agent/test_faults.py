"""Faults that are really caused from outside, through the command line: code, hint and exit code of each."""

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.faults.place import ROOT, Place, WarmCommand
from tests.agent.faults.table import FAULTS, prompts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faults")]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmCommand]:
    command = WarmCommand(os.environ | {"OMP_NUM_THREADS": "1"})
    yield command
    command.close()


@pytest.fixture
def place(tmp_path: Path, warm: WarmCommand) -> Place:
    environ = os.environ | {"FINETUNE_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    return Place(tmp_path, warm, environ)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of a test's own."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


# One of them waits 30 seconds for whoever holds the folder to say who it is.
WAITS = "a_run_folder_that_another_process_holds"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.proof) if name == WAITS else name for name in FAULTS]
)
def test_a_fault_from_outside_is_named(name: str, place: Place) -> None:
    cause, codes, exit_code = FAULTS[name]
    answer, found = cause(place)
    errors = [f"{error['code']} {error['hint_id']}" for error in answer["errors"]]
    assert (errors[:1], found) == ([codes], exit_code), answer
    assert all(answer["errors"][0][part] for part in ("cause", "fix", "confirm"))


EXACT = """
def right(row):
    return row["answer"]

def score(row, completion):
    return float(completion == row["answer"])
"""


def test_there_are_more_than_twenty_faults() -> None:
    assert len({codes for _, codes, _ in FAULTS.values()}) > 20


def test_a_full_disk_is_named_before_a_run_and_while_data_is_prepared(place: Place, small_disk: Path) -> None:
    place.out = small_disk / "run"
    (small_disk / "other").write_bytes(bytes(7 << 20))
    answer, code = place.planned("--lora-rank", "64", "--checkpoints-kept", "3")
    assert (code, answer["errors"][0]["hint_id"]) == (3, "not_enough_disk")
    place.out = place.folder / "run"
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "rest").write_bytes(bytes(8 << 20))
    place.environ |= {"FINETUNE_CACHE": str(small_disk / "cache")}
    answer, code = place.trained("--max-steps", "1")
    assert (code, answer["errors"][0]["hint_id"]) == (8, "disk_full")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, "rank_died"), (signal.SIGSTOP, "rank_stuck")])
def test_a_rank_that_is_killed_or_halted_is_named(number: int, code: str, place: Place) -> None:
    flags = ["--num-gpus", "2", "--max-steps", "5000", "--global-batch-size", "4"]
    call = place.start_training(*flags, "--distributed-timeout", "5", "--checkpoint-every", "10000")
    place.wait_for_step(2)
    pid = place.pid_of_rank(1)
    os.kill(pid, number)
    answer, exit_code = call.result()
    assert (exit_code, answer["errors"][0]["code"], answer["errors"][0]["hint_id"]) == (8, code, code)
    assert "rank 1" in answer["errors"][0]["cause"]
    explained, exit_code = place.call("explain-error", str(place.out))
    assert (exit_code, explained["data"]["hint_id"]) == (0, code)


def test_a_run_under_way_is_waited_for_stopped_and_taken_for_no_other(place: Place) -> None:
    flags = ["--max-steps", "20000", "--global-batch-size", "4", "--checkpoint-every", "10000"]
    call = place.start_training(*flags)
    place.wait_for_step(1)
    answer, code = place.call("status", str(place.out), "--wait", "0.2")
    assert (code, answer["errors"][0]["hint_id"]) == (9, "still_running")
    answer, code = place.trained(*flags, "--seed", "7")
    assert (code, answer["errors"][0]["hint_id"]) == (7, "plan_conflict")
    os.kill(call.pid, signal.SIGTERM)
    answer, code = call.result()
    assert (code, answer["errors"][0]["hint_id"]) == (10, "stopped")


def test_weights_that_burst_are_named(place: Place) -> None:
    from safetensors.numpy import load_file, save_file

    answer, code = place.trained("--max-steps", "1")
    assert code == 0, answer
    adapter = place.folder / "adapter"
    shutil.copytree(place.out / "adapter", adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name: value * 0 + 1e30 for name, value in tensors.items()}, adapter / "adapter_model.safetensors"
    )
    place.out = place.folder / "second"
    answer, code = place.trained("--max-steps", "2", "--init-adapter", str(adapter))
    assert (code, answer["errors"][0]["code"], answer["errors"][0]["hint_id"]) == (
        8,
        "non_finite",
        "non_finite",
    )


def test_another_program_on_the_engines_port_is_named(place: Place) -> None:
    prompts(place)
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = [flag for flag in place.grpo(EXACT) if flag not in ("--engine", "local")]
    address = f"http://127.0.0.1:{server.server_port}"
    answer, code = place.trained(*flags, "--vllm-url", address, "--max-steps", "1", method="grpo")
    server.shutdown()
    assert (code, answer["errors"][0]["hint_id"]) == (8, "engine_failed")
    assert address in answer["errors"][0]["cause"]


def test_a_port_that_is_taken_is_told_by_the_log(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        code = f"from http.server import test; test(bind='127.0.0.1', port={holder.getsockname()[1]})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    answer, exit_code = place.call("explain-error", place.write("server.log", done.stderr))
    assert (exit_code, answer["data"]["hint_id"]) == (0, "port_taken")
    assert "Errno 98" in answer["data"]["error"]


def test_a_gated_model_is_named(place: Place) -> None:
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *rest: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place.model = "me/gated"
    environ = place.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(place.folder / "hub"),
    }
    command = [sys.executable, str(ROOT / "scripts" / "finetune_cli.py"), "plan", *place.settings()]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    server.shutdown()
    answer = json.loads(done.stdout)
    error = answer["errors"][0]
    assert (done.returncode, error["code"], error["hint_id"]) == (5, "access_denied", "access_denied"), answer


@pytest.mark.proof
@pytest.mark.parametrize(
    ("flags", "code", "exit_code"),
    [
        (["--vllm-args", "no-such-flag=1"], "bad_value", 2),
        (["--vllm-start-timeout", "1"], "engine_timeout", 8),
        (["--vllm-args", "cpu-offload-gb=100000"], "engine_failed", 8),
    ],
)
def test_a_server_that_does_not_come_up_is_named(
    flags: list[str], code: str, exit_code: int, place: Place
) -> None:
    prompts(place)
    own = [flag for flag in place.grpo(EXACT) if flag not in ("--engine", "local")]
    answer, found = place.trained(*own, *flags, "--max-steps", "1", method="grpo")
    assert (found, answer["errors"][0]["hint_id"]) == (exit_code, code), answer


@pytest.mark.proof
def test_a_server_that_is_killed_again_and_again_is_named(place: Place) -> None:
    prompts(place)
    own = [flag for flag in place.grpo(EXACT) if flag not in ("--engine", "local")]
    call = place.start_training(*own, "--max-steps", "1000", method="grpo")
    place.wait_for_step(1)
    victims = 0
    while not Path(f"{call.out}.code").exists():
        time.sleep(1.0)
        for line in subprocess.run(
            ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            pid, _, args = line.strip().partition(" ")
            if str(place.folder) in args and "api_server" in args:
                os.kill(int(pid), signal.SIGKILL)
                victims += 1
        assert victims < 100
    answer, found = call.result()
    assert (found, answer["errors"][0]["hint_id"]) == (8, "engine_failed"), answer
