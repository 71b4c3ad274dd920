"""Work that needs the model or all rows, for a parent that imports neither: one request in, one answer out, both files.

    python -m finetune.probe REQUEST.json ANSWER.json

The request names a task and the settings; the answer is {"ok", "errors", "warnings", "data"}. All problems that a task
finds are in one answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from finetune.config import GrpoConfig, RunConfig
from finetune.data.chat import ChatFormat
from finetune.data.prepare import (
    Prepared,
    RowSets,
    load_prepared,
    prepare,
    prepared_key,
    read_row_sets,
    store_prepared,
)
from finetune.data.store import prepared_folder
from finetune.domains.checking import SelfCheck
from finetune.errors import FinetuneError, Problems, boundary
from finetune.knobs import build
from finetune.methods import method_named
from finetune.model.builtin import load_model, load_tokenizer, model_problems, model_warnings
from finetune.model.export import ExportRequest, export_adapter, merge_adapter
from finetune.model.footprint import engine_forecast, forecast
from finetune.model.policy import DTYPES, Policy, build_policy, check_head
from finetune.model.source import Source, model_digest, model_facts, resolve_source, target_problems
from finetune.parallel.world import World
from finetune.records import jsonable, to_json, write_atomically
from finetune.rollout.engine import Sampling
from finetune.rollout.local import generate
from finetune.rules import steps_of
from finetune.train.grpo_checks import check_agents, check_verifiers
from finetune.train.held_out import HeldOut, evaluate_held_out
from finetune.train.workload import largest_workload


@dataclass(frozen=True)
class Request:
    """One task: its settings as a config, and the fields that only this task has."""

    task: str
    method: str
    config: RunConfig
    fields: dict[str, Any]

    @property
    def source(self) -> Source:
        config = self.config
        return resolve_source(config.model, config.revision, config.trust_remote_code, download=True)


Warnings = list[tuple[str, str]]
Answer = tuple[dict[str, Any], Warnings]


def check_run(request: Request) -> Answer:
    """Do the full checks of a plan and prepare its data; with "store" false nothing is left on disk."""
    config, source = request.config, request.source
    tokenizer = load_tokenizer(source)
    facts = model_facts(source)
    found = _Found(target_problems(source, config.lora_targets) if config.tuning == "lora" else [])
    with found.collecting():
        policy = build_policy(replace(config, gradient_checkpointing=False), source)
        found.problems += model_problems(tokenizer, policy.causal_model.config)
        check_head(policy)
    with found.collecting():
        prepared, folder, reused = _prepared(request, source, tokenizer)
        checked = _checked_rewards(config, prepared, tokenizer)
    if found.problems:
        raise Problems(found.problems)
    warnings = prepared.warnings + model_warnings(tokenizer, prepared.report["stop_token_ids"])
    if reused:
        warnings.append(("prepared_reused", f"the rows were prepared before from the same content: {folder}"))
    if checked is not None and checked.unchecked:
        text = f"no right answer is known to check {', '.join(checked.unchecked)} with: only the form of its values was"
        warnings.append(("verifier_not_checked", text))
    work = largest_workload(config, prepared, source)
    parts = forecast(source, config, work)
    return {
        "prepared": str(folder) if folder else None,
        "reused": reused,
        "ledger": asdict(prepared.ledger),
        "report": prepared.report,
        "num_rows": len(prepared.train),
        "num_eval_rows": len(prepared.eval_rows),
        "steps": steps_of(config, len(prepared.train)),
        "model": {
            **asdict(facts),
            "sha256": model_digest(source),
            "revision": source.revision,
            "trained_parameters": work.trainable,
        },
        "verifiers": checked.scores if checked is not None else None,
        "memory": {
            "forecast_bytes_per_rank": sum(parts.values()),
            "parts": parts,
            "engine_parts": _engine_parts(config, source),
        },
    }, warnings


def _checked_rewards(config: RunConfig, prepared: Prepared, tokenizer: Any) -> SelfCheck | None:
    """Check what gives the rewards of grpo; None where agents' tasks do, or nothing."""
    if not isinstance(config, GrpoConfig):
        return None
    if not config.tasks:
        return check_verifiers(config, prepared)
    check_agents(config, tokenizer)
    return None


def _engine_parts(config: RunConfig, source: Source) -> dict[str, int]:
    """Return the parts of the memory of one server that the run starts, if it starts any."""
    if not isinstance(config, GrpoConfig) or config.engine != "vllm" or config.vllm_url or config.replay:
        return {}
    return engine_forecast(source, config, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@dataclass
class _Found:
    """The problems of several checks, of which each goes on to the next."""

    problems: list[FinetuneError]

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except Problems as error:
            self.problems += error.errors
        except FinetuneError as error:
            self.problems.append(error)


def check_data(request: Request) -> Answer:
    """Read and encode all rows, and tell what would be learned."""
    source = request.source
    prepared, folder, reused = _prepared(request, source, load_tokenizer(source))
    data = {
        "prepared": str(folder) if folder else None,
        "reused": reused,
        "ledger": asdict(prepared.ledger),
        "report": prepared.report,
        "num_rows": len(prepared.train),
        "num_eval_rows": len(prepared.eval_rows),
    }
    return data, prepared.warnings


def _prepared(request: Request, source: Source, tokenizer: Any) -> tuple[Prepared, Path | None, bool]:
    """Return the prepared data, their folder (None where nothing is to be left on disk), and whether they were there."""
    facts = model_facts(source)
    row_sets: RowSets = read_row_sets(request.config)
    if not request.fields.get("store"):
        return prepare(row_sets, request.config, tokenizer, facts.vocab_rows, facts.context), None, False
    folder = prepared_folder(prepared_key(row_sets, request.config, tokenizer, facts.context))
    if folder.exists():
        return load_prepared(folder), folder, True
    prepared = prepare(row_sets, request.config, tokenizer, facts.vocab_rows, facts.context)
    store_prepared(prepared, folder)
    return prepared, folder, False


def evaluate(request: Request) -> Answer:
    """Measure a policy on the held-out rows: loss, and accuracy where the domain has a verifier."""
    source = request.source
    prepared, _, _ = _prepared(request, source, load_tokenizer(source))
    if not prepared.eval:
        raise FinetuneError(
            "too_few_rows", "no rows are held out: give --eval-data or a larger --eval-fraction"
        )
    policy = _policy(request, source).to(request.config.device)
    world = World.single(request.config.device)
    held_out = HeldOut(prepared, request.config, source, world, beat=lambda doing: None)
    result = evaluate_held_out(policy, held_out, lambda: policy)
    return {
        name: value for name, value in jsonable(result).items() if name not in ("scores", "row_losses")
    }, []


def _policy(request: Request, source: Source) -> Policy:
    """Return the policy of the request's weights: a trained adapter, whole trained weights, or the model as it came."""
    fields = request.fields
    if fields.get("adapter"):
        return build_policy(
            replace(request.config, init_adapter=fields["adapter"], gradient_checkpointing=False), source
        )
    weights = (
        replace(source, kind="folder", folder=Path(fields["merged"])) if fields.get("merged") else source
    )
    model = load_model(weights, DTYPES[request.config.dtype], request.config.attention)
    return Policy(model, DTYPES[request.config.dtype], is_adapted=False)


def answer_prompts(request: Request) -> Answer:
    """Answer prompts: texts (a user's turn each) or lists of messages."""
    fields, source = request.fields, request.source
    tokenizer = load_tokenizer(source)
    chat = _chat_format(request, tokenizer)
    if problems := chat.problems():
        raise Problems(problems)
    turns = [
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for prompt in fields["prompts"]
    ]
    prompts = [chat.prompt(messages) for messages in turns]
    sampling = Sampling(fields["max_new_tokens"], chat.stop_token_ids, fields["temperature"])
    seeds = [request.config.seed * 1_000_003 + place for place in range(len(prompts))]
    policy = _policy(request, source).to(request.config.device)
    completions = generate(policy.generator, prompts, sampling, seeds)
    return {
        "completions": [
            {
                "text": tokenizer.decode(completion.ids, skip_special_tokens=True),
                "num_tokens": len(completion.ids),
                "stopped": completion.stopped,
            }
            for completion in completions
        ]
    }, []


def _chat_format(request: Request, tokenizer: Any) -> ChatFormat:
    """Return the format of the training: rows with tools may have had another template than rows without."""
    return ChatFormat.from_config(request.config, tokenizer, bool(request.fields.get("uses_tools")))


def export(request: Request) -> Answer:
    """Export trained weights as a PEFT adapter or as a merged model."""
    fields, source = request.fields, request.source
    if not fields.get("adapter"):
        raise FinetuneError(
            "bad_export",
            "there is no adapter to export; with tuning full the run's merged/ folder is the model",
        )
    chat = _chat_format(request, load_tokenizer(source))
    wanted = ExportRequest(
        source,
        Path(fields["adapter"]),
        Path(fields["out"]),
        chat,
        fields.get("facts") or {},
        fields.get("dtype") or "auto",
    )
    done = export_adapter(wanted) if fields["kind"] == "adapter" else merge_adapter(wanted)
    return {"folder": str(done.folder), "files": done.files, "checks": done.checks, "reused": done.reused}, []


TASKS: dict[str, Callable[[Request], Answer]] = {
    "prepare": check_run,
    "check-data": check_data,
    "evaluate": evaluate,
    "generate": answer_prompts,
    "export": export,
}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request and return the answer; whatever goes wrong is in it."""
    try:
        config = build(method_named(asked["method"]).config, asked["settings"])
        if config.threads:
            torch.set_num_threads(config.threads)
        with boundary("preflight_failed", asked["task"]):
            data, warnings = TASKS[asked["task"]](Request(asked["task"], asked["method"], config, asked))
    except (FinetuneError, Problems) as error:
        traceback.print_exc()
        found = error.errors if isinstance(error, Problems) else [error]
        errors = [
            {"code": one.code, "message": one.message, "evidence": jsonable(one.evidence)} for one in found
        ]
        return {"ok": False, "errors": errors, "warnings": [], "data": {}}
    return {
        "ok": True,
        "errors": [],
        "warnings": [{"code": code, "text": text} for code, text in warnings],
        "data": data,
    }


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m finetune.probe REQUEST.json ANSWER.json")
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    write_atomically(Path(sys.argv[2]), to_json(answer(asked)))


if __name__ == "__main__":
    main()
