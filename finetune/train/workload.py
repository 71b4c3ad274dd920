"""The most that a rank does at once, found in the prepared rows before anything is loaded: what the forecast of memory asks.

Rule: it is read off the very functions that training and evaluation group their rows by.
"""

from __future__ import annotations

from finetune.config import GrpoConfig, RunConfig
from finetune.data.batches import Budget, input_length, rank_microbatches, step_rows
from finetune.data.prepare import Prepared
from finetune.domains.prompts import domain_of
from finetune.model.footprint import Answering, Workload, num_trainable
from finetune.model.source import Source
from finetune.rollout.local import BATCH_TOKENS
from finetune.rules import forward_tokens, global_batch, rows_per_forward, steps_of
from finetune.train.evaluate import questions
from finetune.train.grpo_checks import largest_forward

SAMPLED_STEPS = 50  # steps of which the largest forward is sought


def largest_workload(config: RunConfig, prepared: Prepared, source: Source) -> Workload:
    """Return the largest forward that any rank makes in the first steps, and the most that it answers at once."""
    steps = min(SAMPLED_STEPS, steps_of(config, len(prepared.train)))
    if isinstance(config, GrpoConfig):
        most, longest = largest_forward(config, prepared, steps)
    else:
        most, longest = _largest_microbatch(config, prepared, steps)
    sharded = config.num_gpus > 1 and config.parallel == "fsdp2"
    trainable = num_trainable(config, source)
    return Workload(most, longest, config.num_gpus, sharded, trainable, _answering(config, prepared))


def _largest_microbatch(config: RunConfig, prepared: Prepared, steps: int) -> tuple[int, int]:
    budget = Budget(forward_tokens(config), rows_per_forward(config), getattr(config, "packing", False))
    examples, most, longest = prepared.train, 0, 0
    for step in range(1, steps + 1):
        lengths = {
            row: input_length(examples[row])
            for row in step_rows(config.seed, step, len(examples), global_batch(config))
        }
        for microbatch in (
            microbatch for rank in rank_microbatches(lengths, budget, config.num_gpus) for microbatch in rank
        ):
            widths = [sum(lengths[row] for row in sequence) for sequence in microbatch.sequences]
            if max(widths) * len(widths) > most:
                most, longest = max(widths) * len(widths), max(widths)
    return most, longest


def _answering(config: RunConfig, prepared: Prepared) -> Answering | None:
    """Return the first batch that this process answers, its longest; None where engines of their own answer, or nobody."""
    if isinstance(config, GrpoConfig):
        return _sampling(config, prepared) if config.engine == "local" and not config.replay else None
    if not prepared.eval or not domain_of(config).has_verifier:
        return None
    prompts, sampling = questions(prepared.eval)
    own = -(-len({example.row for example in prepared.eval}) // config.num_gpus)
    return _batch([len(prompt) for prompt in prompts], own, sampling.max_new_tokens, is_drawn=False)


def _sampling(config: GrpoConfig, prepared: Prepared) -> Answering:
    assert config.max_completion_tokens is not None, "the plan decides it"
    lengths = [len(example.input_ids) for example in prepared.train]
    rows = global_batch(config)
    if config.tasks:  # conversations that may fill the context, of the agents that work at once
        lengths = [(config.max_length or 0) - config.max_completion_tokens]
        rows = min(rows, config.agents)
    return _batch(lengths, rows, config.max_completion_tokens, is_drawn=True)


def _batch(lengths: list[int], rows: int, new: int, is_drawn: bool) -> Answering:
    longest = max(lengths)
    return Answering(max(1, min(rows, BATCH_TOKENS // (longest + new))), longest, new, is_drawn)
