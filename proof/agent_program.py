"""A real agent program operates the product: OpenCode, with a scripted model that reads SKILL.md and what tools answer.

Two conversations: the first checks, plans and starts; the second knows nothing of it, finds the run, waits, evaluates
and exports.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from proof.claims import ROOT, Claim, NotHere
from proof.product import Run
from proof.scripted_model import Policy, ScriptedModel, answers_in, begins, comes_back, outputs_of

PACKAGE = "opencode-linux-x64@1.18.34"
_LIMIT_S = 1200
_SWITCHES = "PURE DISABLE_PROJECT_CONFIG DISABLE_MODELS_FETCH DISABLE_AUTOUPDATE DISABLE_LSP_DOWNLOAD".split()
_SWITCHES += "DISABLE_DEFAULT_PLUGINS DISABLE_EXTERNAL_SKILLS DISABLE_CLAUDE_CODE".split()


def opencode_story(folder: Path) -> list[Claim]:
    """Return how the two conversations went, on SmolLM2-135M."""
    program = _program(folder)
    work = folder / "work"
    work.mkdir()
    shutil.copy(ROOT / "SKILL.md", work)
    rows = [{"prompt": f"What is the capital of country {n}?", "completion": f"City {n}."} for n in range(64)]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = _conversation(program, folder, begins)
    second = _conversation(program, folder, comes_back)
    run = Run(work / "runs" / "a")
    return [
        Claim("answers_of_the_first", len(first), "==", 4),
        Claim("ended_while_the_run_went_on", int(first[-1]["status"] != "succeeded"), "==", 1),
        Claim(
            "all_answers_are_ok",
            int(all(one["ok"] or one["status"] == "running" for one in [*first, *second])),
            "==",
            1,
        ),
        Claim("run_succeeded", int(run.manifest["status"] == "succeeded"), "==", 1),
        Claim("evaluated", sum(one["command"] == "evaluate" for one in second), "==", 1),
        Claim("exported", int((work / "merged" / "model.safetensors").exists()), "==", 1),
    ]


def _program(folder: Path) -> Path:
    """Return OpenCode's executable: that of FINETUNE_OPENCODE, or the one that the package registry gives."""
    if named := os.environ.get("FINETUNE_OPENCODE"):
        return Path(named)
    if shutil.which("npm") is None:
        raise NotHere("npm is not installed, and FINETUNE_OPENCODE names no executable")
    done = subprocess.run(["npm", "pack", PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHere(f"npm pack {PACKAGE}: {done.stderr.strip()[-300:]}")
    subprocess.run(["tar", "xzf", done.stdout.split()[-1]], cwd=folder, check=True)
    return folder / "package" / "bin" / "opencode"


def _conversation(program: Path, folder: Path, policy: Policy) -> list[dict[str, object]]:
    """Run OpenCode until its model has no further command, and return the product's answers that it saw."""
    with ScriptedModel(policy) as model:
        config = folder / "opencode.json"
        config.write_text(json.dumps(_config(model.url)))
        home = folder / "home"
        home.mkdir(exist_ok=True)
        environment = {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FINETUNE_HOME": str(folder / "finetune-home"),
            "OPENCODE_CONFIG": str(config),
            **{f"OPENCODE_{name}": "1" for name in _SWITCHES},
            **{name: os.environ[name] for name in ("FINETUNE_CACHE", "LANG") if name in os.environ},
        }
        done = subprocess.run(
            [str(program), "run", "--title", "story", "Finetune a model on rows.jsonl as SKILL.md says."],
            cwd=folder / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"opencode left with {done.returncode}: {done.stderr[-2000:]}")
        return answers_in(outputs_of(model.conversation))


def _config(url: str) -> dict[str, object]:
    agent = {
        "mode": "primary",
        "description": "follows skills",
        "prompt": "Work with the bash tool.",
        "tools": {"*": False, "bash": True},
    }
    models = {
        "scripted": {"name": "scripted", "tool_call": True, "limit": {"context": 65536, "output": 2048}}
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": url, "apiKey": "none"},
        "models": models,
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": "local/scripted",
        "small_model": "local/scripted",
        "enabled_providers": ["local"],
        "provider": {"local": provider},
        "default_agent": "tiny",
        "agent": {"title": {"disable": True}, "tiny": agent},
        "permission": {"*": "allow"},
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
        "lsp": False,
        "formatter": False,
    }
