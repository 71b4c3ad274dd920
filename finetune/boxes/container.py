"""The container box: the same bounds as bubblewrap's through podman, apptainer or docker, without an image to download.

Rule: the container's root is an empty folder into which /usr and a Python are bound, so that commands see the programs
of this machine; it ends when we do, since its first process holds a pipe of ours. What podman does is tested; for
apptainer and docker only the command line is.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from finetune.boxes.process import WORKSPACE, box_environment, checked_places, remove_tree
from finetune.boxes.users import give, spare_uid
from finetune.errors import FinetuneError

ENGINES = ("podman", "apptainer", "docker")
_HOME = "/home/sandbox"
_PYTHON = "/opt/python"
_SOCKET = "/run/finetune/endpoint.sock"
_STDIN = "/run/finetune/stdin"
_ROOMS = {"/tmp": "1777", "/dev/shm": "1777", _HOME: "0777"}
_UNIFIED = Path("/sys/fs/cgroup/unified")  # there where both versions of control groups are mounted
# In the names of variables that an engine takes from its own environment.
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_OF_CLIENT = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "LANG", "DOCKER_HOST")


@dataclass(frozen=True)
class Container:
    """What an engine is told. binds: place -> path, read-only but for the workspace; rooms: folders in memory -> mode."""

    name: str
    root: str
    uid: int | None
    binds: Mapping[str, Path]
    rooms: Mapping[str, str]
    room_bytes: int | None
    environment: Mapping[str, str]
    limits: Limits


def podman_argv(container: Container, storage: str, runtime: str | None) -> list[str]:
    """Return the beginning of podman's command line; a folder is the root, and nothing is kept in its storage.

    With crun, control groups are left alone, which an ordinary user often may not make: our own limits hold.
    """
    user = (
        ["--userns", "keep-id"] if container.uid is None else ["--user", f"{container.uid}:{container.uid}"]
    )
    return [
        *("podman", "--root", f"{storage}/root", "--runroot", f"{storage}/run", "--storage-driver", "vfs"),
        *("--cgroup-manager", "cgroupfs", "--events-backend", "none"),
        *([] if runtime is None else ["--runtime", runtime]),
        *("run", "--rm", "--interactive"),
        *("--name", container.name, "--hostname", "sandbox", "--network", "none"),
        *([] if runtime == "runc" else ["--cgroups", "disabled"]),
        *(
            "--read-only",
            "--read-only-tmpfs=false",
            "--cap-drop",
            "all",
            "--security-opt",
            "no-new-privileges",
        ),
        *("--log-driver", "none", "--http-proxy=false", "--pull", "never", "--workdir", WORKSPACE),
        *("--timeout", str(int(container.limits.seconds) + 30)),
        *_ulimits(),
        *user,
        *_mounts(container, ",notmpcopyup"),  # or the room would hold what it covers
        *_variables(container),
        *("--rootfs", container.root),
    ]


def docker_argv(container: Container) -> list[str]:
    """Return the beginning of docker's command line; root is the name of an image that holds the empty folder."""
    limits, user = container.limits, os.getuid() if container.uid is None else container.uid
    memory = limits.total_memory_bytes
    return [
        *("docker", "run", "--rm", "--interactive", "--name", container.name, "--hostname", "sandbox"),
        *("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--log-driver", "none", "--pull", "never", "--ipc", "private", "--workdir", WORKSPACE),
        *("--user", f"{user}:{user}"),
        *([] if limits.processes is None else ["--pids-limit", str(limits.processes + 2)]),
        *([] if memory is None else ["--memory", str(memory), "--memory-swap", str(memory)]),
        *_mounts(container),
        *_variables(container),
        container.root,
    ]


def apptainer_argv(container: Container) -> list[str]:
    """Return the beginning of apptainer's command line; a folder is the root. Its environment goes through the client's."""
    binds = [
        f"{path}:{place}:{'rw' if place == WORKSPACE else 'ro'}" for place, path in container.binds.items()
    ]
    return [
        *("apptainer", "--silent", "exec", "--containall", "--cleanenv", "--no-home", "--no-init", "--pid"),
        *("--ipc", "--uts", "--hostname", "sandbox", "--net", "--network", "none", "--no-privs"),
        *("--no-mount", "home,cwd,hostfs", "--pwd", WORKSPACE),
        *(word for place in container.rooms for word in ("--scratch", place)),
        *(word for bind in binds for word in ("--bind", bind)),
        container.root,
    ]


def podman_runtime(is_hybrid: bool) -> str | None:
    """Return the runtime to name: crun, but runc where both versions of control groups are mounted, which crun refuses."""
    for name in ("runc", "crun") if is_hybrid else ("crun", "runc"):
        if shutil.which(name):
            return name
    return None


def _ulimits() -> list[str]:
    """Return limits no higher than ours: without CAP_SYS_RESOURCE podman's own defaults could not be set."""
    words = []
    for name, kind, most in (
        ("nofile", resource.RLIMIT_NOFILE, 8192),
        ("nproc", resource.RLIMIT_NPROC, 16384),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(hard, most)
        words += ["--ulimit", f"{name}={limit}:{limit}"]
    return words


def _mounts(container: Container, room_options: str = "") -> list[str]:
    words = []
    for place, path in container.binds.items():
        readonly = "" if place == WORKSPACE else ",readonly"
        words += ["--mount", f"type=bind,source={path},target={place}{readonly}"]
    size = "" if container.room_bytes is None else f",size={container.room_bytes}"
    for place, mode in container.rooms.items():
        words += ["--tmpfs", f"{place}:rw,exec,nosuid,nodev,mode={mode}{size}{room_options}"]
    return words


def _variables(container: Container) -> list[str]:
    """Return the options for the environment; a secret is named alone, since all users read command lines."""
    words = []
    for name, value in container.environment.items():
        words += ["--env", name if _SECRET.search(name) else f"{name}={value}"]
    return words


class ContainerBox:
    """Commands in containers of podman, apptainer or docker: the first of them on PATH, or the one that is named.

    Started by root, the command gets a uid that nobody else has. Its start takes tenths of a second, for which `seconds`
    must have room. Raises no_sandbox where there is no engine.
    """

    name = "container"
    isolates = True

    def __init__(self, engine: str | None = None) -> None:
        found = [name for name in (ENGINES if engine is None else (engine,)) if shutil.which(name)]
        if not found:
            raise FinetuneError("no_sandbox", f"{engine or ' or '.join(ENGINES)} is not on PATH")
        self.engine = found[0]
        base = Path(sys.base_prefix)
        self._base = None if base.is_relative_to("/usr") else base
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.python = f"{_PYTHON if self._base else base}/bin/{version}"
        self._is_root = os.geteuid() == 0
        # Not in a TMPDIR that may be long: podman takes no runroot of more than 50 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="finetune-containers-", dir="/tmp"))
        self._image: str | None = None
        weakref.finalize(self, remove_tree, self._folder)

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
        places = checked_places(reads or {})
        if uid is not None:
            give(workspace, uid)
        if endpoint is not None:
            places[_SOCKET] = endpoint
            if uid is not None:
                endpoint.chmod(0o666)
        own = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            (own / "stdin").write_bytes(stdin)
            (own / "stdin").chmod(0o644)
            places[_STDIN] = own / "stdin"
            container = self._container(uid, workspace, limits, places, environment or {})
            container = replace(container, root=self._root_of_engine(own / "root"))
            way = None if endpoint is None else (_SOCKET, 8000)
            entry = Entry(self.python, folder=WORKSPACE, endpoint=way, stdin=_STDIN)
            return supervised(self._launch(container, entry, command), workspace, limits, b"")
        finally:
            remove_tree(own)

    def _container(
        self,
        uid: int | None,
        workspace: Path,
        limits: Limits,
        places: Mapping[str, Path],
        environment: Mapping[str, str],
    ) -> Container:
        base = {} if self._base is None else {_PYTHON: self._base}
        own = {} if self._base is None else {"PATH": f"{_PYTHON}/bin:/usr/local/bin:/usr/bin:/bin"}
        libraries = [f"{_PYTHON}/lib"] if self._base else []
        libraries += [environment["LD_LIBRARY_PATH"]] if "LD_LIBRARY_PATH" in environment else []
        found = {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {}
        return Container(
            name=f"finetune-box-{secrets.token_hex(8)}",
            root="",
            uid=uid,
            binds={"/usr": Path("/usr"), **_etc(), **base, **places, WORKSPACE: workspace},
            rooms=_ROOMS | self._hidden(),
            room_bytes=limits.file_bytes,
            environment=box_environment(_HOME, "/tmp") | own | dict(environment) | found,
            limits=limits,
        )

    def _launch(self, container: Container, entry: Entry, command: Sequence[str]) -> Launch:
        marker, line = new_marker(), f"started {secrets.token_hex(16)}\n"
        inner = entering(entry, command, container.limits, None, line)
        client = {name: os.environ[name] for name in _OF_CLIENT if name in os.environ} | {MARKER: marker}
        inside = dict(container.environment) | {MARKER: marker}
        client |= {name: value for name, value in inside.items() if _SECRET.search(name)}
        container = replace(container, environment=inside)
        storage = str(self._folder)
        if self.engine == "podman":
            argv = podman_argv(container, storage, podman_runtime(_UNIFIED.is_dir()))
            remove = [*argv[: argv.index("run")], "rm", "--force", "--time", "0", "--ignore", container.name]
        elif self.engine == "docker":
            argv, remove = docker_argv(container), ["docker", "rm", "--force", container.name]
        else:
            argv, remove = apptainer_argv(container), []
            client |= {f"APPTAINERENV_{name}": value for name, value in inside.items()}
        return Launch(
            lambda fd: [*argv, *inner],
            client,
            marker,
            signal_base=128,
            start_line=line,
            clean_up=lambda: _run(remove, client),
        )

    def _hidden(self) -> dict[str, str]:
        """Return what covers our own package, where it is installed in a folder that every box reads."""
        ours = Path(__file__).resolve().parents[1]
        if ours.is_relative_to("/usr"):
            return {str(ours): "0555"}
        if self._base is not None and ours.is_relative_to(self._base):
            return {f"{_PYTHON}/{ours.relative_to(self._base)}": "0555"}
        return {}

    def _root_of_engine(self, folder: Path) -> str:
        """Return a new folder, since an engine leaves places in it; or for docker the name of an image that is made once."""
        if self.engine != "docker" or self._image is None:
            _make_root(folder)
        if self.engine != "docker":
            return str(folder)
        if self._image is None:
            name = f"finetune-box:{secrets.token_hex(6)}"
            pack = subprocess.run(["tar", "-C", str(folder), "-c", "."], capture_output=True, check=True)
            done = subprocess.run(
                ["docker", "import", "-", name], input=pack.stdout, capture_output=True, check=False
            )
            if done.returncode != 0:
                text = f"docker import failed: {done.stderr.decode(errors='replace').strip()[-500:]}"
                raise FinetuneError("no_sandbox", text)
            self._image = name
        return self._image


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Carry out what ends a container, where that is a command; its first process ends by itself where it fails."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if command:
            given = subprocess.DEVNULL
            subprocess.run(
                command, env=environment, stdin=given, capture_output=True, timeout=30, check=False
            )


def _etc() -> dict[str, Path]:
    found = (Path("/etc/alternatives"), Path("/etc/ld.so.cache"))
    return {str(path): path for path in found if path.exists()}


def _make_root(folder: Path) -> None:
    """Make a folder with the places where things are bound, and the links that stand for /bin and the like."""
    for place in (
        "usr",
        "etc",
        "opt/python",
        "proc",
        "dev",
        "sys",
        "run/finetune",
        "tmp",
        "home/sandbox",
        "workspace",
    ):
        (folder / place).mkdir(parents=True, exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    for place, mode in _ROOMS.items():  # runc gives a room the mode of the folder that it covers
        (folder / place[1:]).mkdir(parents=True, exist_ok=True)
        (folder / place[1:]).chmod(int(mode, 8))
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            (folder / name).symlink_to(os.readlink(f"/{name}"))
    (folder / "etc/passwd").write_text(f"sandbox:x:1000:1000::{_HOME}:/bin/sh\n")
