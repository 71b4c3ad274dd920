"""Work that needs torch, done in a child process: the full checks of a plan, evaluation, generation, export.

The child gets a request file and leaves an answer file; a child that dies without one is a failed preflight with its log.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent import preflight
from agent.checks import checks_after
from agent.estimates import Scene, estimated, memory_estimate
from agent.hints import diagnosed
from agent.plan import batch_arithmetic, config_of, finished, home, launch_environment
from agent.preflight import Findings
from agent.processes import Interrupts, kill_session, start_child
from agent.system import Machine
from finetune.errors import EXIT_CODES, FinetuneError, Problems
from finetune.methods import method_named
from finetune.records import to_json

_POLL_S = 0.05
_LOG_TAIL = 2000
_GUESSED = (
    "few_steps",
    "no_eval_rows",
    "low_disk",
    "low_memory",
)  # warnings of a quick plan about what it guessed


def ask(task: str, environment: Mapping[str, str], interrupts: Interrupts, **fields: Any) -> dict[str, Any]:
    """Have a child carry out one task and return its answer: {"data", "warnings"}.

    Raises Problems with all that the child found, FinetuneError(preflight_failed) where it died, FinetuneError(stopped)
    where we were told to stop meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-") as name:
        folder = Path(name)
        request, answer, log = folder / "request.json", folder / "answer.json", folder / "probe.log"
        request.write_text(to_json({"task": task, **fields}), encoding="utf-8")
        with open(log, "wb") as stream:
            child = start_child(
                [sys.executable, "-m", "finetune.probe", str(request), str(answer)], environment, stream
            )
        while child.poll() is None:
            if interrupts.received:
                kill_session(child.pid)
                child.wait()
                raise FinetuneError(
                    "stopped", f"{task} was stopped by {interrupts.received.name} before training began"
                )
            time.sleep(_POLL_S)
        if not answer.exists():
            tail = log.read_text(errors="replace")[-_LOG_TAIL:]
            text = f"{task} ended with exit code {child.returncode} and no answer"
            raise diagnosed(FinetuneError("preflight_failed", text, log_tail=tail), folder)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if not found["ok"]:
        raise Problems([_error(item) for item in found["errors"]])
    return found


def _error(item: dict[str, Any]) -> FinetuneError:
    code = item["code"] if item["code"] in EXIT_CODES else "preflight_failed"
    return FinetuneError(code, item["message"], **item.get("evidence") or {})


def values_of(plan: dict[str, Any]) -> dict[str, Any]:
    return {name: setting["value"] for name, setting in plan["settings"].items()}


def environment_of(plan: dict[str, Any], machine: Machine) -> dict[str, str]:
    """Return the environment of a child that works for this plan: the one that training gets."""
    config = config_of(plan, method_named(plan["method"]).config)
    return launch_environment(config, chosen_devices(plan, machine), machine.environ)


def chosen_devices(plan: dict[str, Any], machine: Machine) -> list[Any]:
    wanted = {item["id"] for item in plan["parallel"]["devices"]}
    return [device for device in machine.devices if device.id in wanted]


def full_checks(
    plan: dict[str, Any], machine: Machine, interrupts: Interrupts, store: bool
) -> tuple[dict[str, Any], Findings]:
    """Return the plan with all that reading the rows and the model tells; the findings hold every problem.

    With `store` false nothing is left on disk.
    """
    found = Findings([], [(item["hint_id"], item["text"]) for item in plan["warnings"]])
    environment = environment_of(plan, machine) | ({} if store else {"PYTHONDONTWRITEBYTECODE": "1"})
    try:
        answer = ask(
            "prepare", environment, interrupts, method=plan["method"], settings=values_of(plan), store=store
        )
    except (FinetuneError, Problems) as error:
        found.add(error)
        return plan | {"level": "full", "checks": checks_after(plan, found, None)}, found
    data = answer["data"]
    # Counting again replaces what the quick plan guessed, and so do the warnings that follow from it.
    found.warnings = [item for item in found.warnings if item[0] not in _GUESSED]
    found.warnings += [(item["code"], item["text"]) for item in answer["warnings"]]
    return finished(_with_counted(plan, data, machine, found), found), found


def _with_counted(
    plan: dict[str, Any], data: dict[str, Any], machine: Machine, found: Findings
) -> dict[str, Any]:
    """Return the plan with what the child counted: rows, tokens, memory; problems with the memory are found here."""
    config = config_of(plan, method_named(plan["method"]).config)
    arithmetic = batch_arithmetic(config, data["num_rows"], data["num_eval_rows"], found)
    report = {"ledger": data["ledger"], "reused": data["reused"], **data["report"]}
    # Of a Hub model whose weights were not here the quick plan knew no sizes.
    sizes = {name: value for name, value in (data.get("model") or {}).items() if not plan["model"].get(name)}
    counted = plan | {
        "level": "full",
        "model": plan["model"] | sizes,
        "arithmetic": arithmetic | {"steps": data.get("steps", arithmetic["steps"])},
        "prepared": data["prepared"],
        "report": report,
    }
    scene = Scene(config, machine, chosen_devices(plan, machine), home(machine.environ))
    costs = plan["estimates"] | estimated(counted, scene, report)
    if memory := data.get("memory"):
        engine_parts = memory.get("engine_parts") or plan["estimates"].get("engine_memory_parts") or {}
        rank_bytes = memory["forecast_bytes_per_rank"]
        costs |= memory_estimate(counted, scene, memory["parts"], engine_parts, rank_bytes)
        preflight.check_memory(costs["verdicts"], True, found)
    if costs["disk_bytes"] is not None:
        costs["free_disk_bytes"] = preflight.check_disk(Path(config.out), costs["disk_bytes"], found)
    counted["estimates"] = costs
    return counted | {"checks": checks_after(counted, found, data)}
