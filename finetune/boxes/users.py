"""The users that commands in boxes run as, and giving them their workspace.

Rule: started by root, each box has a uid of its own, or the kernel would not count its processes apart.
"""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path

from finetune.errors import FinetuneError


def spare_uid() -> int:
    """Return a uid that no user and no other box has (by chance), inside the range that this user namespace knows."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first + count > 1_000_000:
            return 100_000 + secrets.randbelow(900_000)
        if first + count > 60_000:
            return 20_000 + secrets.randbelow(40_000)
    raise FinetuneError("no_sandbox", "this container maps too few users to give a box one of its own")


def give(workspace: Path, uid: int) -> None:
    """Make the user the owner of the folder and all in it, however deep; links are changed, not followed."""
    command = ["chown", "-R", "-h", f"{uid}:{uid}", "--", str(workspace)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FinetuneError("no_sandbox", f"the workspace cannot be given away: {done.stderr.strip()[-500:]}")
