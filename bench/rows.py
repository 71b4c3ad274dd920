"""Chat rows made from a seed, so that every machine measures the same work."""

from __future__ import annotations

import json
import random
from pathlib import Path

NUM_ROWS = 48
BATCH = 8  # rows of one optimizer step: the default of trl
WORDS = """river stone window market letter garden engine copper winter bridge number yellow table paper silver
forest signal morning answer sailor ladder kitchen thunder harvest mirror pocket ribbon saddle tunnel velvet""".split()


def chat_rows(seed: int = 0) -> list[dict[str, object]]:
    """Return rows of one question and one answer, 90 to 200 tokens each, half of them supervised on average."""
    draw = random.Random(seed)
    rows = []
    for _ in range(NUM_ROWS):
        words = draw.choices(WORDS, k=draw.randint(58, 158))
        cut = round(len(words) * draw.uniform(0.3, 0.7))
        question, answer = " ".join(words[:cut]), " ".join(words[cut:])
        rows.append(
            {
                "prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": answer}],
            }
        )
    return rows


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in chat_rows()))
    return path
