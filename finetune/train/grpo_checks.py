"""What is checked of a grpo run before an engine is started: that the verifier can tell answers apart, and the memory."""

from __future__ import annotations

from finetune.config import GrpoConfig
from finetune.data.batches import Budget, rank_microbatches
from finetune.data.prepare import Prepared
from finetune.domains.checking import SelfCheck, self_check
from finetune.domains.prompts import domain_of
from finetune.domains.verifiers import open_verifiers
from finetune.rules import forward_tokens, rows_per_forward
from finetune.train.rollouts import answer_to, batch_rows


def check_verifiers(config: GrpoConfig, prepared: Prepared) -> SelfCheck:
    """Score answers of known worth to the first rows.

    Raises Problems or FinetuneError: bad_verifier, blind_verifier, missing_package, no_sandbox, file_missing, bad_value.
    """
    with open_verifiers(
        config.verifier, config.verifier_args, domain_of(config), config.verifier_timeout, workers=1
    ) as verifiers:
        return self_check(verifiers, [answer_to(row) for row in prepared.train_rows[:8]])


def largest_forward(config: GrpoConfig, prepared: Prepared, steps: int) -> tuple[int, int]:
    """Return tokens of the largest forward of the first steps, padding included, and of its longest row.

    Every completion is taken to reach its limit.
    """
    assert config.max_completion_tokens is not None, "the plan decides it"
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
