"""Run the `finetune` command from this skill, wherever its folder lies: python3 scripts/run.py VERB [flags]

It looks for the installed command and hands over to it: arguments, the JSON object on stdout and exit codes are those of
`finetune`. Where there is none it prints one JSON object that says how to install it, and exits with 4. Any Python 3.8.
"""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
CHECKOUT = HERE.parents[min(3, len(HERE.parents) - 1)]


def main():
    for command in candidates():
        if is_finetune(command):
            with contextlib.suppress(OSError):  # its Python may have gone
                os.execv(command, [command, *sys.argv[1:]])
    print(json.dumps(how_to_install()))
    return 4


def candidates():
    """Return where the command may be: told, in the checkout of this skill, on PATH, above here, noted when it was copied."""
    told = os.environ.get("FINETUNE_COMMAND", "")
    beside = Path(sys.executable).with_name("finetune")
    above = [folder / ".venv" / "bin" / "finetune" for folder in (Path.cwd(), *Path.cwd().parents)]
    places = [told, CHECKOUT / ".venv" / "bin" / "finetune", shutil.which("finetune") or "", beside, *above]
    places += noted().get("command", [])[:1]
    return [str(place) for place in places if str(place)]


def is_finetune(path):
    """Whether a file is the command of this project and no other program of that name."""
    try:
        with open(path, "rb") as file:
            return os.access(path, os.X_OK) and b"agent.cli" in file.read(4000)
    except OSError:
        return False


def noted():
    try:
        return json.loads(HERE.with_name("installed.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def how_to_install():
    sources = [CHECKOUT, Path(noted().get("source", CHECKOUT))]
    source = next((path for path in sources if (path / "scripts" / "setup_environment.py").is_file()), None)
    make = ["make", "-C", str(source or "DIR"), "setup"]
    where = "in its source" if source else "in a checkout of finetune-skills (DIR stands for its folder)"
    fix = (
        f"Run `{' '.join(make)}` {where}; it needs Python 3.11 or newer. The command is then .venv/bin/finetune there: put it on "
        "PATH, or set FINETUNE_COMMAND to it. Into an environment of your own: python3 -m pip install DIR"
    )
    error = {
        "hint_id": "missing_package",
        "code": "missing_package",
        "cause": "The command finetune (package finetune-skills) is not installed where this skill looks for it.",
        "fix": fix,
        "confirm": "`python3 scripts/run.py doctor` prints an object with ok true.",
        "evidence": {"looked_at": candidates()},
    }
    return {
        "schema_version": "1",
        "ok": False,
        "command": "finetune",
        "status": "refused",
        "run_id": None,
        "run_dir": None,
        "summary": error["cause"],
        "data": {},
        "warnings": [],
        "errors": [error],
        "next_actions": [{"why": "install it", "argv": make}] if source else [],
        "artifacts": [],
        "truncated": False,
        "next_offset": None,
    }


if __name__ == "__main__":
    sys.exit(main())
