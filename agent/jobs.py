"""The verbs that need the model or all rows, done in a child process: check-data, prepare, evaluate, generate, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.folder import RunFolder, read_document
from agent.manifest import card_facts, flags_of
from agent.plan import make_plan, plan_of
from agent.probing import ask, environment_of, values_of
from agent.processes import Interrupts
from agent.render import Answer
from agent.request import Request
from agent.runner import Context, our_command
from finetune.errors import FinetuneError, Problems


def look_at_data(command: str, request: Request, context: Context) -> Answer:
    """check-data and prepare: read all rows with the model's tokenizer and template, and say what would be learned."""
    plan = quick_plan(request, context)
    answer = _asked(command, plan, context, {"store": command == "prepare"})
    data, ledger = answer["data"], answer["data"]["ledger"]
    dropped = sum(len(places) for places in ledger["dropped"].values())
    reused = ", prepared before" if data.get("reused") else ""
    summary = f"{ledger['read']} rows read, {ledger['trained']} trained, {ledger['held_out']} held out, {dropped} dropped{reused}"
    actions = [
        (
            "plan a run",
            our_command("run", "--method", plan["method"], *flags_of(plan["settings"]), "--dry-run"),
        )
    ]
    return Answer(command, "done", summary, data=data, warnings=_warnings(answer), next_actions=actions)


def evaluate(
    plan: dict[str, Any], weights: dict[str, str | None], run_dir: Path | None, context: Context
) -> Answer:
    """Loss and accuracy on held-out rows, of the base model or of what was trained."""
    answer = _asked("evaluate", plan, context, weights)
    data = answer["data"]
    figures = [f"{name} {data[name]:.4g}" for name in ("loss", "accuracy") if data.get(name) is not None]
    return Answer(
        "evaluate", "done", ", ".join(figures), run_dir=run_dir, data=data, warnings=_warnings(answer)
    )


def generate(
    run: RunFolder, weights: dict[str, str | None], wanted: dict[str, Any], offset: int, context: Context
) -> Answer:
    """Answer prompts with what was trained, or with the base model.

    wanted: prompts, max_new_tokens, temperature. An offset leaves out the prompts before it.
    """
    fields = weights | wanted | {"prompts": wanted["prompts"][offset:]}
    answer = _asked("generate", plan_of(run), context, fields)
    summary = f"{len(answer['data']['completions'])} completions"
    found = _warnings(answer)
    return Answer(
        "generate",
        "done",
        summary,
        run_dir=run.path,
        data=answer["data"],
        warnings=found,
        pages="completions",
        offset=offset,
        total=len(wanted["prompts"]),
    )


def export(
    run: RunFolder, weights: dict[str, str | None], wanted: dict[str, Any], context: Context
) -> Answer:
    """Write a PEFT adapter or a merged model, checked after it is written. wanted: out, kind, dtype."""
    manifest = read_document(run.manifest, "run")
    facts = card_facts(manifest) if manifest else {}
    answer = _asked("export", plan_of(run), context, weights | wanted | {"facts": facts})
    files = answer["data"].pop("files")
    folder = Path(answer["data"]["folder"])
    artifacts = [
        {"kind": wanted["kind"], "path": str(folder / name), "sha256": digest}
        for name, digest in files.items()
    ]
    how = "was there already" if answer["data"]["reused"] else "written"
    summary = f"{wanted['kind']} {how}: {folder}"
    found = _warnings(answer)
    return Answer("export", "done", summary, None, run.path, answer["data"], found, artifacts=artifacts)


def weights_of(run: RunFolder, checkpoint: int | None, is_base: bool) -> dict[str, str | None]:
    """Return where the weights of a run lie, as {adapter, merged}: final ones, those of a checkpoint, or the base model's.

    Raises FinetuneError(no_checkpoint) where they are not there.
    """
    if is_base:
        return {"adapter": None, "merged": None}
    if checkpoint is not None:
        folder = run.path / "checkpoints" / f"step-{checkpoint}"
        if not (folder / "manifest.json").exists():
            raise FinetuneError("no_checkpoint", f"{folder} is no complete checkpoint", checkpoint=checkpoint)
        kind = "adapter" if (folder / "adapter_model.safetensors").exists() else "merged"
        return {"adapter": None, "merged": None, kind: str(folder)}
    if run.adapter.is_dir():
        return {"adapter": str(run.adapter), "merged": None}
    if plan_of(run)["settings"]["tuning"]["value"] == "full" and (run.path / "merged").is_dir():
        return {"adapter": None, "merged": str(run.path / "merged")}
    last = run.last_checkpoint()
    instead = (
        f"; its newest checkpoint is {last.name}: give --checkpoint {last.name.removeprefix('step-')}"
        if last
        else ""
    )
    raise FinetuneError("no_checkpoint", f"{run.path} has no final weights{instead}", run=str(run.path))


def quick_plan(request: Request, context: Context) -> dict[str, Any]:
    """Return the quick plan of a request, or raise Problems with all that is wrong with it."""
    plan, found = make_plan(request, context.machine, context.cwd)
    if found.problems:
        raise Problems(found.problems)
    return plan


def _asked(task: str, plan: dict[str, Any], context: Context, fields: dict[str, Any]) -> dict[str, Any]:
    with Interrupts() as interrupts:
        return ask(
            task,
            environment_of(plan, context.machine),
            interrupts,
            method=plan["method"],
            settings=values_of(plan),
            uses_tools=bool((plan["report"] or {}).get("uses_tools")),
            **fields,
        )


def _warnings(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["code"], item["text"]) for item in answer["warnings"]]
