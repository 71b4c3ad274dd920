"""What a box's processes and its workspace come to together, beyond what the limits of one process can hold.

Rule: looking is cheap and safe while a hostile command runs: nothing is followed, opened or changed, and each look ends.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_ENTRIES = 200_000
_LEAST_BYTES = 512  # of an entry, which costs room although its file is empty
MEMORY_EVERY_S, WORKSPACE_EVERY_S = 0.1, 0.5


class Watcher:
    """Says when the processes under `leader`, or marked, hold more memory, or the workspace more bytes, than they may."""

    def __init__(
        self, leader: int, mark: bytes, memory_bytes: int | None, workspace: Path, workspace_bytes: int | None
    ) -> None:
        self._leader, self._mark = leader, mark
        self._memory_bytes = memory_bytes
        self._workspace, self._workspace_bytes = workspace, workspace_bytes
        self._next_memory = self._next_workspace = 0.0
        self._began = _start_of(leader)
        self._marked: set[tuple[int, int]] = set()

    def over(self) -> str | None:
        """Return the limit that is passed (memory, workspace), or None; looks only as often as is worth it."""
        now = time.monotonic()
        if self._memory_bytes is not None and now >= self._next_memory:
            if self._is_memory_over(self._memory_bytes):
                return "memory"
            self._next_memory = _next(now, MEMORY_EVERY_S)
        if now >= self._next_workspace:
            if self.is_workspace_over():
                return "workspace"
            self._next_workspace = _next(now, WORKSPACE_EVERY_S)
        return None

    def is_workspace_over(self) -> bool:
        limit = self._workspace_bytes
        return limit is not None and bytes_under(self._workspace, limit) > limit

    def _is_memory_over(self, limit: int) -> bool:
        """Pages that several processes share count once each at first; only where that is too much are they shared out."""
        held = self._group()
        return sum(held.values()) > limit and shared_out_bytes(held) > limit

    def _group(self) -> dict[int, int]:
        """Return pid -> resident bytes of the leader, of the marked processes, and of all that descend from them."""
        parents: dict[int, int] = {}
        sizes: dict[int, int] = {}
        members = {self._leader}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                pid, start = int(name), int(fields[19])
                parents[pid], sizes[pid] = int(fields[1]), int(fields[21]) * _PAGE
                if self._is_marked(pid, start):
                    members.add(pid)
        while more := {pid for pid, parent in parents.items() if parent in members and pid not in members}:
            members |= more
        return {pid: sizes[pid] for pid in members if pid in sizes}

    def _is_marked(self, pid: int, start: int) -> bool:
        """What takes the mark off descends from one that had it, or from the leader; what is older than the leader has none."""
        if start < self._began or (pid, start) in self._marked:
            return start >= self._began
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(entry.startswith(self._mark) for entry in entries):
                self._marked.add((pid, start))
                return True
        return False


def _start_of(pid: int) -> int:
    """Return when a process started, in ticks of the machine's clock; 0 where it has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def _next(began: float, every: float) -> float:
    """Return when to look again: at most a tenth of the time goes into looking."""
    now = time.monotonic()
    return now + max(every, 10 * (now - began))


def shared_out_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes, a page that n processes share counted as its n-th part by each (PSS).

    What has ended meanwhile holds nothing; what is not ours to look into counts whole.
    """
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += 1024 * int(text.partition("\nPss:")[2].split()[0])
        except (OSError, IndexError, ValueError):
            total += _resident_bytes(pid)
    return total


def _resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process at this moment: 0 of one that has ended, also where nobody waited for it."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def bytes_under(folder: Path, enough: int) -> int:
    """Return what is stored under a folder, or something above `enough` as soon as it is known to be more.

    Too many entries, folders so deep that no path names them, and folders that are closed to us (which a command may
    fill all the same) count as too much.
    """
    total, count = 0, 0
    folders = [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    with contextlib.suppress(FileNotFoundError):
                        total += max(entry.stat(follow_symlinks=False).st_blocks * 512, _LEAST_BYTES)
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                    if total > enough or count > _MOST_ENTRIES:
                        return max(total, enough + 1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return enough + 1
    return total
