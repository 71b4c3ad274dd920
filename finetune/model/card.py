"""The model card: a README.md made of facts of the run alone.

Rule: nothing is claimed that was not measured, and what is not known is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from finetune.model.source import Source
from finetune.records import jsonable


@dataclass(frozen=True)
class CardFacts:
    """What a card is made of. sections: heading -> name -> value, in the order in which they are shown."""

    source: Source
    base_sha256: str
    kind: Literal["adapter", "merged"]
    dtype: str
    stop_tokens: list[str]
    sections: dict[str, dict[str, Any]]


def model_card(facts: CardFacts) -> str:
    """Return the text of README.md with the front matter that the Hub reads."""
    base: dict[str, Any] = {
        "id": facts.source.id,
        "revision": facts.source.revision,
        "sha256": facts.base_sha256,
    }
    export = {"form": facts.kind, "weights": facts.dtype, "stop tokens": " ".join(facts.stop_tokens)}
    sections = {"Base model": base, "Export": export, **facts.sections}
    tables = [f"## {heading}\n\n{_table(values)}" for heading, values in sections.items() if values]
    return f"{_front_matter(facts)}\n# {_title(facts)}\n\n{_use(facts)}\n\n" + "\n\n".join(tables) + "\n"


def _front_matter(facts: CardFacts) -> str:
    lines = [
        "library_name: " + ("peft" if facts.kind == "adapter" else "transformers"),
        "pipeline_tag: text-generation",
    ]
    if facts.source.kind == "hub":
        relation = "adapter" if facts.kind == "adapter" else "finetune"
        lines = [f"base_model: {json.dumps(facts.source.id)}", f"base_model_relation: {relation}", *lines]
    return "---\n" + "\n".join(lines) + "\n---\n"


def _title(facts: CardFacts) -> str:
    what = "LoRA adapter for" if facts.kind == "adapter" else "Finetuned from"
    return f"{what} {_cell(facts.source.id)}"


def _use(facts: CardFacts) -> str:
    if facts.kind == "adapter":
        return "Load it on its base with `PeftModel.from_pretrained(base, folder)`, or serve it with vLLM's `--enable-lora`."
    return "A whole model: load it with `AutoModelForCausalLM.from_pretrained(folder)`, or serve the folder with vLLM."


def _table(values: dict[str, Any]) -> str:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    """Return a value as one table cell: text from outside can break neither the table nor the page."""
    text = value if isinstance(value, str) else json.dumps(jsonable(value), ensure_ascii=False)
    clean = "".join(letter if letter.isprintable() else " " for letter in text)
    return clean.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")[:500]
