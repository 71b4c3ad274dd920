"""The bubblewrap box: what it keeps a command from. Skipped where bwrap is not installed."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from finetune.boxes.bubblewrap import open_box, spare_uid
from finetune.boxes.launching import Limits
from finetune.boxes.process import new_workspace
from finetune.errors import FinetuneError

ROOT = Path(__file__).parents[2]
needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bwrap is not installed (Debian: bubblewrap)"
)


@pytest.fixture(scope="module")
def box():
    return open_box("bubblewrap")


@pytest.fixture
def run(box, tmp_path):
    return lambda script, limits=None, **given: box.run(
        ["sh", "-c", script], tmp_path, limits or Limits(), **given
    )


@needs_bwrap
def test_files_of_the_machine_are_not_there_and_the_system_is_read_only(run, tmp_path):
    secret = tmp_path.parent / "secret.txt"
    secret.write_text("secret")
    result = run(
        f"cat {secret} /etc/shadow; ls /root; cat {ROOT}/README.md;"
        " for d in / /usr /etc /dev /home /opt; do touch $d/x && echo WROTE $d; done;"
        " for d in /tmp $HOME . /dev/shm; do touch $d/x || echo REFUSED $d; done; pwd; cat /proc/self/status"
    )
    assert "secret" not in result.stdout
    assert "WROTE" not in result.stdout
    assert "REFUSED" not in result.stdout
    assert "/workspace\n" in result.stdout
    assert "NoNewPrivs:\t1" in result.stdout
    assert "CapEff:\t0000000000000000" in result.stdout
    assert (tmp_path / "x").exists()


@needs_bwrap
def test_the_network_is_not_reached(box, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        refused = box.run([box.python, "-c", code], tmp_path, Limits())
        with socket.create_connection(("127.0.0.1", port), 2):
            pass
    assert "ConnectionRefusedError" in refused.stderr
    outside = box.run(
        [box.python, "-c", "import socket; socket.create_connection(('192.0.2.1', 80), 2)"],
        tmp_path,
        Limits(),
    )
    assert "unreachable" in outside.stderr


@needs_bwrap
def test_the_environment_is_clean_also_where_it_is_looked_for(run, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "leaked")
    result = run("env; cat /proc/1/environ /proc/*/cmdline", environment={"MINE": "given"})
    assert "leaked" not in result.stdout
    assert "MINE=given" in result.stdout
    assert "HOME=/home/sandbox" in result.stdout


@needs_bwrap
def test_processes_are_counted_and_only_the_boxs_own_are_seen(box, tmp_path):
    code = (
        "import os, time\nforks = 0\ntry:\n while forks < 200:\n  if os.fork() == 0: time.sleep(20); os._exit(0)\n"
        "  forks += 1\nexcept OSError: print(forks)"
    )
    result = box.run([box.python, "-c", code], tmp_path, Limits(seconds=20, processes=20))
    assert int(result.stdout) < 20
    seen = box.run(["sh", "-c", "ls /proc | grep -c '^[0-9]'"], tmp_path, Limits())
    assert int(seen.stdout) <= 5


@needs_bwrap
def test_limits_hold_inside(box, tmp_path):
    limits = Limits(seconds=30, memory_bytes=1 << 30, file_bytes=1 << 20, cpu_seconds=1)

    def python(code):
        return box.run([box.python, "-c", code], tmp_path, limits)

    assert "MemoryError" in python("bytearray(2 << 30)").stderr
    assert "File too large" in python("open('f', 'wb').write(bytes(2 << 20))").stderr
    assert (
        "No space left" in python("[open(f'/tmp/{i}', 'wb').write(bytes(1 << 19)) for i in range(9)]").stderr
    )
    assert python("while True: pass").killed_by == "SIGXCPU"


@needs_bwrap
def test_time_ends_a_command_with_all_that_it_started(run):
    marks = f"sleep 51.{os.getpid()}"
    result = run(f"{marks} & setsid {marks} & {marks}", Limits(seconds=1))
    assert (result.exit_code, result.timed_out) == (None, True)
    assert marks.encode().replace(b" ", b"\0") not in b"".join(command_lines())


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


@needs_bwrap
def test_two_boxes_at_once_do_not_share_a_user_or_a_folder(box):
    if os.geteuid() != 0:
        pytest.skip("an ordinary user has one uid for all its boxes")
    uids = set()
    for _ in range(2):
        with new_workspace({"mine": "1"}) as folder:
            uids.add(box.run(["sh", "-c", "id -u; echo 2 > mine"], folder, Limits()).stdout)
            assert (folder / "mine").read_text() == "2\n"
    assert len(uids) == 2
    assert "0\n" not in uids
    assert spare_uid() > 1000


@needs_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an ordinary user")
def test_an_ordinary_user_gets_the_same_box(tmp_path):
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("no Python that every user reaches")
    shutil.copytree(ROOT / "finetune" / "boxes", tmp_path / "finetune" / "boxes")
    for name in ("errors.py", "__init__.py"):
        shutil.copy(ROOT / "finetune" / name, tmp_path / "finetune" / name)
    code = (
        "import os, tempfile\nfrom finetune.boxes.bubblewrap import open_box\n"
        "from finetune.boxes.launching import Limits\nfrom finetune.boxes.process import new_workspace\n"
        "box = open_box()\n"
        "with new_workspace({}) as folder:\n"
        "    script = 'id -u; touch x && echo own; touch /x /dev/x 2>/dev/null && echo WROTE; unshare -Ur true && echo NS'\n"
        "    result = box.run(['sh', '-c', script], folder, Limits(processes=20))\n"
        "    print(result.stdout, os.path.exists(os.path.join(folder, 'x')))\n"
    )
    with new_workspace({}) as reached:  # pytest's own folders are closed to others
        shutil.copytree(tmp_path / "finetune", reached / "finetune")
        subprocess.run(["chmod", "-R", "a+rX", str(reached)], check=True)
        done = subprocess.run(
            [str(python), "-c", code],
            cwd=reached,
            user=12345,
            group=12345,
            extra_groups=[],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(reached), "TMPDIR": "/tmp"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout == "1000\nown\n True\n", done.stderr


def test_without_bwrap_the_box_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FinetuneError) as caught:
        open_box("bubblewrap")
    assert (caught.value.code, caught.value.exit_code) == ("no_sandbox", 4)


def test_a_bwrap_that_fails_is_told_in_its_own_words(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(FinetuneError) as caught:
        open_box("bubblewrap")
    assert caught.value.code == "no_sandbox"
    assert "No permissions to create a new namespace" in caught.value.message


def test_an_unknown_box_is_a_bad_value():
    with pytest.raises(FinetuneError) as caught:
        open_box("jail")
    assert caught.value.code == "bad_value"
