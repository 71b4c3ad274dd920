"""run.json: what a run was, how to do it again, and what came of it; one writer, the runner."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from agent.environment import MASK, scrub
from agent.folder import SCHEMA_VERSION, RunFolder
from agent.hints import hint
from agent.system import SOURCE_ROOT, package_versions, source_state
from finetune.errors import FinetuneError

_CHOSEN = ("user", "file")  # what a replayed command must say again; the rest follows
_MOST_TRACEBACK = 4000
_PLACES = "model data eval_data out profile init_adapter domain chat_template verifier replay vllm_python vllm_url".split()
_RESULT = ("steps", "train_loss", "eval_before", "eval_after", "lift")


def new_manifest(plan: dict[str, Any], run_id: str, argv: list[str], cwd: Path, host: str) -> dict[str, Any]:
    """Return the manifest of a run that has not started."""
    source = source_state()
    replay = replay_command(plan, cwd)
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "plan_id": plan["plan_id"],
        "method": plan["method"],
        "status": "queued",
        "created": time.time(),
        "started": None,
        "ended": None,
        "duration_s": None,
        "host": host,
        "pid": os.getpid(),
        "argv": argv,
        "cmd_replay": replay,
        "ok_to_replay": source["commit"] is not None
        and source["dirty"] is False
        and MASK not in scrub(replay),
        "source": source,
        "packages": package_versions(),
        "resumed_from": None,
        "outputs": [],
        "result": None,
        "facts": {},
        "peak_memory_bytes_per_rank": None,
        "error": None,
        "exit_code": None,
        "attempts": [],
    } | _of_plan(plan)


def _of_plan(plan: dict[str, Any]) -> dict[str, Any]:
    ledger = (plan["report"] or {}).get("ledger")
    return {
        "plan_id": plan["plan_id"],
        "settings": plan["settings"],
        "model": plan["model"],
        "data": plan["data"] | {"ledger": ledger},
        "parallel": plan["parallel"],
        "warnings": plan["warnings"],
    }


def begun(manifest: dict[str, Any], plan: dict[str, Any], host: str) -> dict[str, Any]:
    """Return the manifest at the start of an attempt (the first one, or a resume)."""
    now = time.time()
    attempt = {
        "started": now,
        "ended": None,
        "host": host,
        "pid": os.getpid(),
        "status": "running",
        "exit_code": None,
        "resumed_from": None,
        "num_gpus": plan["parallel"]["num_gpus"],
        "device": plan["parallel"]["device"],
        "source": source_state(),
        "packages": package_versions(),
    }
    fresh = {
        "status": "running",
        "host": host,
        "pid": os.getpid(),
        "started": manifest["started"] or now,
        "ended": None,
    }
    # All paths of the command are absolute; the folder above the run is there as long as the run is.
    replay = replay_command(plan, Path(plan["settings"]["out"]["value"]).parent)
    unknown = {"error": None, "exit_code": None, "cmd_replay": replay}
    return manifest | _of_plan(plan) | fresh | unknown | {"attempts": [*manifest["attempts"], attempt]}


def changes_since_last_attempt(manifest: dict[str, Any]) -> list[str]:
    """Return what differs between the last two attempts, in words: ranks, device, code, packages."""
    if len(manifest["attempts"]) < 2:
        return []
    old, new = manifest["attempts"][-2:]
    changed = [
        f"{name} was {old[name]}, is {new[name]}" for name in ("num_gpus", "device") if old[name] != new[name]
    ]
    if old["source"] != new["source"]:
        changed.append(
            f"source was {old['source']['commit']}, is {new['source']['commit']} (dirty: {new['source']['dirty']})"
        )
    names = sorted(old["packages"].keys() | new["packages"].keys())
    before, after = old["packages"], new["packages"]
    return changed + [
        f"{name} was {before.get(name)}, is {after.get(name)}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def ended(
    manifest: dict[str, Any],
    status: str,
    resumed_from: int | None,
    result: dict[str, Any] | None,
    error: FinetuneError | None,
    folder: RunFolder,
) -> dict[str, Any]:
    """Return the manifest after an attempt: what came of it, and what it left."""
    now = time.time()
    exit_code = error.exit_code if error else 0
    last = manifest["attempts"][-1] | {
        "ended": now,
        "status": status,
        "exit_code": exit_code,
        "resumed_from": resumed_from,
    }
    facts = (result or {}).get("facts", {})
    measured = {"kind": _KINDS.get(facts.get("parallel"), manifest["parallel"]["kind"])}
    measured |= {
        name: facts[name]
        for name in ("world_size", "local_parameter_bytes", "parameter_bytes", "num_dtensors")
        if name in facts
    }
    return manifest | {
        "status": status,
        "ended": now,
        "duration_s": round(now - last["started"], 3),
        "resumed_from": resumed_from,
        "parallel": manifest["parallel"] | measured,
        "peak_memory_bytes_per_rank": facts.get("peak_memory_bytes"),
        "result": None if result is None else {name: result.get(name) for name in _RESULT},
        "facts": facts,
        "outputs": outputs(folder) if status == "succeeded" else [],
        "error": None if error is None or error.code == "stopped" else _error_section(error),
        "exit_code": exit_code,
        "attempts": [*manifest["attempts"][:-1], last],
    }


_KINDS = {
    "none": "single",
    "single": "single",
    "ddp": "ddp",
    "fsdp2": "fsdp2",
}  # the engine's words -> the plan's


def _error_section(error: FinetuneError) -> dict[str, Any]:
    evidence = dict(error.evidence)
    traceback = evidence.pop("traceback", None)
    text = "\n".join(traceback) if isinstance(traceback, list) else traceback
    hint_id = evidence.pop("hint_id", hint(error.code).id)
    return {
        "code": error.code,
        "hint_id": hint_id,
        "message": error.message,
        "rank": evidence.pop("rank", None),
        "traceback": text and text[-_MOST_TRACEBACK:],
        "evidence": evidence,
    }


def outputs(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the files that a finished run leaves, with their digests."""
    found = []
    for kind in ("adapter", "merged"):
        for path in sorted((folder.path / kind).glob("*")):
            if path.is_file():
                found.append({"kind": kind, "path": str(path), "sha256": file_digest(path)})
    return found


def card_facts(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a model card tells of a run, by heading: only what the manifest knows, and no paths of this machine."""
    result = manifest["result"] or {}
    files = [
        f"{Path(file['path']).name} (sha256 {file['sha256']})" for file in manifest["data"].get("files", [])
    ]
    ledger = manifest["data"].get("ledger") or {}
    training = {
        "method": manifest["method"],
        "run": manifest["run_id"],
        "data": ", ".join(files),
        "rows trained": ledger.get("trained"),
        "steps": result.get("steps"),
        "training loss": result.get("train_loss"),
    }
    chosen = {name: item["value"] for name, item in manifest["settings"].items() if item["source"] in _CHOSEN}
    settings = {name: value for name, value in chosen.items() if name not in _PLACES}
    figures = {
        f"{name} {when}": (result.get(f"eval_{when}") or {}).get(name)
        for name in ("loss", "accuracy", "num_rows")
        for when in ("before", "after")
    }
    lift = result.get("lift") or {}
    if lift.get("low") is not None:
        figures[f"lift of {lift['of']}"] = f"{lift['mean']:.4g} ({lift['low']:.4g} to {lift['high']:.4g})"
    known = {name: value for name, value in figures.items() if value is not None}
    return {"Training": training, "Settings": settings, "Held-out rows": known}


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replay_command(plan: dict[str, Any], cwd: Path) -> str:
    """Return a shell command that does the run again when it is pasted: working directory, environment, every choice."""
    argv = [sys.executable, "-m", "agent.cli", "run", "--method", plan["method"], *flags_of(plan["settings"])]
    environment = plan["launch"]["environment"] | {
        "PYTHONPATH": plan["launch"]["environment"].get("PYTHONPATH", str(SOURCE_ROOT))
    }
    assignments = [f"{name}={value}" for name, value in sorted(environment.items())]
    return f"cd {shlex.quote(str(cwd))} && {shlex.join(['env', *assignments, *argv])}"


def flags_of(settings: dict[str, dict[str, Any]], chosen: tuple[str, ...] = _CHOSEN) -> list[str]:
    """Return the settings that were chosen as command-line flags."""
    flags: list[str] = []
    for name, setting in settings.items():
        if setting["source"] not in chosen:
            continue
        value, flag = setting["value"], name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *value]
        else:
            flags += [f"--{flag}={'none' if value is None else value}"]
    return flags
