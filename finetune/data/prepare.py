"""Rows -> the examples that a run trains on and measures itself by, with an account of where every row went.

Rule: all that is wrong with the rows is reported at once, and no row disappears: read = trained + held out + dropped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from finetune.config import GrpoConfig, RunConfig
from finetune.data.account import RowSets, Side, data_report, data_warnings
from finetune.data.preparation import Preparation, length_limit
from finetune.data.prompts import PromptPreparation
from finetune.data.rows import eval_sources, read_rows
from finetune.data.store import FORMAT_VERSION, Prepared, load_prepared, store_prepared
from finetune.data.template import read_template
from finetune.domains.base import Domain
from finetune.domains.prompts import domain_of
from finetune.records import Example
from finetune.rules import longest_prompt

__all__ = [
    "Prepared",
    "RowSets",
    "load_prepared",
    "prepare",
    "prepared_key",
    "read_row_sets",
    "store_prepared",
]

# Settings that change what a row becomes; files, tokenizer, template and domain enter the key by their content.
_SETTINGS = (
    "data_format map system_prompt chat_template_args max_length max_completion_tokens on_long"
    " on_bad_row learn eval_fraction eval_rows split_seed"
).split()


def read_row_sets(config: RunConfig) -> RowSets:
    """Read the rows that the settings name; raises Problems."""
    train = read_rows(config.data, config.map)
    held_out = config.eval_data or eval_sources(config.data)
    return RowSets(train, read_rows(held_out, config.map) if held_out else None)


def prepared_key(row_sets: RowSets, config: RunConfig, tokenizer: Any, context: int) -> str:
    """Return the name of prepared data: a digest of all content and settings on which they depend."""
    sets = [row_set for row_set in (row_sets.train, row_sets.eval) if row_set]
    facts = {
        "version": FORMAT_VERSION,
        "files": [[(file.path, file.sha256) for file in row_set.files] for row_set in sets],
        "taken": [[len(row_set.rows), len(row_set.left_out)] for row_set in sets],
        "tokenizer": tokenizer_digest(tokenizer),
        "template": read_template(config.chat_template),
        "domain": domain_of(config).digest,
        "context": context,
        "settings": {name: getattr(config, name, None) for name in _SETTINGS},
        "form": "prompts" if isinstance(config, GrpoConfig) else "conversations",
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of the tokenizer's vocabulary, rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    facts = "\n".join([rules, template, str(tokenizer.special_tokens_map)])
    return hashlib.sha256(facts.encode()).hexdigest()


def prepare(row_sets: RowSets, config: RunConfig, tokenizer: Any, vocab_rows: int, context: int) -> Prepared:
    """Turn rows into examples. vocab_rows: rows of the model's embedding; context: its longest sequence in tokens.

    Raises Problems with everything that is wrong, at once.
    """
    domain = domain_of(config)
    work = _preparation(config, domain, length_limit(config, context), tokenizer)
    train, held_out = work.sides(row_sets)
    encoder = work.encoder(tokenizer, [*train.said, *held_out.said])
    for side in (train, held_out):
        work.encode(side, encoder)
    train.ledger.trained = len(train.kept)
    held_out.ledger.held_out += len(held_out.kept)
    work.check_tokens(tokenizer, vocab_rows, [train, held_out])
    work.check_left(train)
    for side in (train, held_out):
        assert side.ledger.balances, "a row is in none or in two columns of the ledger"
    report = work.facts() | data_report(encoder, row_sets, train, held_out)
    return Prepared(
        train=_numbered(train, config),
        eval=[
            replace(example, row=place)
            for place, examples in enumerate(held_out.examples)
            for example in examples
        ],
        eval_rows=[said.row for said in held_out.kept],
        train_rows=[said.row for said in train.kept] if isinstance(config, GrpoConfig) else [],
        ledger=train.ledger,
        report=report,
        warnings=data_warnings(encoder, train, held_out, report),
    )


def _numbered(train: Side, config: RunConfig) -> list[Example]:
    """Return the examples to train on; the row of a prompt is its place in train_rows, where its verifier finds the columns."""
    if not isinstance(config, GrpoConfig):
        return [example for examples in train.examples for example in examples]
    return [
        replace(example, row=place) for place, examples in enumerate(train.examples) for example in examples
    ]


def _preparation(config: RunConfig, domain: Domain, limit: int, tokenizer: Any) -> Preparation:
    if not isinstance(config, GrpoConfig):
        return Preparation(config, domain, limit)
    has_template = bool(config.chat_template or tokenizer.chat_template)
    return PromptPreparation(config, domain, longest_prompt(replace(config, max_length=limit)), has_template)
