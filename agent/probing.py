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
from agent.hints import diagnosed
from agent.plan import batch_arithmetic, config_of, finished, launch_environment
from agent.preflight import Findings
from agent.processes import Interrupts, kill_session, start_child
from agent.system import Machine
from finetune.errors import EXIT_CODES, FinetuneError, Problems
from finetune.methods import method_named
from finetune.records import to_json

_POLL_S = 0.05
_LOG_TAIL = 2000


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
        return plan | {"level": "full"}, found
    data = answer["data"]
    config = config_of(plan, method_named(plan["method"]).config)
    # Counting again replaces what the quick plan guessed, and so do the warnings that follow from it.
    found.warnings = [item for item in found.warnings if item[0] not in ("few_steps", "no_eval_rows")]
    found.warnings += [(item["code"], item["text"]) for item in answer["warnings"]]
    arithmetic = batch_arithmetic(config, data["num_rows"], data["num_eval_rows"], found)
    needed = (data.get("memory") or {}).get("forecast_bytes_per_rank")
    preflight.check_memory(
        needed, config.device, config.num_gpus, chosen_devices(plan, machine), machine, found
    )
    return finished(
        plan
        | {
            "level": "full",
            "model": (data.get("model") or {}) | plan["model"],
            "arithmetic": arithmetic | {"steps": data.get("steps", arithmetic["steps"])},
            "estimates": plan["estimates"]
            | {"memory_bytes_per_rank": needed, "memory_parts": (data.get("memory") or {}).get("parts")},
            "prepared": data["prepared"],
            "report": {"ledger": data["ledger"], "reused": data["reused"], **data["report"]},
        },
        found,
    ), found
