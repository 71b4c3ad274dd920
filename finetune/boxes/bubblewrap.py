"""The bubblewrap box: no network, a read-only system, processes and folders of its own; and which boxes there are.

Rule: a command in it sees /usr, a Python, and its workspace; it changes the workspace alone, as a user who owns nothing
else, and is gone when we are.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from finetune.boxes.container import ENGINES, ContainerBox
from finetune.boxes.launching import (
    MARKER,
    BoxResult,
    Entry,
    Launch,
    Limits,
    entering,
    new_marker,
    supervised,
)
from finetune.boxes.process import WORKSPACE, Box, ProcessBox, box_environment, checked_places, new_workspace
from finetune.boxes.users import give, spare_uid
from finetune.errors import FinetuneError

_HOME = "/home/sandbox"
_SOCKET = "/run/finetune/endpoint.sock"
_PYTHON = "/opt/python"
_USER = 1000  # inside, where the caller is an ordinary user and keeps the uid outside


class BubblewrapBox:
    """Commands under bwrap (the Debian package bubblewrap), which must be on PATH; else no_sandbox is raised.

    Started by root, the command gets a uid that nobody else has, or the kernel would not count its processes; bwrap
    itself then stays root until all is mounted, since a Python under /root is not to be reached by that uid. A command
    may make user namespaces of its own only in that case, and only where the machine lets ordinary users do so.
    """

    name = "bubblewrap"
    isolates = True

    def __init__(self) -> None:
        found = shutil.which("bwrap")
        if found is None:
            raise FinetuneError("no_sandbox", "bwrap is not on PATH")
        self._bwrap = found
        base = Path(sys.base_prefix)
        self._base = None if base.is_relative_to("/usr") else str(base)
        python = f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
        self.python = f"{_PYTHON if self._base else base}/{python}"
        self._is_root = os.geteuid() == 0

    def run(
        self,
        command: Sequence[str],
        workspace: Path,
        limits: Limits,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        endpoint: Path | None = None,
        reads: Mapping[str, Path] | None = None,
    ) -> BoxResult:
        uid = spare_uid() if self._is_root else None
        bound = _bound(checked_places(reads or {}))
        if uid is not None:
            give(workspace, uid)
        if endpoint is not None:
            bound += _bound({_SOCKET: endpoint})
            if uid is not None:
                endpoint.chmod(0o666)
        with tempfile.TemporaryFile() as passwd:
            number = _USER if uid is None else uid
            passwd.write(f"sandbox:x:{number}:{number}::{_HOME}:/bin/sh\n".encode())
            passwd.seek(0)
            own = box_environment(_HOME, "/tmp") | self._python_path() | dict(environment or {})
            libraries = own.pop("LD_LIBRARY_PATH", "")  # of the command, not of bwrap
            marker = new_marker()
            outer = [
                *self._argv(workspace, limits, passwd.fileno(), bound),
                *self._libraries(libraries),
                "--",
            ]
            way = None if endpoint is None else (_SOCKET, 8000)
            entry = Entry(self.python, uid=uid, folder=WORKSPACE, endpoint=way)

            def argv(fd: int) -> list[str]:
                return [*outer, *entering(entry, command, limits, fd)]

            launch = Launch(argv, own | {MARKER: marker}, marker, (passwd.fileno(),), signal_base=128)
            return supervised(launch, workspace, limits, stdin)

    def _python_path(self) -> dict[str, str]:
        return {"PATH": f"{_PYTHON}/bin:/usr/local/bin:/usr/bin:/bin"} if self._base else {}

    def _libraries(self, given: str) -> list[str]:
        paths = [*([f"{_PYTHON}/lib"] if self._base else []), *([given] if given else [])]
        return ["--setenv", "LD_LIBRARY_PATH", ":".join(paths)] if paths else []

    def _argv(self, workspace: Path, limits: Limits, passwd: int, bound: list[str]) -> list[str]:
        size = [] if limits.file_bytes is None else ["--size", str(limits.file_bytes)]
        base = [] if self._base is None else [*_folder("/opt"), "--ro-bind", self._base, _PYTHON]
        # Folders that bwrap makes on the way to a mount are for its own user alone, unless they are made before.
        return [
            *(self._bwrap, "--die-with-parent", "--new-session", "--hostname", "sandbox"),
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *self._user(),
            *("--ro-bind", "/usr", "/usr"),
            *(word for name in ("bin", "sbin", "lib", "lib32", "lib64") for word in _system_folder(name)),
            *_folder("/etc"),
            *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
            *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *("--perms", "0644", "--ro-bind-data", str(passwd), "/etc/passwd"),
            *base,
            *("--proc", "/proc", "--dev", "/dev", "--perms", "1777", *size, "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/dev"),
            *("--perms", "1777", *size, "--tmpfs", "/tmp"),
            *(*_folder("/home"), "--perms", "0777", *size, "--tmpfs", _HOME),
            *self._hidden(),
            *bound,
            *("--bind", str(workspace), WORKSPACE, "--remount-ro", "/"),
        ]

    def _hidden(self) -> list[str]:
        """Return what covers our own package, where it is installed in a folder that every box reads.

        It holds the verifiers and oracles of the tasks that ship with it.
        """
        ours = Path(__file__).resolve().parents[1]
        if ours.is_relative_to("/usr"):
            return ["--tmpfs", str(ours), "--remount-ro", str(ours)]
        if self._base is not None and ours.is_relative_to(self._base):
            inside = f"{_PYTHON}/{ours.relative_to(self._base)}"
            return ["--tmpfs", inside, "--remount-ro", inside]
        return []

    def _user(self) -> list[str]:
        if self._is_root:
            return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        user = str(_USER)
        return ["--unshare-user", "--disable-userns", "--uid", user, "--gid", user, "--cap-drop", "ALL"]


def _folder(path: str) -> list[str]:
    return ["--perms", "0755", "--dir", path]


def _bound(places: Mapping[str, Path]) -> list[str]:
    """Return what binds files and folders read-only, outer places first, with the folders on the way to them."""
    words: list[str] = []
    for place in sorted(places, key=lambda place: place.count("/")):
        for parent in reversed(Path(place).parents[:-1]):
            words += [] if str(parent) in places or str(parent) == _HOME else _folder(str(parent))
        words += ["--ro-bind", str(places[place]), place]
    return words


def _system_folder(name: str) -> list[str]:
    """Return how /bin and the like come in: as the link that they are on most systems, or as the folder."""
    path = f"/{name}"
    return ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]


_BOXES: dict[str, Callable[[], Box]] = {
    "bubblewrap": BubblewrapBox,
    "container": ContainerBox,
    **{f"container:{engine}": functools.partial(ContainerBox, engine) for engine in ENGINES},
    "process": ProcessBox,
}


def open_box(name: str = "bubblewrap") -> Box:
    """Return the box of this name after it has run a command; raises bad_value, and no_sandbox with what stood in the way.

    process, which isolates nothing, is only ever taken where it is named.
    """
    if name not in _BOXES:
        text = f"box: {name}: no such box; there are {', '.join(_BOXES)}"
        raise FinetuneError("bad_value", text, setting="verifier_args")
    box = _BOXES[name]()
    with new_workspace({}) as workspace:
        result = box.run([box.python, "-I", "-S", "-c", "print(1)"], workspace, Limits(seconds=60.0))
    if result.exit_code != 0 or result.stdout != "1\n":
        text = (
            f"box {name}: a first command in it ended with {result.exit_code}: {result.stderr.strip()[-500:]}"
        )
        raise FinetuneError("no_sandbox", text)
    return box
