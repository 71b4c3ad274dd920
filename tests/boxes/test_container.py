"""The container box: podman really run where it is installed; of apptainer and docker the command line alone."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.boxes.bubblewrap import open_box
from finetune.boxes.container import Container, apptainer_argv, docker_argv, podman_argv, podman_runtime
from finetune.boxes.launching import Limits
from finetune.boxes.process import remove_tree
from finetune.errors import FinetuneError

ROOT = Path(__file__).parents[2]
TOLD = Container(
    name="finetune-box-1",
    root="/root-folder",
    uid=70001,
    binds={"/usr": Path("/usr"), "/opt/tool": Path("/host/tool"), "/workspace": Path("/host/work")},
    rooms={"/tmp": "1777"},
    room_bytes=1000,
    environment={"A": "b c", "OPENAI_API_KEY": "hidden"},
    limits=Limits(seconds=9.5, processes=20, total_memory_bytes=5000),
)


def pairs(argv: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(argv))


def test_podman_is_told_of_no_network_no_rights_and_folders_to_read() -> None:
    argv = podman_argv(TOLD, "/storage", "crun")
    assert argv[0] == "podman"
    assert argv[-2:] == ["--rootfs", "/root-folder"]
    assert {
        ("--network", "none"),
        ("--cap-drop", "all"),
        ("--security-opt", "no-new-privileges"),
        ("--user", "70001:70001"),
        ("--workdir", "/workspace"),
        ("--timeout", "39"),
        ("--env", "A=b c"),
        ("--mount", "type=bind,source=/host/tool,target=/opt/tool,readonly"),
        ("--mount", "type=bind,source=/host/work,target=/workspace"),
        ("--tmpfs", "/tmp:rw,exec,nosuid,nodev,mode=1777,size=1000,notmpcopyup"),
    } <= pairs(argv)
    assert {"--read-only", "--rm"} <= set(argv)
    assert ("--env", "OPENAI_API_KEY") in pairs(argv)
    assert ("--env", "OPENAI_API_KEY") in pairs(docker_argv(TOLD))
    assert "hidden" not in " ".join([*argv, *docker_argv(TOLD)])
    assert ("--cgroups", "disabled") in pairs(argv)
    assert "--cgroups" not in podman_argv(TOLD, "/storage", "runc")
    assert ("--userns", "keep-id") in pairs(podman_argv(replace(TOLD, uid=None), "/storage", None))


def test_the_runtime_is_one_that_bears_the_machines_control_groups(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert podman_runtime(is_hybrid=True) is None
    for name in ("crun", "runc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert (podman_runtime(is_hybrid=True), podman_runtime(is_hybrid=False)) == ("runc", "crun")


def test_docker_is_told_the_same_and_limits_by_control_groups() -> None:
    argv = docker_argv(TOLD)
    assert argv[:2] == ["docker", "run"]
    assert argv[-1] == "/root-folder"
    assert {
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--user", "70001:70001"),
        ("--pids-limit", "22"),
        ("--memory", "5000"),
        ("--memory-swap", "5000"),
        ("--mount", "type=bind,source=/host/tool,target=/opt/tool,readonly"),
        ("--mount", "type=bind,source=/host/work,target=/workspace"),
    } <= pairs(argv)
    free = docker_argv(replace(TOLD, limits=Limits(processes=None)))
    assert not {"--memory", "--pids-limit"} & set(free)


def test_apptainer_is_told_the_same() -> None:
    argv = apptainer_argv(TOLD)
    assert argv[0] == "apptainer"
    assert argv[-1] == "/root-folder"
    assert {"--containall", "--cleanenv", "--no-home", "--pid"} <= set(argv)
    assert {
        ("--network", "none"),
        ("--pwd", "/workspace"),
        ("--bind", "/host/tool:/opt/tool:ro"),
        ("--bind", "/host/work:/workspace:rw"),
        ("--scratch", "/tmp"),
    } <= pairs(argv)


def test_an_engine_that_fails_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "podman"
    fake.write_text("#!/bin/sh\necho 'Error: cannot set up namespace' >&2; exit 125\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(FinetuneError) as caught:
        open_box("container:podman")
    assert caught.value.code == "no_sandbox"
    assert "cannot set up namespace" in caught.value.message


needs_podman = pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed")


@pytest.fixture(scope="module")
def box():
    try:
        return open_box("container:podman")
    except FinetuneError as error:
        pytest.skip(f"podman does not run here: {error.message[-200:]}")


@needs_podman
@pytest.mark.slow
def test_podman_runs_commands_with_stdin_exit_codes_and_signals(box, tmp_path) -> None:
    def run(script: str, **given):
        return box.run(["sh", "-c", script], tmp_path, Limits(seconds=60), **given)

    result = run("cat; pwd; echo wrong >&2; echo 1 > made; exit 3", stdin=b"given\n")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "given\n/workspace\n", "wrong\n")
    assert (tmp_path / "made").read_text() == "1\n"
    assert run("kill -9 $$").killed_by == "SIGKILL"
    assert box.run(["no-such-command"], tmp_path, Limits(seconds=60)).exit_code == 127
    late = box.run(["sleep", "60"], tmp_path, Limits(seconds=3))
    assert (late.over_limit, late.exit_code) == ("time", None)


@needs_podman
@pytest.mark.slow
def test_a_container_of_podman_ends_with_us(box, tmp_path) -> None:
    code = (
        "from pathlib import Path\n"
        "from finetune.boxes.bubblewrap import open_box\n"
        "from finetune.boxes.launching import Limits\n"
        f"open_box('container:podman').run(['sh', '-c', 'echo up > up; sleep 70.{os.getpid()}'],"
        f" Path({str(tmp_path)!r}), Limits(seconds=70))\n"
    )
    before = set(Path("/tmp").glob("finetune-containers-*"))
    long_place = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=long_place)
    while not (tmp_path / "up").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 30
    while is_running(f"70.{os.getpid()}") and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_running(f"70.{os.getpid()}")
    for folder in set(Path("/tmp").glob("finetune-containers-*")) - before:  # of the one that was killed
        remove_tree(folder)


def is_running(word: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"sleep\0{word}".encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False
