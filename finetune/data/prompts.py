"""Rows -> the prompts that a policy answers in training: ids up to where the answer begins, and nothing that is learned."""

from __future__ import annotations

from finetune.config import RunConfig
from finetune.data.account import Side
from finetune.data.chat import ChatFormat
from finetune.data.conversation import Conversation, Encoded
from finetune.data.preparation import BLOCK, Preparation, shortened
from finetune.domains.base import Domain
from finetune.errors import FinetuneError
from finetune.records import Example, Row


class PromptPreparation(Preparation):
    """The preparation of prompts; its length limit is what completions leave of --max-length."""

    def __init__(self, config: RunConfig, domain: Domain, max_length: int, has_template: bool) -> None:
        super().__init__(config, domain, max_length)
        self.has_template = has_template

    def conversation(self, row: Row) -> Conversation:
        """Return the turns of a prompt; for a model without a chat template a single question as the raw text that it is."""
        asked = super().conversation(row)
        turns = [turn for turn in asked.messages if turn["role"] != "assistant"]
        if self.has_template or len(turns) != 1 or asked.tools:
            return asked
        return Conversation(prompt=turns[0]["content"], completion="")

    def encode(self, side: Side, encoder: ChatFormat) -> None:
        for start in range(0, len(side.said), BLOCK):
            block = side.said[start : start + BLOCK]
            for said, ids in zip(block, encoder.prompts_of([one.conversation for one in block]), strict=True):
                if fitted := self._fitted_prompt(said.row, ids, side, encoder):
                    side.examples.append(
                        [Example(fitted, [0.0] * len(fitted), said.place, said.row.file, said.row.line)]
                    )
                    side.kept.append(said)

    def _fitted_prompt(self, row: Row, ids: list[int], side: Side, encoder: ChatFormat) -> list[int] | None:
        if not ids:
            self.reject(row, FinetuneError("bad_row", "the prompt has no token"), side.ledger)
            return None
        if len(ids) <= self.max_length:
            return ids
        if self.config.on_long == "drop":
            side.ledger.drop("too_long", row)
            return None
        cut = None
        if self.config.on_long == "truncate-prompt":
            # The last token stands for the answer that begins there: all before it may be cut.
            marked = Encoded(ids, [0.0] * (len(ids) - 1) + [1.0])
            cut = shortened(marked, self.max_length, encoder.tokenizer.bos_token_id)
        if cut is None:
            text = (
                f"the prompt has {len(ids)} tokens, --max-length leaves room for {self.max_length} beside the completion;"
                " raise it, lower --max-completion-tokens, or take --on-long truncate-prompt or drop"
            )
            self.faults.add("too_long", row.file, row.line, text, tokens=len(ids), setting="max_length")
            return None
        side.ledger.truncated.setdefault("prompt", []).append(row.place)
        return cut.ids
