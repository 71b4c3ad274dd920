"""The rows of a run on their way to examples: read by the domain, encoded, fitted to the length limit, accounted for.

Rule: all that is wrong with the rows is reported at once, and no row disappears: read = trained + held out + dropped.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from finetune.config import RunConfig
from finetune.data.account import LEFT_OUT, RowSets, Said, Side
from finetune.data.chat import ChatFormat
from finetune.data.conversation import Conversation, Encoded
from finetune.data.formats import PLACES_LISTED, Faults
from finetune.data.rows import RowSet
from finetune.data.split import seeded_rank
from finetune.domains.base import Domain
from finetune.errors import FinetuneError, Problems
from finetune.records import Example, Ledger, Row
from finetune.rules import DEFAULT_MAX_LENGTH

BLOCK = 512  # conversations that the tokenizer gets in one call
# What --on-bad-row drop may drop: the row is at fault, and nothing that a setting would mend.
DROPPABLE = {"bad_row", "bad_roles", "empty_assistant", "no_supervised_token"}


def length_limit(config: RunConfig, context: int) -> int:
    """Return the tokens that a row may have; raises FinetuneError(bad_value) where the model cannot read as many."""
    if config.max_length is not None and config.max_length > context:
        text = f"max_length: {config.max_length} is more than the {context} tokens that the model reads"
        raise FinetuneError("bad_value", text, setting="max_length")
    return config.max_length or min(context, DEFAULT_MAX_LENGTH)


class Preparation:
    """The settings that decide over rows, and what was found wrong on the way."""

    def __init__(self, config: RunConfig, domain: Domain, max_length: int) -> None:
        self.config = config
        self.domain = domain
        self.max_length = max_length
        self.faults = Faults()

    def facts(self) -> dict[str, Any]:
        learn = getattr(self.config, "learn", "all")
        return {"domain": self.domain.name, "learn": learn, "max_length": self.max_length}

    def sides(self, row_sets: RowSets) -> tuple[Side, Side]:
        """Return the rows to train on and the held-out rows to measure by, eval_rows of them at most."""
        ledger = Ledger()
        said = self._said(row_sets.train, ledger)
        if row_sets.eval is not None:
            own = Ledger()
            return Side(said, ledger), self._limited(self._said(row_sets.eval, own), own)
        rows = [one.row for one in said]
        places, held_out = self.domain.split(rows, self.config.eval_fraction, self.config.split_seed)
        train = Side([said[place] for place in places], ledger)
        return train, self._limited([said[place] for place in held_out], ledger)

    def _said(self, row_set: RowSet, ledger: Ledger) -> list[Said]:
        ledger.read = len(row_set.rows) + len(row_set.left_out)
        for row in row_set.left_out:
            ledger.drop(LEFT_OUT, row)
        said = []
        for place, row in enumerate(row_set.rows):
            try:
                said.append(Said(row, place, self.conversation(row)))
            except FinetuneError as error:
                self.reject(row, error, ledger)
        return said

    def conversation(self, row: Row) -> Conversation:
        """Return what a row says; raises what is wrong with it."""
        return self.domain.conversation(row)

    def _limited(self, said: list[Said], ledger: Ledger) -> Side:
        """Return the held-out rows that are measured; the others are held out all the same."""
        order = sorted(range(len(said)), key=lambda place: seeded_rank(self.config.split_seed, str(place)))
        measured = sorted(order[: self.config.eval_rows])
        ledger.held_out += len(said) - len(measured)
        return Side([said[place] for place in measured], ledger)

    def reject(self, row: Row, error: FinetuneError, ledger: Ledger) -> None:
        if self.config.on_bad_row == "drop" and error.code in DROPPABLE:
            ledger.drop(error.code, row)
        else:
            self.faults.add(error.code, row.file, row.line, error.message, **error.evidence)

    def encoder(self, tokenizer: Any, said: list[Said]) -> ChatFormat:
        """Return the format that these rows need; raises Problems where it or a row so far is at fault."""
        forms = {one.conversation.form for one in said}
        uses_tools = any(one.conversation.uses_tools for one in said)
        encoder = ChatFormat.from_config(self.config, tokenizer, uses_tools)
        problems = encoder.problems(forms)
        if said and "chat" not in forms:
            for name in ("system_prompt", "chat_template", "chat_template_args"):
                if getattr(self.config, name):
                    text = f"{name}: has no effect on rows that are plain text; leave it out"
                    problems.append(FinetuneError("setting_without_effect", text, setting=name))
        if problems:
            raise Problems([*problems, *self.faults.errors()])
        return encoder

    def encode(self, side: Side, encoder: ChatFormat) -> None:
        """Fill in the examples of a side, row by row, and reject the rows that have none."""
        learn = getattr(self.config, "learn", "all")
        for start in range(0, len(side.said), BLOCK):
            block = side.said[start : start + BLOCK]
            outcomes = encoder.encode([said.conversation for said in block], learn)
            for said, outcome in zip(block, outcomes, strict=True):
                if isinstance(outcome, FinetuneError):
                    self.reject(said.row, outcome, side.ledger)
                elif examples := self._fitted(said, outcome, side.ledger, encoder):
                    side.examples.append(examples)
                    side.kept.append(said)

    def _fitted(
        self, said: Said, encoded: list[Encoded], ledger: Ledger, encoder: ChatFormat
    ) -> list[Example]:
        """Return the examples of a row within the length limit, or none where the row is rejected."""
        row = said.row
        if not any(any(example.weights) for example in encoded):
            error = FinetuneError("no_supervised_token", "no token of this row would be learned")
            self.reject(row, error, ledger)
            return []
        if any(len(example.ids) > self.max_length for example in encoded):
            if self.config.on_long == "drop":
                would_teach = any(any(example.weights[: self.max_length]) for example in encoded)
                ledger.drop("too_long" if would_teach else "no_supervised_token", row)
                return []
            cut = [shortened(example, self.max_length, encoder.tokenizer.bos_token_id) for example in encoded]
            if self.config.on_long == "error" or None in cut:
                self._too_long(row, encoded)
                return []
            encoded = [example for example in cut if example is not None]
            ledger.truncated.setdefault("prompt", []).append(row.place)
        for note, count in Counter(note for example in encoded for note in example.notes).items():
            ledger.note(note, count)
        return [Example(example.ids, example.weights, said.place, row.file, row.line) for example in encoded]

    def _too_long(self, row: Row, encoded: list[Encoded]) -> None:
        longest = max(len(example.ids) for example in encoded)
        text = f"{longest} tokens are more than --max-length {self.max_length}"
        if self.config.on_long == "truncate-prompt":
            text += ", and the prompt alone cannot be cut to make room; raise it, or take --on-long drop"
        else:
            text += "; raise it, or take --on-long truncate-prompt or drop"
        self.faults.add("too_long", row.file, row.line, text, tokens=longest, setting="max_length")

    def check_tokens(self, tokenizer: Any, vocab_rows: int, sides: list[Side]) -> None:
        """Note the rows with a token for which the embedding has no row."""
        for side in sides:
            for said, examples in zip(side.kept, side.examples, strict=True):
                highest = max(max(example.input_ids) for example in examples)
                if highest >= vocab_rows:
                    token = tokenizer.convert_ids_to_tokens(highest)
                    text = f"token {token!r} has the id {highest}, the model's embedding {vocab_rows} rows"
                    self.faults.add("tokens_past_embedding", said.row.file, said.row.line, text, token=token)

    def check_left(self, train: Side) -> None:
        """Raise what was found wrong; or that nothing is left to train on."""
        self.faults.raise_any()
        if not train.kept:
            reasons = ", ".join(f"{len(places)} {reason}" for reason, places in train.ledger.dropped.items())
            text = f"no row is left to train on (dropped: {reasons or 'none'}; held out: {train.ledger.held_out})"
            text += f"; rows may have --max-length {self.max_length} tokens"
            dropped = {reason: places[:PLACES_LISTED] for reason, places in train.ledger.dropped.items()}
            raise Problems([FinetuneError("too_few_rows", text, dropped=dropped, setting="max_length")])


def shortened(example: Encoded, max_length: int, bos_token_id: int | None) -> Encoded | None:
    """Return the example without the oldest part of its prompt, a BOS kept; None where the answer leaves it no token."""
    surplus = len(example.ids) - max_length
    if surplus <= 0:
        return example
    first = next(place for place, weight in enumerate(example.weights) if weight)
    kept = int(example.ids[0] == bos_token_id)
    if kept + surplus >= first:
        return None
    ids = example.ids[:kept] + example.ids[kept + surplus :]
    return example._replace(ids=ids, weights=example.weights[:kept] + example.weights[kept + surplus :])
