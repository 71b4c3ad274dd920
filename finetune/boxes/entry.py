"""What runs in a box before the command: takes on user and limits, opens the way to the endpoint, becomes the command.

Rule: it imports nothing of ours, since the Python of a box sees the standard library alone: its text is handed to that
Python (`-c`), with what it is told as JSON and the command behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

ENDPOINT = "http://127.0.0.1:8000"  # how a command names the endpoint
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def enter(told: dict, command: list[str]) -> None:
    """Become the command. Limits come after the user is taken on, whose processes may be too many for a new limit.

    told: uid (None: stay), parent (die with it), folder (to enter), endpoint ([socket, port] or None), limits (RLIMIT
    name -> value), fd (where the start is told) or start_line (told on stderr), stdin (a file; the command is then our
    child, and stdin what tells that those who wait for us are still there).
    """
    if told["uid"] is not None:
        os.setgroups([])
        os.setresgid(told["uid"], told["uid"], told["uid"])
        os.setresuid(told["uid"], told["uid"], told["uid"])
    if told["parent"] is not None:  # after setresuid, which resets it
        _die_with(told["parent"])
    if told["folder"] is not None:
        os.chdir(told["folder"])
        os.environ["PWD"] = told["folder"]  # bwrap leaves another folder there, which some programs believe
    if told["endpoint"] is not None:
        _open_endpoint(*told["endpoint"])
    if told["stdin"] is not None:
        _run_as_child(told, command)
    _become(told, command)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _open_endpoint(path: str, port: int) -> None:
    """Listen on 127.0.0.1 (port 0: a free one) and carry each connection to the unix socket, in a process of its own.

    The environment tells the command where, also where it named the usual place and another one had to be taken.
    """
    import socket

    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for name, value in list(os.environ.items()):
        os.environ[name] = value.replace(ENDPOINT, url)
    os.environ["FINETUNE_ENDPOINT"] = url
    command = os.getpid()
    if os.fork() == 0:
        _die_with(command)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        _relay(listener, path)
        os._exit(1)
    listener.close()


def _relay(listener, path: str) -> None:  # type: ignore[no-untyped-def]
    """Copy bytes both ways between each connection and one to the socket: what the endpoint offers, and nothing else."""
    import asyncio
    import socket

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.close()

    async def connected() -> socket.socket:
        """asyncio's own way takes a full queue of the socket (EAGAIN) for a connection that is on its way."""
        way = socket.socket(socket.AF_UNIX)
        way.setblocking(False)
        while True:
            try:
                way.connect(path)
                return way
            except BlockingIOError:
                await asyncio.sleep(0.02)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, there = await asyncio.open_unix_connection(sock=await connected())
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, there), copy(back, writer))
        there.close()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(carry, sock=listener)
        await server.serve_forever()

    asyncio.run(serve())


def _run_as_child(told: dict, command: list[str]) -> None:
    """Run the command as the child of a container's first process, and end when it has ended or our stdin has.

    As the first process we cannot be killed from inside; undumpable, we cannot be traced either.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(told["stdin"], os.O_RDONLY), 0)
        return
    held = select.poll()
    held.register(0, select.POLLIN | select.POLLHUP)
    while True:
        if held.poll(20) and not os.read(0, 1 << 12):
            os._exit(128 + signal.SIGKILL)
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if ended:
            time.sleep(0)  # there may be more to collect


def _become(told: dict, command: list[str]) -> None:
    for name, value in told["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        wanted = value + 1 if name == "RLIMIT_CPU" else value
        top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (min(value, top), top))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, which the command would inherit
        signal.signal(number, signal.SIG_DFL)
    fd = told["fd"]
    if fd is not None:
        os.set_inheritable(fd, False)
    os.write(2 if fd is None else fd, told["start_line"].encode() if fd is None else b".")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2 if fd is None else fd, f"{command[0]}: {error.strerror}".encode())
        os._exit(127)


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]), sys.argv[2:])
