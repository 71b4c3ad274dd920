"""What boxes share with us on purpose: an endpoint, things to read, a Python with packages; and limits on all together."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from finetune.boxes.bubblewrap import open_box
from finetune.boxes.launching import Limits
from finetune.boxes.process import ProcessBox, new_workspace, remove_tree
from finetune.boxes.programs import python_program
from finetune.boxes.watching import Watcher, bytes_under, shared_out_bytes
from finetune.errors import FinetuneError
from tests.boxes.offering import Endpoint

BOXES = [
    "process",
    pytest.param(
        "bubblewrap",
        marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed"),
    ),
]
ASK = (
    "import os, urllib.request as u\n"
    "url = os.environ['BASE'] + '/models'\n"
    "body = os.urandom(3_000_000)\n"
    "print(u.urlopen(u.Request(url, data=body, method='POST'), timeout=20).read() == body)\n"
    "print(os.environ['FINETUNE_ENDPOINT'] in url)"
)


@pytest.fixture(params=[*BOXES, pytest.param("container:podman", marks=pytest.mark.proof)])
def box(request):
    try:
        return open_box(request.param)
    except FinetuneError as error:
        if "podman" in request.param:
            pytest.skip(f"podman does not run here: {error.message[-200:]}")
        raise


@pytest.fixture
def endpoint(tmp_path_factory):
    with Endpoint(tmp_path_factory.mktemp("endpoint") / "e.sock") as endpoint:
        yield endpoint


def test_a_command_finds_its_folder_under_the_same_name_in_its_environment(box, tmp_path):
    code = "import os; print(os.environ.get('PWD', os.getcwd()) == os.getcwd(), os.getcwd())"
    result = box.run([box.python, "-c", code], tmp_path, Limits())
    assert result.stdout == f"True {'/workspace' if box.isolates else tmp_path}\n"


def test_an_endpoint_is_reached_and_large_bodies_go_both_ways(box, endpoint, tmp_path):
    environment = {"BASE": "http://127.0.0.1:8000/v1"}
    command = [box.python, "-c", ASK]
    result = box.run(command, tmp_path, Limits(seconds=40), environment, endpoint=endpoint.path)
    assert result.stdout == "True\nTrue\n", result.stderr
    assert [line.split()[1] for line in endpoint.lines] == ["/v1/models"]


def test_many_connections_at_once_are_carried(box, endpoint, tmp_path):
    code = (
        "import os, threading, urllib.request as u\n"
        "def ask(i): done.append(u.urlopen(u.Request(os.environ['BASE'], data=b'%d' % i), timeout=20).read())\n"
        "done = []\nthreads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(sorted(map(int, done)) == list(range(12)))"
    )
    environment = {"BASE": "http://127.0.0.1:8000/"}
    result = box.run(
        [box.python, "-c", code], tmp_path, Limits(seconds=40), environment, endpoint=endpoint.path
    )
    assert result.stdout == "True\n", result.stderr


def test_the_relay_ends_with_the_command(box, endpoint, tmp_path):
    mark = {"MINE": f"relay-{os.getpid()}"}
    began = time.monotonic()
    result = box.run(["true"], tmp_path, Limits(seconds=30), mark, endpoint=endpoint.path)
    assert result.exit_code == 0
    assert time.monotonic() - began < 20
    assert not any(mark["MINE"].encode() in text for text in environments())


def environments():
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


def test_an_endpoint_that_nobody_serves_refuses_and_the_command_goes_on(box, tmp_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("dead") / "e.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    code = "import os, urllib.request as u\ntry: u.urlopen(os.environ['BASE'], timeout=20)\nexcept OSError: print('no')"
    environment = {"BASE": "http://127.0.0.1:8000/"}
    result = box.run([box.python, "-c", code], tmp_path, Limits(seconds=30), environment, endpoint=path)
    assert "no" in result.stdout or "RemoteDisconnected" in result.stderr


def test_what_is_to_be_read_is_there_and_stays_as_it_is(box, tmp_path, tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    source.chmod(0o755)
    (source / "a.txt").write_text("first")
    file = source / "b.txt"
    file.write_text("second")
    reads = {"/opt/tool": source, "/run/one.txt": file}
    command = ["sh", "-c", 'cat "$0"/a.txt "$MINE"', "/opt/tool"]
    result = box.run(command, tmp_path, Limits(), {"MINE": "/run/one.txt"}, reads=reads)
    assert result.stdout == "firstsecond", result.stderr
    if box.isolates:
        box.run(["sh", "-c", "echo x > /opt/tool/a.txt; rm /opt/tool/b.txt"], tmp_path, Limits(), reads=reads)
        assert ((source / "a.txt").read_text(), file.exists()) == ("first", True)


@pytest.mark.parametrize("place", ["relative", "/", "/usr/lib", "/workspace/x", "/opt/../usr/x", "/proc"])
def test_places_of_the_boxs_own_are_refused(place, tmp_path):
    with pytest.raises(FinetuneError) as caught:
        ProcessBox().run(["true"], tmp_path, Limits(), reads={place: tmp_path})
    assert caught.value.code == "bad_value"


def test_a_missing_thing_to_read_is_named(tmp_path):
    with pytest.raises(FinetuneError) as caught:
        ProcessBox().run(["true"], tmp_path, Limits(), reads={"/opt/x": tmp_path / "none"})
    assert caught.value.code == "file_missing"


def test_a_python_with_packages_runs_where_its_base_is_closed_to_the_boxs_user(
    box, tmp_path, tmp_path_factory
):
    """The environment of these tests itself, whose base may lie under /root, which only root enters."""
    program = python_program(Path(sys.executable))
    code = "import yaml, sys; print(yaml.safe_load('a: 1'), sys.version_info[:2])"
    command = [program.python, "-c", code]
    result = box.run(command, tmp_path, Limits(), program.environment, reads=program.reads)
    assert result.stdout == f"{{'a': 1}} {sys.version_info[:2]}\n", result.stderr


def test_a_file_that_is_no_python_is_told(tmp_path):
    with pytest.raises(FinetuneError) as caught:
        python_program(tmp_path / "python")
    assert caught.value.code == "missing_package"


def test_memory_of_all_processes_together_is_limited(box, tmp_path):
    code = (
        "import os, time\nfor i in range(4):\n if os.fork() == 0:\n"
        "  kept = bytearray(b'x' * 50_000_000); time.sleep(60)\ntime.sleep(60)"
    )
    limits = Limits(seconds=60, memory_bytes=None, total_memory_bytes=120 << 20)
    result = box.run([box.python, "-c", code], tmp_path, limits)
    assert (result.over_limit, result.exit_code, result.timed_out) == ("memory", None, False)
    assert result.seconds < 40


def test_shared_memory_counts_once(box, tmp_path):
    code = (
        "import os, time\nkept = bytes(b'x' * 60_000_000)\n"
        "children = [os.fork() or (time.sleep(1.5), os._exit(0)) for _ in range(5)]\n"
        "[os.waitpid(pid, 0) for pid in children]; print('whole')"
    )
    limits = Limits(seconds=60, memory_bytes=None, total_memory_bytes=250 << 20)
    result = box.run([box.python, "-c", code], tmp_path, limits)
    assert (result.over_limit, result.stdout) == (None, "whole\n"), result.stderr


def test_the_workspace_is_limited_while_a_command_runs_and_at_its_end(box, tmp_path):
    limits = Limits(seconds=60, file_bytes=4 << 20, workspace_bytes=10 << 20)
    code = "for i in range(8): open(f'f{i}', 'wb').write(bytes(3 << 20))\nimport time; time.sleep(SECONDS)"
    running = box.run([box.python, "-c", code.replace("SECONDS", "60")], tmp_path, limits)
    assert (running.over_limit, running.exit_code) == ("workspace", None)
    for path in tmp_path.iterdir():
        path.unlink()
    ended = box.run([box.python, "-c", code.replace("SECONDS", "0")], tmp_path, limits)
    assert ended.over_limit == "workspace"


@pytest.mark.slow
def test_limits_of_one_process_are_named(box, tmp_path):
    limits = Limits(seconds=30, cpu_seconds=1, file_bytes=1 << 20)
    assert box.run([box.python, "-c", "while True: pass"], tmp_path, limits).over_limit == "cpu"
    assert (
        box.run(["sh", "-c", "exec head -c 9000000 /dev/zero > f"], tmp_path, limits).over_limit
        == "file_size"
    )
    assert box.run(["sleep", "20"], tmp_path, Limits(seconds=0.5)).over_limit == "time"
    assert box.run(["true"], tmp_path, limits).over_limit is None


def test_bytes_under_a_folder_count_files_folders_and_no_links(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_bytes(b"x" * 100_000)
    (tmp_path / "out").symlink_to("/usr")
    assert 100_000 <= bytes_under(tmp_path, 1 << 30) < 130_000
    assert bytes_under(tmp_path, 1000) > 1000
    assert bytes_under(tmp_path / "none", 1000) == 0


def test_a_folder_that_is_closed_to_us_counts_as_too_much(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(path):
        if path.endswith("closed"):  # as it is to any user but root
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert bytes_under(tmp_path, 1 << 40) > 1 << 40


@pytest.mark.slow
def test_folders_that_no_path_can_name_count_as_too_much_and_can_be_removed(tmp_path):
    top = tmp_path / "deep"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("abcd", dir_fd=fd)
        deeper = os.open("abcd", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(fd)
    assert bytes_under(top, 1 << 40) > 1 << 40
    remove_tree(top)
    assert not top.exists()


def test_a_watcher_that_has_no_limits_says_nothing(tmp_path):
    watcher = Watcher(os.getpid(), b"NONE=1", None, tmp_path, None)
    assert watcher.over() is None
    assert Watcher(os.getpid(), b"NONE=1", 1, tmp_path, None).over() == "memory"
    assert shared_out_bytes([os.getpid()]) > 1 << 20
    assert shared_out_bytes([1 << 22]) == 0
    with subprocess.Popen(["true"]) as ended:
        while "Z" not in Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0.01)
        assert shared_out_bytes([ended.pid]) == 0


def test_boxes_in_threads_share_one_endpoint(box, endpoint):
    """As rollouts do: several boxes at once, each with its way to the same socket."""
    code = "import os, urllib.request as u; print(u.urlopen(u.Request(os.environ['BASE'], data=b'hi'), timeout=20).read())"
    results = []

    def ask():
        with new_workspace({}) as folder:
            environment = {"BASE": "http://127.0.0.1:8000/v1"}
            command = [box.python, "-c", code]
            results.append(box.run(command, folder, Limits(seconds=40), environment, endpoint=endpoint.path))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.stdout for result in results] == ["b'hi'\n"] * 3, [result.stderr for result in results]
