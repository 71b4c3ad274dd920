"""What a plan and a result say in one line, and which part of a plan an answer has room for."""

from __future__ import annotations

from typing import Any

# Of the answer to a dry run; the plan's file has them.
_HIDDEN = ("warnings", "identity", "schema_version", "created")
_FINE_PRINT = ("disk_parts", "tokens_method", "memory_method", "engine_memory_parts")  # of the estimates
# What of the account of the rows is shown; `finetune check-data` shows all of it.
_REPORTED = ("ledger", "reused", "form", "num_tokens", "num_supervised", "lengths", "selfcheck")


def plan_line(plan: dict[str, Any]) -> str:
    """Return the method, the model and the work of a plan."""
    numbers, parallel = plan["arithmetic"], plan["parallel"]
    batch = f"{numbers['global_batch_size']} rows"
    if "group_size" in numbers:
        prompts, size = numbers["prompts_per_batch"], numbers["group_size"]
        batch = f"{numbers['global_batch_size']} rollouts ({prompts} prompts x {size})"
    work = f"{numbers['steps']} steps of {batch} on {parallel['num_gpus']} x {parallel['device']}"
    return f"{plan['method']} of {plan['model']['id']}: {work}{_taking(plan)}{_sampled_by(plan)}"


def _taking(plan: dict[str, Any]) -> str:
    """Return how long it will take, where that is known."""
    seconds = plan["estimates"].get("seconds")
    if seconds is None:
        return ""
    return (
        f", about {seconds / 3600:.1f} h" if seconds >= 3600 else f", about {max(1, round(seconds / 60))} min"
    )


def _sampled_by(plan: dict[str, Any]) -> str:
    """Return what samples, where anything does."""
    engines = plan["parallel"].get("engines", [])
    if engines:
        where = "running ones" if engines[0]["url"] else _places(plan["parallel"])
        return f", sampled by {len(engines)} x vllm ({where})"
    settings = plan["settings"]
    if "replay" in settings and settings["replay"]["value"]:
        return ", on recorded rollouts"
    return ", sampled by transformers" if "engine" in settings else ""


def _places(parallel: dict[str, Any]) -> str:
    if parallel["device"] == "cpu":
        return "cpu"
    names = [name for engine in parallel["engines"] for name in engine["devices"]]
    shared = {item["id"] for item in parallel["devices"]} & set(names)
    return ("sharing " if shared else "") + "devices " + ",".join(names)


def shown_plan(plan: dict[str, Any], advanced: set[str]) -> dict[str, Any]:
    """Return a plan as an answer shows it.

    settings holds what somebody or something decided, with its source; defaults the values of the others. Left to the
    plan's file are advanced settings that nobody touched, digests of data files, parts of the estimates, and most of the
    account of the rows.
    """
    settings, untouched = {}, {}
    for name, setting in plan["settings"].items():
        if setting["source"] != "default":
            settings[name] = setting
        elif name not in advanced:
            untouched[name] = setting["value"]
    shown = {name: value for name, value in plan.items() if name not in _HIDDEN and value is not None}
    shown |= {"settings": settings, "defaults": untouched}
    if costs := plan.get("estimates"):
        shown["estimates"] = {name: value for name, value in costs.items() if name not in _FINE_PRINT}
    if data := plan.get("data"):
        shown["data"] = {kind: [_without_digest(file) for file in files] for kind, files in data.items()}
    if report := plan.get("report"):
        shown["report"] = {name: report[name] for name in _REPORTED if name in report}
    return shown


def _without_digest(file: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in file.items() if name != "sha256"}


def result_line(result: dict[str, Any], reward: dict[str, Any] | None = None) -> str:
    """Return steps, rewards, losses, accuracies and the lift of a finished run. reward: its first and its last mean."""
    parts = [f"{result['steps']} steps"]
    if reward:
        parts.append(f"reward {reward['first']:.3g} -> {reward['last']:.3g}")
    before, after, lift = result["eval_before"], result["eval_after"], result["lift"]
    for name in ("loss", "accuracy"):
        if before and after and before.get(name) is not None and after.get(name) is not None:
            parts.append(f"held-out {name} {before[name]:.4g} -> {after[name]:.4g}")
    if lift and lift.get("of") == "accuracy" and lift.get("low") is not None:
        parts.append(f"lift {lift['mean']:+.3g} ({lift['low']:+.3g} to {lift['high']:+.3g})")
    return ", ".join(parts)
