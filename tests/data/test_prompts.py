"""Prompts that a policy is to answer: what is too long for its context is found while rows are prepared, by its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.config import GrpoConfig
from finetune.data.prepare import Prepared, prepare, read_row_sets
from finetune.errors import FinetuneError, Problems
from tests.data.conftest import CONTEXT, VOCABULARY, tiny_tokenizer

SHORT, LONG = "What is 2+2?", "z" * 600  # a byte is a token: 600 of them where 512 fit


def prepared_prompts(folder: Path, *prompts: str, **settings: Any) -> Prepared:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "4"}) + "\n" for prompt in prompts))
    values: dict[str, Any] = {
        "verifier": ["numeric"],
        "eval_fraction": 0.0,
        "max_length": 512,
        "max_completion_tokens": 32,
    }
    config = GrpoConfig(model="builtin:tiny", data=[str(path)], **{**values, **settings})
    return prepare(read_row_sets(config), config, tiny_tokenizer(), VOCABULARY, CONTEXT)


def test_a_prompt_that_does_not_fit_is_refused_by_its_line(tmp_path: Path) -> None:
    """VL-09: before anything is sampled; the server would reject it, or cut its beginning off."""
    with pytest.raises(Problems) as caught:
        prepared_prompts(tmp_path, SHORT, LONG, SHORT)
    (error,) = caught.value.errors
    assert (error.code, error.evidence["line"], error.evidence["file"]) == (
        "too_long",
        2,
        str(tmp_path / "prompts.jsonl"),
    )
    assert error.evidence["tokens"] >= 600
    assert "leaves room for 480 beside the completion" in error.message


def test_a_prompt_that_does_not_fit_is_dropped_and_stands_in_the_ledger(tmp_path: Path) -> None:
    """VL-09: what is left are the ids that the engine is asked with, each row beside its own answer column."""
    found = prepared_prompts(tmp_path, LONG, SHORT, LONG, SHORT + "!", on_long="drop")
    ledger = found.ledger
    assert (ledger.read, ledger.trained, ledger.held_out) == (4, 2, 0)
    assert [place.rpartition(":")[2] for place in ledger.dropped["too_long"]] == ["1", "3"]
    assert [(one.line, one.row) for one in found.train] == [(2, 0), (4, 1)]
    assert [row.line for row in found.train_rows] == [2, 4]
    assert "rows_dropped" in {code for code, _ in found.warnings}
    asked = [tiny_tokenizer().decode(one.input_ids) for one in found.train]
    assert [text.count(SHORT) for text in asked] == [1, 1]
    assert not any("zz" in text for text in asked)
    assert max(len(one.input_ids) for one in found.train) <= 512 - 32


def test_the_longest_prompt_that_fits_is_kept(tmp_path: Path) -> None:
    """VL-09: the limit is that of prompt and completion together, to the token."""
    around = len(prepared_prompts(tmp_path, "z" * 100).train[0].input_ids) - 100
    room = 512 - 32 - around
    (example,) = prepared_prompts(tmp_path, "z" * room).train
    assert len(example.input_ids) == 480
    with pytest.raises((Problems, FinetuneError)):
        prepared_prompts(tmp_path, "z" * (room + 1))
