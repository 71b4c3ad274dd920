"""Processes: identity, children that die with us, signals."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from agent.processes import Interrupts, ProcessId, kill_session, start_child, wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_process_is_its_pid_and_its_start_time() -> None:
    me = ProcessId.of_self()
    assert me.is_alive
    assert not replace(me, start=me.start + 1).is_alive
    assert not replace(me, boot="another").is_alive


def test_a_dead_process_and_a_zombie_are_not_alive() -> None:
    child = subprocess.Popen(SLEEP)
    found = ProcessId.of(child.pid)
    assert found is not None
    assert found.is_alive
    child.kill()
    assert wait_until(lambda: not found.is_alive, 5)  # still a zombie: nobody has waited for it
    child.wait()
    assert ProcessId.of(child.pid) is None


def test_a_signal_never_reaches_another_process_of_the_same_pid() -> None:
    child = subprocess.Popen(SLEEP)
    found = ProcessId.of(child.pid)
    assert found is not None
    replace(found, start=found.start - 1).send(signal.SIGKILL)
    time.sleep(0.1)
    assert child.poll() is None
    found.send(signal.SIGKILL)
    assert child.wait(5) == -signal.SIGKILL


def test_a_child_reads_nothing_and_has_its_own_session(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stdin.read() == '', os.getsid(0) == os.getpid(), sorted(os.environ))"
    with open(tmp_path / "log", "wb") as log:
        start_child([sys.executable, "-c", code], {"ONLY": "this", "LC_ALL": "C.UTF-8"}, log).wait(10)
    assert (tmp_path / "log").read_text() == "True True ['LC_ALL', 'ONLY']\n"


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = f"""
import sys, time; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from agent.processes import start_child
print(start_child({SLEEP!r}, {{}}, open({str(tmp_path / "log")!r}, "wb")).pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = ProcessId.of(int(parent.stdout.readline()))
    assert child is not None
    assert child.is_alive
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not child.is_alive, 5)


def test_a_session_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    code = f"import subprocess, time; print(subprocess.Popen({SLEEP!r}).pid, flush=True); time.sleep(60)"
    with open(tmp_path / "log", "wb") as log:
        leader = start_child([sys.executable, "-c", code], {}, log)
    assert wait_until(lambda: (tmp_path / "log").read_text().endswith("\n"), 10)
    grandchild = ProcessId.of(int((tmp_path / "log").read_text()))
    kill_session(leader.pid)
    assert leader.wait(5) == -signal.SIGKILL
    assert grandchild is None or wait_until(lambda: not grandchild.is_alive, 5)


def test_the_first_interrupt_is_remembered() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_until(lambda: interrupts.received is not None, 1)
    assert interrupts.received == signal.SIGINT
