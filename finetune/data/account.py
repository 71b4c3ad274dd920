"""Where every row went and what the prepared rows look like: what check-data shows and run.json keeps."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from finetune.data.chat import ChatFormat
from finetune.data.conversation import Conversation
from finetune.data.formats import PLACES_LISTED
from finetune.data.rows import RowSet
from finetune.data.split import duplicates, overlap
from finetune.domains.base import prompt_key
from finetune.records import Example, Ledger, Row

PREVIEW_ROWS = 3
LEFT_OUT = "weight"  # reason of the ledger for rows that a weight below 1 does not take


@dataclass(frozen=True)
class RowSets:
    """The rows of --data; and those of --eval-data, where it is given or the data bring a held-out side."""

    train: RowSet
    eval: RowSet | None = None


@dataclass(frozen=True)
class Said:
    """A row with what it says. place: of the row in the order read."""

    row: Row
    place: int
    conversation: Conversation


@dataclass
class Side:
    """The rows of one side on their way to examples, and the ledger that accounts for them."""

    said: list[Said]
    ledger: Ledger
    examples: list[list[Example]] = field(default_factory=list)  # of each row that is kept
    kept: list[Said] = field(default_factory=list)


def data_report(encoder: ChatFormat, row_sets: RowSets, train: Side, held_out: Side) -> dict[str, Any]:
    """Return what is known of the rows and of the examples that they gave."""
    forms = Counter(said.conversation.form for said in train.kept)
    # Rows that a weight above 1 repeats are no duplicates: each place in a file counts once.
    own = list({said.row.place: said for said in train.kept}.values())
    asked, asked_again = ([prompt_key(said.conversation) for said in side] for side in (own, held_out.kept))
    text = encoder.template_text
    return {
        "files": [
            asdict(file) for file in row_sets.train.files + (row_sets.eval.files if row_sets.eval else [])
        ],
        "columns": row_sets.train.columns,
        "form": "+".join(sorted(forms)),
        "forms": dict(forms),
        "uses_tools": any(said.conversation.uses_tools for said in [*train.kept, *held_out.kept]),
        "template_sha256": hashlib.sha256(text.encode()).hexdigest() if text and "chat" in forms else None,
        "chat_template": text if "chat" in forms else None,
        "stop_token_ids": encoder.stop_token_ids,
        "selfcheck": "ok" if "chat" in forms else "no conversations",
        "num_rows": len(train.kept),
        "num_examples": sum(map(len, train.examples)),
        "num_eval_rows": len(held_out.kept),
        "num_tokens": sum(len(example.input_ids) for example in _all(train)),
        "num_supervised": sum(example.num_supervised for example in _all(train)),
        "lengths": _lengths(train),
        "duplicates": _places(own, duplicates([_content_key(said) for said in own])),
        "overlap": _places(held_out.kept, overlap(asked, asked_again)),
        "eval_ledger": asdict(held_out.ledger) if held_out.ledger is not train.ledger else None,
        "preview": [
            encoder.segments(examples[0].input_ids, examples[0].weights)
            for examples in train.examples[:PREVIEW_ROWS]
        ],
    }


def data_warnings(
    encoder: ChatFormat, train: Side, held_out: Side, report: dict[str, Any]
) -> list[tuple[str, str]]:
    """Return what stops nothing but should be known, as (code, text)."""
    ledger, notes = train.ledger, train.ledger.notes
    dropped = {reason: places for reason, places in ledger.dropped.items() if reason != LEFT_OUT}
    num_plain = report["num_rows"] - report["forms"].get("chat", 0)
    facts = {
        "text_beside_template": num_plain if encoder.tokenizer.chat_template else 0,
        "special_text_kept_as_text": notes.get("special_text", 0),
        "reasoning_dropped": notes.get("reasoning_dropped", 0),
        "duplicate_rows": report["duplicates"]["count"],
        "train_eval_overlap": report["overlap"]["count"],
        "rows_dropped": sum(map(len, dropped.values())),
        "rows_truncated": sum(map(len, ledger.truncated.values())),
        "no_eval_rows": int(not held_out.kept),
    }
    texts = {
        "text_beside_template": "rows are plain text and get no chat template, though the model has one",
        "special_text_kept_as_text": "rows hold the text of a control token; it stays text",
        "reasoning_dropped": "learned turns lose their reasoning to the chat template",
        "duplicate_rows": "training rows repeat an earlier one: " + ", ".join(report["duplicates"]["places"]),
        "train_eval_overlap": "held-out rows ask what a training row asks: "
        + ", ".join(report["overlap"]["places"]),
        "rows_dropped": "rows are dropped: "
        + ", ".join(f"{len(rows)} {reason}" for reason, rows in dropped.items()),
        "rows_truncated": "rows lose the beginning of their prompt",
        "no_eval_rows": "no rows are held out, so nothing will tell whether training helped",
    }
    found = [
        (code, text if code == "no_eval_rows" else f"{facts[code]} {text}")
        for code, text in texts.items()
        if facts[code]
    ]
    return [*encoder.warnings, *found]


def _all(side: Side) -> Iterator[Example]:
    return (example for examples in side.examples for example in examples)


def _lengths(side: Side) -> dict[str, int]:
    lengths = np.array([len(example.input_ids) for example in _all(side)])
    return {
        "p50": int(np.percentile(lengths, 50)),
        "p95": int(np.percentile(lengths, 95)),
        "max": int(lengths.max()),
    }


def _content_key(said: Said) -> str:
    """Return all that the row says."""
    return json.dumps(vars(said.conversation), sort_keys=True, default=str)


def _places(said: Sequence[Said], places: list[int]) -> dict[str, Any]:
    return {"count": len(places), "places": [said[place].row.place for place in places[:PLACES_LISTED]]}
