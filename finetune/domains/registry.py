"""Which domains there are, and the one that a run means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.data.rows import ARITHMETIC_SIZES, source_name
from finetune.domains.base import Domain, domain_from_file
from finetune.domains.math import math_domain
from finetune.domains.text import text_domain
from finetune.errors import FinetuneError


def load_domain(name: str, data: Sequence[str], data_format: str = "auto") -> Domain:
    """Return the domain that --domain names: text, math, a Python file, or auto (math for builtin:arithmetic, else text).

    data_format is read by the domain text alone; beside another it is an error.
    """
    if name == "auto":
        is_arithmetic = bool(data) and all(source_name(source) in ARITHMETIC_SIZES for source in data)
        name = "math" if is_arithmetic else "text"
    if name == "text":
        return text_domain(data_format)
    if data_format != "auto":
        text = f"data_format: has no effect with domain {name}, which reads rows in its own way; leave it out"
        raise FinetuneError("setting_without_effect", text, setting="data_format")
    if name == "math":
        return math_domain()
    path = Path(name).expanduser().absolute()
    if path.suffix != ".py":
        text = f"domain: {name}: no such domain; there are auto, text, math, or give a Python file"
        raise FinetuneError("bad_value", text, setting="domain")
    return domain_from_file(path)
