"""serve-mcp: looks whether a server can be started, and becomes it. What it answers is only ever why it cannot."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from agent.render import Answer
from agent.request import absolute
from agent.runner import Context
from agent.system import SOURCE_ROOT
from finetune.errors import FinetuneError, Problems


def serve(roots: list[str], context: Context) -> Answer:
    """Replace this process by the MCP server (agent/mcp.py) of the folders, or of the working directory.

    Raises Problems where a folder is none or the SDK is not installed. Another program image: what this one imported,
    opened or set is gone, so that only the protocol reaches stdout.
    """
    folders = [Path(absolute(root, context.cwd)) for root in roots] or [context.cwd]
    problems = [
        FinetuneError("file_missing", f"root: {folder} is no folder", setting="root", file=str(folder))
        for folder in folders
        if not folder.is_dir()
    ]
    if importlib.util.find_spec("mcp") is None:
        text = "the package mcp is not installed: pip install 'mcp>=2.3,<3'"
        problems.append(FinetuneError("missing_package", text, package="mcp"))
    if problems:
        raise Problems(problems)
    path = [str(SOURCE_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path)}
    # -P: a folder named agent or mcp where the server is started is not taken for a package.
    argv = [sys.executable, "-P", "-m", "agent.mcp", *map(str, folders)]
    os.execve(sys.executable, argv, environment)
