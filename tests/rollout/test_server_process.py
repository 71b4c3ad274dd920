"""Own servers as processes: none is left behind, whoever is killed, and what goes wrong has its kind.

The processes are real; a program in the place of vLLM does what a test needs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune.errors import FinetuneError
from finetune.rollout import server as server_module
from finetune.rollout.server import (
    ManagedServer,
    ServerSettings,
)

# A program in the place of vLLM: argv as vLLM's, then it does what its first line says. It has a child, as vLLM has.
PROGRAM = """#!{python}
import http.server, json, os, subprocess, sys, time
argv = sys.argv[1:]
port, names = int(argv[argv.index("--port") + 1]), argv[argv.index("--served-model-name") + 1:]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, "environment", json.dumps(dict(os.environ)), flush=True)
{behaviour}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = json.dumps({{"data": [{{"id": name}} for name in names]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def make_server(settings: ServerSettings, tmp_path: Path) -> Iterator[Callable[..., ManagedServer]]:
    made: list[ManagedServer] = []

    def make(behaviour: str = "", **changes: Any) -> ManagedServer:
        program = tmp_path / "python"
        program.write_text(PROGRAM.format(python=sys.executable, behaviour=behaviour))
        program.chmod(0o755)
        made.append(ManagedServer(replace(settings, python=str(program), **changes)))
        return made[-1]

    yield make
    for server in made:
        server.stop(0)


def wait_until(happens: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.02)
    return happens()


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def started(server: ManagedServer) -> tuple[int, dict[str, str]]:
    """Return the process id of the program's child, and the program's environment."""
    line = next(line for line in server.log_text().splitlines() if line.startswith("child"))
    _, pid, _, environment = line.split(" ", 3)
    return int(pid), json.loads(environment)


def test_a_server_is_ready_when_it_answers_under_our_name_and_leaves_nothing_behind(
    make_server: Callable[..., ManagedServer],
) -> None:
    server = make_server()
    assert (server.url, server.is_alive) == (None, False)
    server.start()
    beats: list[int] = []
    assert server.wait_ready(lambda: beats.append(1)) > 0
    assert server.is_alive
    assert beats
    child, environment = started(server)
    assert environment["OMP_WAIT_POLICY"] == "passive"
    server.stop()
    assert not server.is_alive
    assert wait_until(lambda: not runs(child))


def test_a_restarted_server_is_another_process_and_its_log_goes_on(
    make_server: Callable[..., ManagedServer],
) -> None:
    server = make_server()
    server.start()
    server.wait_ready()
    first, _ = started(server)
    server.restart()
    second, _ = started(server)
    assert wait_until(lambda: not runs(first))
    assert runs(second)
    assert server.settings.log.read_text().count("child") == 2


def test_a_killed_server_takes_its_children_along(make_server: Callable[..., ManagedServer]) -> None:
    server = make_server()
    server.start()
    server.wait_ready()
    child, _ = started(server)
    assert server.pid is not None
    (program,) = psutil.Process(server.pid).children()
    program.kill()
    assert wait_until(lambda: not server.is_alive)
    assert wait_until(lambda: not runs(child))
    assert "exit code 137" in server.failure().message


@pytest.mark.parametrize("victim", ["parent", "guard"])
def test_no_server_outlives_the_process_that_started_it_or_its_guard(
    make_server: Callable[..., ManagedServer], tmp_path: Path, victim: str
) -> None:
    python = make_server().settings.python
    code = f"""
import threading, time
from pathlib import Path
from finetune.rollout.server import ManagedServer, ServerSettings
server = ManagedServer(ServerSettings(Path({str(tmp_path)!r}), Path({str(tmp_path)!r}) / "log", 128, 16, python={python!r}))
thread = threading.Thread(target=server.start)  # a server started by a thread outlives the thread
thread.start()
thread.join()
server.wait_ready()
time.sleep(1)
print(server.is_alive, server.pid, flush=True)
time.sleep(600)
"""
    root = str(Path(server_module.__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    try:
        assert parent.stdout is not None
        is_alive, guard = parent.stdout.readline().split()
        assert is_alive == "True"
        processes = psutil.Process(int(guard)).children(recursive=True)
        assert len(processes) == 2
        os.kill(parent.pid if victim == "parent" else int(guard), signal.SIGKILL)
        alone = processes if victim == "parent" else processes[:1]
        assert wait_until(lambda: not any(runs(process.pid) for process in alone))
    finally:
        parent.kill()
        parent.wait()
        for process in processes:
            if runs(process.pid):
                process.kill()


def test_a_server_that_does_not_answer_in_time_is_stopped(make_server: Callable[..., ManagedServer]) -> None:
    server = make_server("time.sleep(600)", start_timeout_s=1.0)
    server.start()
    with pytest.raises(FinetuneError, match="did not start within 1 s") as caught:
        server.wait_ready()
    assert caught.value.code == "engine_timeout"
    assert not server.is_alive


def test_a_server_that_ignores_being_told_is_killed(
    make_server: Callable[..., ManagedServer],
) -> None:
    server = make_server("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    server.start()
    server.wait_ready()
    child, _ = started(server)
    server.stop(0.3)
    assert not server.is_alive
    assert wait_until(lambda: not runs(child))


def test_a_port_that_is_taken_is_replaced_by_another(
    make_server: Callable[..., ManagedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        ports = iter([first, server_module._free_port()])
        monkeypatch.setattr(server_module, "_free_port", lambda: next(ports))
        server = make_server()
        server.start()
        server.wait_ready()
        assert server.url != f"http://127.0.0.1:{first}"


def test_a_stranger_at_the_port_is_not_taken_for_our_server(
    make_server: Callable[..., ManagedServer],
) -> None:
    server = make_server('names = ["base", "finetune-of-somebody-else"]', start_timeout_s=2.0)
    server.start()
    with pytest.raises(FinetuneError, match="did not start within"):
        server.wait_ready()


def test_a_server_that_fails_tells_its_own_traceback(make_server: Callable[..., ManagedServer]) -> None:
    server = make_server("raise MemoryError('cannot have 9 GiB')")
    server.start()
    with pytest.raises(FinetuneError, match="cannot have 9 GiB") as caught:
        server.wait_ready()
    assert caught.value.code == "engine_out_of_memory"
    assert caught.value.evidence["traceback"][-1] == "MemoryError: cannot have 9 GiB"


def test_a_python_that_is_not_there_or_has_no_vllm(settings: ServerSettings, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="no Python at") as caught:
        ManagedServer(replace(settings, python=str(tmp_path / "nothing"))).start()
    assert caught.value.code == "engine_missing"
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -I "$@"\n')
    bare.chmod(0o755)
    server = ManagedServer(replace(settings, python=str(bare)))
    server.start()
    with pytest.raises(FinetuneError, match="No module named") as caught:
        server.wait_ready()
    assert caught.value.code == "engine_missing"
