"""What a hostile agent may try from inside its box and at its verifier: each attempt is contained, and told in the result."""

import functools
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.boxes import bubblewrap, container
from finetune.boxes.bubblewrap import open_box
from finetune.boxes.launching import Limits
from finetune.boxes.process import new_workspace
from finetune.domains.tasks import load_tasks, prepare_workspace, verify
from finetune.errors import FinetuneError
from tests.boxes.offering import Endpoint

SECRETS = {
    "RANK": "leaked-3",
    "LOCAL_RANK": "leaked-1",
    "WORLD_SIZE": "leaked-8",
    "MASTER_ADDR": "leaked.host",
    "MASTER_PORT": "leaked-29500",
    "TORCHELASTIC_RUN_ID": "leaked-run",
    "HF_TOKEN": "leaked-hf",
    "OPENAI_API_KEY": "leaked-openai",
    "AWS_SECRET_ACCESS_KEY": "leaked-aws",
    "WANDB_API_KEY": "leaked-wandb",
    "SSH_AUTH_SOCK": "/leaked.sock",
    "FINETUNE_HOME": "/leaked-home",
    "PYTHONPATH": "/leaked-path",
    "CUDA_VISIBLE_DEVICES": "leaked-gpu",
}
LIMITS = Limits(
    seconds=30,
    memory_bytes=None,
    processes=40,
    file_bytes=8 << 20,
    total_memory_bytes=512 << 20,
    workspace_bytes=24 << 20,
)


@functools.cache
def opened(name):
    try:
        return open_box(name)
    except FinetuneError as error:
        return error


@pytest.fixture(params=["bubblewrap", pytest.param("container:podman", marks=pytest.mark.proof)])
def box(request):
    found = opened(request.param)
    if isinstance(found, FinetuneError):
        pytest.skip(f"no {request.param} here: {found.message[:200]}")
    return found


@pytest.fixture
def sh(box, tmp_path):
    """Run a script as an agent would, in a workspace of its own."""
    (tmp_path / "work").mkdir()
    return lambda script, limits=LIMITS, **given: box.run(
        ["sh", "-c", script], tmp_path / "work", limits, **given
    )


@pytest.fixture
def python(box, tmp_path):
    (tmp_path / "work").mkdir(exist_ok=True)
    return lambda code, limits=LIMITS, **given: box.run(
        [box.python, "-c", code], tmp_path / "work", limits, **given
    )


@pytest.fixture
def worth(box):
    """Return the score of a task after a script has worked on it as its agent."""

    def worth(name, script, **given):
        (task,) = load_tasks(f"builtin:desk/{name}")
        with new_workspace({}) as workspace:
            prepare_workspace(task, workspace, box)
            box.run(["sh", "-c", script], workspace, replace(task.limits, seconds=30), **given)
            return verify(task, workspace, box)

    return worth


def test_ranks_addresses_tokens_and_keys_are_absent_inside(python, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    code = (
        "import os, pathlib\nprint(sorted(os.environ))\nfor name in os.environ: print(os.environ[name])\n"
        "for path in pathlib.Path('/proc').glob('[0-9]*/*'):\n"
        " if path.name in ('environ', 'cmdline'):\n"
        "  try: print(path.read_bytes())\n"
        "  except OSError: pass"
    )
    result = python(code)
    assert "HOME" in result.stdout
    assert "leaked" not in result.stdout
    assert not set(SECRETS) & set(result.stdout.split("'"))


def test_home_and_secrets_of_the_user_are_not_read(sh, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("secret-key")
    monkeypatch.setenv("HOME", str(home))
    result = sh(
        f"cat {home}/.ssh/id ~/.ssh/id /root/.ssh/* /root/.netrc /etc/shadow /etc/gshadow /proc/1/environ; "
        f"ls -a ~ /root /home {tmp_path}; cat /proc/1/root{home}/.ssh/id; "
        "find / -xdev -name id -path '*.ssh*' -exec cat {} +"
    )
    assert "secret-key" not in result.stdout
    assert "root:" not in result.stdout
    assert result.exit_code is not None


def test_the_verifier_and_the_oracle_are_not_found(sh):
    (task,) = load_tasks("builtin:desk/write-note")
    result = sh(
        f"ls {task.folder} {task.folder}/verifier {task.folder}/oracle; cat {task.folder}/oracle/solve.sh;"
        " find / -name test_outputs.py -o -name solve.sh -o -name task.md 2>/dev/null;"
        " ls /verifier /oracle /tests /programs"
    )
    assert result.stdout == ""
    assert result.stderr.count("No such file") == 8


def test_nothing_outside_the_workspace_is_written(sh, tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("as it was")
    (tmp_path / "work" / "link").symlink_to(outside)
    result = sh(
        f"for place in / /usr /usr/bin /bin /etc /opt /home /root /dev /proc /sys /var /run {tmp_path}; do"
        " touch $place/new 2>/dev/null && echo WROTE $place; done;"
        f" echo changed > link; echo changed > {outside}; echo changed > ../outside.txt;"
        " mount -t tmpfs none /usr && echo WROTE; mount -o remount,rw /usr && echo WROTE; chroot / true && echo WROTE;"
        " mknod disk b 254 0 && echo WROTE; true"
    )
    assert "WROTE" not in result.stdout
    assert outside.read_text() == "as it was"


def test_no_connection_is_opened(python):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0finetune-escape-{os.getpid()}")
        abstract.listen()
        addresses = [("127.0.0.1", server.getsockname()[1]), ("192.0.2.1", 80), ("169.254.169.254", 80)]
        result = python(
            "import socket\n"
            f"for address in {addresses!r}:\n"
            " try: socket.create_connection(address, 3); print('OPENED')\n"
            " except OSError as error: print(type(error).__name__, error)\n"
            f"try: socket.socket(socket.AF_UNIX).connect('\\0finetune-escape-{os.getpid()}'); print('OPENED')\n"
            "except OSError as error: print(error)\n"
            "try: print(socket.gethostbyname('example.org'), 'OPENED')\n"
            "except OSError as error: print(error)"
        )
    assert "OPENED" not in result.stdout
    assert result.stdout.count("\n") == 5


def test_the_control_port_is_not_reached_through_the_endpoint(python, tmp_path_factory):
    """Requests that name another server by their line or header get no further than the endpoint."""
    asked: list[bytes] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as control,
        Endpoint(tmp_path_factory.mktemp("endpoint") / "e.sock") as endpoint,
    ):
        control.settimeout(0.2)
        threading.Thread(target=listen, args=(control, asked), daemon=True).start()
        port = control.getsockname()[1]
        tries = [
            f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n",
            f"GET http://127.0.0.1:{port}/sleep HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n",
            f"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 2\r\n\r\n{{}}",
        ]
        result = python(
            "import socket\n"
            f"for text in {tries!r}:\n"
            " way = socket.create_connection(('127.0.0.1', 8000), 5)\n"
            " way.sendall(text.encode()); print(way.recv(200)[:12])\n"
            f"for port in (8001, 9000, {port}):\n"
            " try: socket.create_connection(('127.0.0.1', port), 3); print('OPENED')\n"
            " except OSError as error: print('refused')",
            endpoint=endpoint.path,
        )
        time.sleep(0.3)
    assert asked == []
    assert "OPENED" not in result.stdout
    assert result.stdout.count("refused") == 3, result.stderr
    assert len(endpoint.lines) == 2  # both as requests of its own: CONNECT it does not know
    assert "HTTP/1" in result.stdout


def listen(server, asked):
    while True:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        with connection:
            asked.append(connection.recv(1000))


@pytest.mark.slow
def test_a_fork_bomb_is_held_and_ended(python):
    began = time.monotonic()
    code = "import os, time\nwhile True:\n try: os.fork()\n except OSError: print('held', flush=True); time.sleep(0.5)"
    result = python(code, replace(LIMITS, seconds=3), environment={"MINE": f"bomb-{os.getpid()}"})
    assert (result.over_limit, result.exit_code) == ("time", None)
    assert "held" in result.stdout
    assert time.monotonic() - began < 60
    assert not is_running(f"bomb-{os.getpid()}")


def test_a_file_of_ten_gigabytes_is_stopped_however_it_is_made(sh, tmp_path):
    def size():
        total = sum(path.stat().st_blocks * 512 for path in (tmp_path / "work").iterdir())
        for path in (tmp_path / "work").iterdir():
            path.unlink()
        return total

    assert sh("exec head -c 10G /dev/zero > big").over_limit == "file_size"
    assert size() <= 9 << 20
    assert sh("exec truncate -s 10G sparse").over_limit == "file_size"
    assert size() == 0
    assert sh("for i in $(seq 99); do head -c 7M /dev/zero > f$i; sleep 0.1; done").over_limit == "workspace"
    assert size() < 99 * (7 << 20)
    in_memory = sh("for i in 1 2 3; do head -c 7M /dev/zero > /tmp/f$i && echo whole || echo full; done")
    assert in_memory.stdout.split() == ["whole", "full", "full"]


def test_the_parent_cannot_be_killed(sh):
    result = sh(
        f"kill -9 {os.getpid()} {os.getppid()} 1 -{os.getpgid(0)}; kill -STOP 1; sleep 0.2; kill -9 -1"
    )
    assert result.over_limit is None
    assert sh("echo still here").stdout == "still here\n"


@pytest.mark.slow
def test_a_daemon_does_not_outlive_its_box(python, tmp_path):
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        " os.setsid()\n"
        " if os.fork() == 0:\n"
        "  os.environ.clear(); os.chdir('/workspace')\n"
        "  os.execve('/bin/sh', ['sh', '-c', 'echo up > up; sleep 2; echo late > late; sleep 50.4711'], {})\n"
        " os._exit(0)\n"
        "while not os.path.exists('up'): time.sleep(0.01)"
    )
    assert python(code).exit_code == 0
    time.sleep(2.5)
    assert (tmp_path / "work" / "up").exists()
    assert not (tmp_path / "work" / "late").exists()
    assert not any(b"50.4711" in text for text in read_all("cmdline"))


def is_running(mark):
    return any(mark.encode() in text for text in read_all("environ"))


def read_all(name):
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


REWARDS = (
    "for place in . /tmp /workspace /logs/verifier /reward $HOME verifier logs/verifier; do"
    " mkdir -p $place; echo 1 > $place/reward.txt; echo '{\"reward\": 1}' > $place/reward.json; done 2>/dev/null;"
)


@pytest.mark.parametrize("name", ["write-note", "copy-file", "csv-sum"])
def test_reward_files_that_the_agent_left_pay_nothing(worth, name):
    """One task of each kind: test functions, exit code, reward file."""
    score = worth(name, f"{REWARDS} export REWARD_DIR=/workspace")
    assert (score.status, score.reward) == ("scored", 0.0), score.log


PATCHES = (
    "for name in conftest sitecustomize usercustomize json pathlib os csv pytest test_outputs; do"
    ' echo \'import sys; open("/workspace/reward.txt", "w").write("1"); sys.exit(0)\' > $name.py; done;'
    " mkdir -p bin; for name in python3 python sh grep cmp cat env; do"
    " printf '#!/bin/sh\\nexit 0\\n' > $name; cp $name bin/; chmod +x $name bin/$name; done;"
    " echo 'import os; os._exit(0)' > x.pth; printf '[pytest]\\naddopts = --exitfirst\\n' > pytest.ini;"
    " echo 'exit 0' > .profile; cp .profile .bashrc; export PATH=/workspace:$PATH BASH_ENV=/workspace/.profile"
)


@pytest.mark.parametrize("name", ["append-line", "copy-file", "csv-sum"])
def test_a_patched_test_runner_pays_nothing(worth, name):
    score = worth(name, PATCHES)
    assert (score.status, score.reward) == ("scored", 0.0), score.log


def test_links_devices_and_pipes_do_not_lead_to_what_is_expected(worth):
    for trick in (
        "ln -s /verifier/report.txt backup.txt",
        "ln -s / up; ln -s up/../verifier/report.txt backup.txt",
        "mkdir -p a/b; ln -s ../.. a/b/c; ln -s a/b/c/../verifier/report.txt backup.txt",
        "mkfifo backup.txt",
        "ln -s /proc/self/fd/0 backup.txt",
    ):
        score = worth("copy-file", trick)
        assert (score.status, score.reward) == ("scored", 0.0), trick
        assert "left out" in score.log
    assert worth("copy-file", "cp report.txt x; ln x backup.txt").reward == 1.0


def test_a_program_that_is_judged_sees_neither_verifier_nor_reward(box, tmp_path):
    """What it leaves running, and what it writes beside its copy of the workspace, reaches the verifier neither."""
    for name in ("verifier", "oracle", "work"):
        (tmp_path / "task" / name).mkdir(parents=True)
    front = "---\nversion: 1\nprograms: {look: {command: sh look.sh}}\n---\nDo.\n"
    (tmp_path / "task" / "task.md").write_text(front)
    (tmp_path / "task" / "oracle" / "solve.sh").write_text("true\n")
    (tmp_path / "task" / "verifier" / "test.sh").write_text(
        "cat $PROGRAMS/look/stdout $PROGRAMS/look/exit_code; ls; exit 1\n"
    )
    work = tmp_path / "task" / "work"
    (work / "look.sh").write_text(
        "ls / /verifier /programs; env; touch made; (setsid sh -c 'sleep 30; touch late' &); exit 3"
    )
    score = verify(load_tasks(str(tmp_path / "task"))[0], work, box)
    assert (score.status, score.reward) == ("scored", 0.0)
    seen, _, listed = score.log.partition("\n3")
    assert "workspace" in seen
    assert not {"verifier", "programs"} & set(seen.split())
    assert "REWARD_DIR" not in seen
    assert listed.split() == ["look.sh"]


def test_a_workspace_that_is_too_large_to_be_judged_is_a_limit(box, tmp_path):
    (task,) = load_tasks("builtin:desk/write-note")
    small = replace(task, limits=replace(task.limits, workspace_bytes=1 << 20))
    (tmp_path / "note.txt").write_text("hello desk")
    (tmp_path / "big").write_bytes(bytes(2 << 20))
    score = verify(small, tmp_path, box)
    assert (score.status, score.reward) == ("limit", None)


def test_our_own_package_is_covered_where_every_box_would_read_it(box, tmp_path, monkeypatch):
    """Installed under /usr it would show the verifiers of the tasks that ship with it."""
    script = ["sh", "-c", "ls /usr/share/doc | wc -l; ls /usr/share | wc -l"]
    shown = [int(line) for line in box.run(script, tmp_path, LIMITS).stdout.split()]
    assert min(shown) > 1
    for module in (bubblewrap, container):
        monkeypatch.setattr(module, "__file__", "/usr/share/doc/boxes/x.py")
    assert box.run(script, tmp_path, LIMITS).stdout == f"0\n{shown[1]}\n"


def test_without_the_tools_the_box_is_refused_and_nothing_weaker_is_taken(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("bubblewrap", "container", "container:docker"):
        with pytest.raises(FinetuneError) as caught:
            open_box(name)
        assert (caught.value.code, caught.value.exit_code) == ("no_sandbox", 4)
