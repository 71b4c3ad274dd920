"""Which methods there are: each with its settings and the dotted name of the function that trains it."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config import GrpoConfig, RunConfig, SftConfig
from finetune.errors import FinetuneError
from finetune.knobs import unknown_name


@dataclass(frozen=True)
class Method:
    """A way to train; `train` is a name and no function, so that listing methods never imports torch."""

    name: str
    config: type[RunConfig]
    train: str
    summary: str


METHODS = {
    "sft": Method(
        "sft",
        SftConfig,
        "finetune.train.sft:train",
        "supervised finetuning on conversations or prompt-completion pairs",
    ),
    "grpo": Method(
        "grpo",
        GrpoConfig,
        "finetune.train.grpo:train",
        "reinforcement learning on completions that the policy samples itself, scored by a verifier",
    ),
}


def method_named(name: str) -> Method:
    """Return the method, or raise FinetuneError(bad_value) naming those that exist."""
    if name not in METHODS:
        raise FinetuneError(
            "bad_value",
            f"method {unknown_name(name, list(METHODS))}; there are: {', '.join(METHODS)}",
            setting="method",
        )
    return METHODS[name]
