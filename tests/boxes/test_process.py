"""The plain box: what a command finds, what stops it, and that nothing of it is left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.boxes.launching import Entry, Launch, Limits, entering, new_marker, supervised
from finetune.boxes.process import ProcessBox, new_workspace, num_threads_of, read_back
from finetune.errors import FinetuneError


@pytest.fixture
def run(tmp_path: Path):
    box = ProcessBox()

    def run(script: str, limits: Limits | None = None, **given):
        return box.run(["sh", "-c", script], tmp_path, limits or Limits(), **given)

    return run


def python(code: str, folder: Path, limits: Limits):
    box = ProcessBox()
    return box.run([box.python, "-c", code], folder, limits)


def has_environment(text: str) -> bool:
    """Return whether a process of ours still has this text in its environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def test_a_command_reads_stdin_and_its_exit_code_and_streams_come_back(run):
    result = run("cat; echo wrong >&2; exit 3", stdin=b"given")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "given", "wrong\n")
    assert (result.timed_out, result.killed_by, result.truncated) == (False, None, False)


def test_the_environment_is_clean_and_the_folder_its_own(run, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SECRET_TOKEN", "PYTHONPATH"):
        monkeypatch.setenv(name, "leaked")
    result = run("env; pwd", environment={"MINE": "given"})
    assert "leaked" not in result.stdout
    assert "MINE=given" in result.stdout
    assert f"HOME={tmp_path}" in result.stdout
    assert result.stdout.endswith(f"{tmp_path}\n")


def test_time_ends_a_command_with_all_that_it_started(run):
    began = time.monotonic()
    result = run(
        "sleep 50 & setsid sleep 50 & sleep 50", Limits(seconds=0.5), environment={"MINE": "timed-out"}
    )
    assert (result.exit_code, result.timed_out, result.killed_by) == (None, True, "SIGKILL")
    assert time.monotonic() - began < 20
    assert not has_environment("MINE=timed-out")


def test_what_a_command_leaves_running_is_ended_and_not_waited_for(run):
    began = time.monotonic()
    result = run("sleep 50 & (setsid sleep 50 &) ; echo done", environment={"MINE": "left-behind"})
    assert (result.exit_code, result.stdout) == (0, "done\n")
    assert time.monotonic() - began < 20
    assert not has_environment("MINE=left-behind")


def test_output_is_cut_decoded_with_replacement_and_read_to_its_end(run):
    result = run(r"yes | head -c 50000000; printf '\377\376' >&2", Limits(seconds=60, output_bytes=1000))
    assert (len(result.stdout), result.truncated, result.exit_code) == (1000, True, 0)
    assert result.stderr == "��"


def test_a_command_that_closes_its_streams_is_still_waited_for(run):
    result = run("exec >&- 2>&-; sleep 0.3; exit 5")
    assert result.exit_code == 5


def test_memory_file_and_processor_limits(tmp_path):
    limits = Limits(seconds=30, memory_bytes=1 << 30, file_bytes=1 << 20, cpu_seconds=1)
    assert "MemoryError" in python("bytearray(2 << 30)", tmp_path, limits).stderr
    assert "File too large" in python("open('f', 'wb').write(bytes(2 << 20))", tmp_path, limits).stderr
    assert (tmp_path / "f").stat().st_size <= 1 << 20
    assert python("while True: pass", tmp_path, limits).killed_by == "SIGXCPU"


def test_a_command_that_is_not_there_is_its_failure_and_no_fault_of_the_box(tmp_path):
    result = ProcessBox().run(["no-such-command"], tmp_path, Limits())
    assert (result.exit_code, result.stderr) == (127, "no-such-command: No such file or directory")


@pytest.mark.parametrize("word", ["a\0b", "a" * 140_000, "\ud800"], ids=["zero", "long", "half"])
def test_a_command_that_the_kernel_does_not_take_is_its_own_failure(run, word):
    result = run(f"echo {word}")
    assert (result.exit_code, result.stdout) == (126, "")
    assert result.stderr.startswith("the command cannot be started: ")


def test_a_signal_is_named(run):
    assert run("kill -9 $$").killed_by == "SIGKILL"


def test_a_box_that_cannot_be_set_up_is_an_error(tmp_path):
    with pytest.raises(FinetuneError) as caught:
        supervised(Launch(lambda fd: ["/bin/false"], {}, new_marker()), tmp_path, Limits(), b"")
    assert caught.value.code == "no_sandbox"
    with pytest.raises(FinetuneError) as caught:
        ProcessBox().run(["true"], tmp_path / "missing", Limits())
    assert caught.value.code == "no_sandbox"


def test_a_command_dies_with_its_parent(tmp_path):
    code = (
        "from pathlib import Path\n"
        "from finetune.boxes.process import ProcessBox\n"
        "from finetune.boxes.launching import Limits\n"
        f"ProcessBox().run(['sh', '-c', 'echo $$ > pid; sleep 60'], Path({str(tmp_path)!r}), Limits(seconds=60))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert parent.poll() is None
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_parent_that_is_not_ours_stops_the_entry(tmp_path):
    box = ProcessBox()
    read, write = os.pipe()
    argv = entering(Entry(box.python, parent=1 << 22), ["touch", "started"], Limits(), write)
    done = subprocess.run(argv, cwd=tmp_path, pass_fds=(write,), check=False)
    os.close(write)
    assert (done.returncode, os.read(read, 10)) == (1, b"")
    os.close(read)
    assert not (tmp_path / "started").exists()


def test_the_threads_of_a_user_are_counted():
    own = len(os.listdir("/proc/self/task"))
    assert num_threads_of(os.getuid()) >= own
    assert num_threads_of(4_000_000) == 0


def test_a_workspace_holds_its_files_and_is_gone_afterwards():
    with new_workspace({"a/b.txt": "text", "c": b"\xff"}) as folder:
        assert (folder / "a/b.txt").read_text() == "text"
        assert read_back(folder, "c") == b"\xff"
        assert read_back(folder, "c", limit=0) == b""
        assert read_back(folder, "d") is None
    assert not folder.exists()


def test_a_link_that_a_command_left_is_not_followed(tmp_path):
    (tmp_path / "result").symlink_to("/etc/hostname")
    assert read_back(tmp_path, "result") is None
