"""The bubblewrap box: no network, a read-only system, processes and folders of its own; and which boxes there are.

Rule: a command in it sees /usr, a Python, and its workspace; it changes the workspace alone, as a user who owns nothing
else, and is gone when we are.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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
from finetune.boxes.process import Box, ProcessBox, box_environment, new_workspace
from finetune.errors import FinetuneError

_HOME = "/home/sandbox"
_WORKSPACE = "/workspace"
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
    ) -> BoxResult:
        uid = spare_uid() if self._is_root else None
        if uid is not None:
            _give(workspace, uid)
        with tempfile.TemporaryFile() as passwd:
            number = _USER if uid is None else uid
            passwd.write(f"sandbox:x:{number}:{number}::{_HOME}:/bin/sh\n".encode())
            passwd.seek(0)
            own = box_environment(_HOME, "/tmp") | self._python_path() | dict(environment or {})
            marker = new_marker()
            outer = self._argv(workspace, limits, passwd.fileno())

            entry = Entry(self.python, uid=uid, folder=_WORKSPACE)

            def argv(fd: int) -> list[str]:
                return [*outer, *entering(entry, command, limits, fd)]

            launch = Launch(argv, own | {MARKER: marker}, marker, (passwd.fileno(),), signal_base=128)
            return supervised(launch, workspace, limits, stdin)

    def _python_path(self) -> dict[str, str]:
        return {"PATH": f"{_PYTHON}/bin:/usr/local/bin:/usr/bin:/bin"} if self._base else {}

    def _argv(self, workspace: Path, limits: Limits, passwd: int) -> list[str]:
        size = [] if limits.file_bytes is None else ["--size", str(limits.file_bytes)]
        base = [] if self._base is None else [*_folder("/opt"), "--ro-bind", self._base, _PYTHON]
        libraries = [] if self._base is None else ["--setenv", "LD_LIBRARY_PATH", f"{_PYTHON}/lib"]
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
            *("--bind", str(workspace), _WORKSPACE, "--remount-ro", "/"),
            *libraries,
            "--",
        ]

    def _user(self) -> list[str]:
        if self._is_root:
            return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        user = str(_USER)
        return ["--unshare-user", "--disable-userns", "--uid", user, "--gid", user, "--cap-drop", "ALL"]


def _folder(path: str) -> list[str]:
    return ["--perms", "0755", "--dir", path]


def _system_folder(name: str) -> list[str]:
    """Return how /bin and the like come in: as the link that they are on most systems, or as the folder."""
    path = f"/{name}"
    return ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]


def spare_uid() -> int:
    """Return a uid that no user and no other box has (by chance), inside the range that this user namespace knows."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first + count > 1_000_000:
            return 100_000 + secrets.randbelow(900_000)
        if first + count > 60_000:
            return 20_000 + secrets.randbelow(40_000)
    raise FinetuneError("no_sandbox", "this container maps too few users to give a box one of its own")


def _give(workspace: Path, uid: int) -> None:
    """Make the user the owner of the folder and all in it; links are changed, not followed."""
    os.chown(workspace, uid, uid)
    for folder, folders, files in os.walk(workspace):
        for name in (*folders, *files):
            os.chown(Path(folder, name), uid, uid, follow_symlinks=False)


_BOXES: dict[str, Callable[[], Box]] = {"bubblewrap": BubblewrapBox, "process": ProcessBox}


def open_box(name: str = "bubblewrap") -> Box:
    """Return the box of this name after it has run a command; raises bad_value, and no_sandbox with what stood in the way."""
    if name not in _BOXES:
        text = f"box: {name}: no such box; there are {', '.join(_BOXES)}"
        raise FinetuneError("bad_value", text, setting="verifier_args")
    box = _BOXES[name]()
    with new_workspace({}) as workspace:
        result = box.run([box.python, "-I", "-S", "-c", "print(1)"], workspace, Limits())
    if result.exit_code != 0 or result.stdout != "1\n":
        text = (
            f"box {name}: a first command in it ended with {result.exit_code}: {result.stderr.strip()[-500:]}"
        )
        raise FinetuneError("no_sandbox", text)
    return box
