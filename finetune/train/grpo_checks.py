"""What is checked of a grpo run before an engine is started: that the verifier can tell answers apart, and the memory."""

from __future__ import annotations

from typing import Any

from finetune.boxes.bubblewrap import open_box
from finetune.config import GrpoConfig
from finetune.data.batches import Budget, rank_microbatches
from finetune.data.prepare import Prepared
from finetune.domains.checking import SelfCheck, self_check
from finetune.domains.prompts import domain_of
from finetune.domains.tasks import load_tasks, require_apart
from finetune.domains.verifiers import open_verifiers
from finetune.rollout.harness import open_harness
from finetune.rules import forward_tokens, rows_per_forward
from finetune.train.agents import harness_settings, tool_chat
from finetune.train.rollouts import batch_rows
from finetune.train.sampling import answer_to


def check_verifiers(config: GrpoConfig, prepared: Prepared) -> SelfCheck:
    """Score answers of known worth to the first rows.

    Raises Problems or FinetuneError: bad_verifier, blind_verifier, missing_package, no_sandbox, file_missing, bad_value.
    """
    with open_verifiers(
        config.verifier, config.verifier_args, domain_of(config), config.verifier_timeout, workers=1
    ) as verifiers:
        return self_check(verifiers, [answer_to(row) for row in prepared.train_rows[:8]])


def check_agents(config: GrpoConfig, tokenizer: Any) -> None:
    """Check what agents need before an engine is started: tasks, boxes, the program of the harness, a template for tools.

    Raises Problems or FinetuneError: bad_task, task_overlap, no_sandbox, missing_package, file_missing, and what the
    template raises.
    """
    tool_chat(config, tokenizer)
    trained = [task for spec in config.tasks for task in load_tasks(spec)]
    require_apart(trained, [task for spec in config.eval_tasks for task in load_tasks(spec)])
    open_box(config.box)
    open_harness(config.harness, harness_settings(config)).check()


def largest_forward(config: GrpoConfig, prepared: Prepared, steps: int) -> tuple[int, int]:
    """Return tokens of the largest forward of the first steps, padding included, and of its longest row.

    Every completion is taken to reach its limit.
    """
    assert config.max_completion_tokens is not None, "the plan decides it"
    assert config.max_length is not None, "the plan decides it"
    if config.tasks:  # a conversation may fill the context
        return max(config.max_length, forward_tokens(config)), config.max_length
    budget = Budget(forward_tokens(config), rows_per_forward(config))
    most = longest = 0
    for step in range(1, steps + 1, config.passes):
        rows = [
            row for row in batch_rows(config, step, len(prepared.train)) for _ in range(config.group_size)
        ]
        lengths = {
            place: len(prepared.train[row].input_ids) + config.max_completion_tokens
            for place, row in enumerate(rows)
        }
        for microbatch in (
            one for rank in rank_microbatches(lengths, budget, config.num_gpus) for one in rank
        ):
            widest = max(lengths[row] for row in microbatch.rows)
            if widest * len(microbatch.sequences) > most:
                most, longest = widest * len(microbatch.sequences), widest
    return most, longest
