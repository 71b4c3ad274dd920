"""The domain of prompts: a question in any of the usual columns, and whatever columns a verifier reads."""

from __future__ import annotations

from finetune.config import GrpoConfig, RunConfig
from finetune.data.conversation import Conversation
from finetune.domains.base import Domain, mean_metrics, split_by_prompt
from finetune.domains.registry import load_domain
from finetune.domains.text import as_text, tools_of, turns_of
from finetune.errors import FinetuneError
from finetune.records import Row

ASKING = ("prompt", "question", "messages", "instruction")


def domain_of(config: RunConfig) -> Domain:
    """Return the domain that a run means: for grpo rows need no answer, unless --domain names one that reads answers."""
    if not isinstance(config, GrpoConfig) or config.domain not in ("auto", "text"):
        return load_domain(config.domain, config.data, config.data_format)
    own = load_domain("auto", config.data)
    if own.score is not None:  # builtin rows bring their verifier
        return own
    return Domain("prompts", conversation, split_by_prompt(conversation), None, mean_metrics, "prompts:1")


def conversation(row: Row) -> Conversation:
    """Return the turns before the answer: of `messages` or a list of turns without a last assistant turn, or a user's text.

    Raises unknown_columns for a row that asks nothing, bad_row for an empty prompt.
    """
    values = row.values
    name = next((name for name in ASKING if values.get(name) not in (None, [])), None)
    if name is None:
        text = (
            f"a row of grpo needs one of {', '.join(ASKING)}; its columns are {', '.join(values) or 'none'}"
        )
        raise FinetuneError("unknown_columns", text, columns_found=list(values))
    value = values[name]
    if name == "messages" or isinstance(value, list):
        turns = turns_of(value, name)
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if not turns:
            raise FinetuneError("bad_row", f"{name} has no turn to answer")
        return Conversation(turns, tools_of(values.get("tools")))
    asked = as_text(value, name)
    if not asked.strip():
        raise FinetuneError("bad_row", f"{name} is empty")
    return Conversation([{"role": "user", "content": asked}], tools_of(values.get("tools")))
