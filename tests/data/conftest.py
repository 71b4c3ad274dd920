"""Tokenizers of builtin:tiny, and preparing rows in one call.

Nothing heavy is imported before it is used: this file may be loaded before the environment of the tests is set.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VOCABULARY = 328
CONTEXT = 512


@functools.cache
def tiny_tokenizer(query: str = "") -> Any:
    from finetune.model.builtin import load_tokenizer
    from finetune.model.source import resolve_source

    return load_tokenizer(resolve_source(f"builtin:tiny?{query}"))


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Any]:
    """Return the tokenizer of builtin:tiny with the options of a query, as tiny("template=bos&post_bos=1")."""
    return tiny_tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Any:
    from finetune.model.builtin import load_tokenizer
    from finetune.model.source import resolve_source

    return load_tokenizer(resolve_source("builtin:smollm2-135m"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write rows (or the bytes of a file) to a JSONL file and return its path."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        if len(rows) == 1 and isinstance(rows[0], bytes | str):
            path.write_bytes(rows[0].encode() if isinstance(rows[0], str) else rows[0])
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def prepared(write: Callable[..., str]) -> Callable[..., Any]:
    """Prepare rows for builtin:tiny: `query` are the model's options, the other names are settings."""

    def prepared(*rows: Any, query: str = "", name: str = "rows.jsonl", **settings: Any) -> Any:
        from finetune.config import SftConfig
        from finetune.data.prepare import prepare, read_row_sets

        data = settings.pop("data", None) or [write(*rows, name=name)]
        config = SftConfig(model=f"builtin:tiny?{query}", data=data, **({"eval_fraction": 0.0} | settings))
        return prepare(read_row_sets(config), config, tiny_tokenizer(query), VOCABULARY, CONTEXT)

    return prepared


@pytest.fixture(scope="session")
def learned() -> Callable[..., str]:
    """Return the text of an example's learned tokens."""

    def learned(example: Any, tokenizer: Any = None) -> str:
        ids = getattr(example, "input_ids", None) or example.ids
        tokens = [token for token, weight in zip(ids, example.weights, strict=True) if weight]
        return (tokenizer or tiny_tokenizer()).decode(tokens)

    return learned


@pytest.fixture(scope="session")
def shown() -> Callable[..., str]:
    """Return the whole text of an example."""
    return lambda example, tokenizer=None: (tokenizer or tiny_tokenizer()).decode(
        getattr(example, "input_ids", None) or example.ids
    )
