"""Copies of folders that commands have filled, or are to read.

Rule: a copy holds ordinary files, folders and links that stay inside, nothing else: what a hostile command left can lead
nobody out of the folder, and a folder too large is not copied at all.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from finetune.boxes.process import remove_tree

_MOST_ENTRIES = 100_000
_DEEPEST = 100


class TooLarge(Exception):
    """A folder holds more than may be copied."""


def encodable(text: str) -> str:
    """Return a text that can be written as UTF-8: what no encoding holds (half characters, bytes of a name) is spelled out."""
    return text.encode(errors="backslashreplace").decode()


def sealed_copy(source: Path, target: Path, most_bytes: int | None = None) -> list[str]:
    """Copy a folder that no process writes to any more; return what was left out, a line each.

    Left out are links that lead outside or name a place absolutely, devices, pipes, sockets and what cannot be read.
    Hard links become files of their own, and no file keeps a set-uid bit. Raises TooLarge past most_bytes, and where
    there are very many or very deep folders.
    """
    copying = _Copying(source, target, most_bytes)
    if not target.exists():
        make_folder(target)
    try:
        _copy_all(copying, target)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise TooLarge("folders are nested deeper than a path can name") from error
    return [encodable(note) for note in copying.left_out]


def _copy_all(copying: _Copying, target: Path) -> None:
    folders = [Path()]
    while folders:
        folder = folders.pop()
        for entry in copying.entries(folder):
            place = folder / entry.name
            if entry.is_symlink():
                copying.copy_link(place)
            elif entry.is_dir(follow_symlinks=False):
                if len(place.parts) > _DEEPEST:
                    raise TooLarge(f"folders are nested more than {_DEEPEST} deep")
                make_folder(target / place)
                folders.append(place)
            elif entry.is_file(follow_symlinks=False):
                copying.copy_file(place)
            else:
                copying.left_out.append(f"{place}: no ordinary file")


def lay_over(source: Path, target: Path) -> None:
    """Put the files of a folder of ours into one that a command has filled, in place of what is in their way."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir() and place.is_dir() and not place.is_symlink():
            continue
        if place.is_dir() and not place.is_symlink():
            remove_tree(place)
        place.unlink(missing_ok=True)
        if path.is_dir():
            make_folder(place)
        else:
            shutil.copyfile(path, place)
            place.chmod(0o644)


def make_folder(path: Path) -> None:
    """Make a folder that every user may read, whatever the umask."""
    path.mkdir()
    path.chmod(0o755)


class _Copying:
    """One copy on its way: how much it holds so far, and what it leaves out."""

    def __init__(self, source: Path, target: Path, most_bytes: int | None) -> None:
        self._source, self._target, self._most_bytes = source, target, most_bytes
        self._num_bytes = self._num_entries = 0
        self.left_out: list[str] = []

    def entries(self, folder: Path) -> list[os.DirEntry[str]]:
        path = self._source / folder
        if not os.access(path, os.R_OK | os.X_OK):  # a command may close its own folders
            path.chmod(0o700)
        with os.scandir(path) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        self._num_entries += len(entries)
        if self._num_entries > _MOST_ENTRIES:
            raise TooLarge(f"more than {_MOST_ENTRIES} files")
        return entries

    def copy_link(self, place: Path) -> None:
        to = os.readlink(self._source / place)
        if not _stays_inside(to, len(place.parts) - 1):
            self.left_out.append(f"{place}: a link that leads to {to[:200]}")
        else:
            os.symlink(to, self._target / place)

    def copy_file(self, place: Path) -> None:
        try:
            fd = os.open(self._source / place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            self.left_out.append(f"{place}: {error.strerror}")
            return
        with os.fdopen(fd, "rb") as file:
            about = os.fstat(fd)
            self._num_bytes += about.st_size  # of a file with holes too: the copy would fill them
            if self._most_bytes is not None and self._num_bytes > self._most_bytes:
                raise TooLarge(f"more than {self._most_bytes} bytes")
            with (self._target / place).open("xb") as copy:
                shutil.copyfileobj(file, copy)
        is_program = stat.S_IMODE(about.st_mode) & 0o111
        (self._target / place).chmod(0o755 if is_program else 0o644)


def _stays_inside(to: str, depth: int) -> bool:
    """Whether a link in a folder `depth` below the top leads to a place under the top, whatever other links it passes.

    It may go up at its beginning only: after a name, which may be a link itself, going up could leave the folder.
    """
    if os.path.isabs(to):
        return False
    parts = [part for part in to.split(os.sep) if part not in ("", ".")]
    num_up = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return num_up <= depth and ".." not in parts[num_up:]
