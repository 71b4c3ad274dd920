"""The peer's side: trl's SFTTrainer with its own defaults, on the same model, rows, adapter and batch.

    python -m bench.peer ROWS.jsonl MODEL_FOLDER OUT_FOLDER STEPS

Writes OUT_FOLDER/metrics.jsonl, one line per optimizer step, as our own runs do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from bench.rows import BATCH


class StepLines(TrainerCallback):
    """Write a line as each optimizer step ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": state.global_step}) + "\n")


def main(rows: str, model: str, out: str, steps: str) -> None:
    """Train for `steps` steps and write how many tokens the rows hold and how many of them are learned."""
    folder = Path(out)
    folder.mkdir(parents=True)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=str(folder / "trainer"),
            use_cpu=True,
            max_steps=int(steps),
            model_init_kwargs={"dtype": "bfloat16"},
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=load_dataset("json", data_files=rows, split="train", cache_dir=str(folder / "cache")),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[StepLines(folder / "metrics.jsonl")],
    )
    assert trainer.args.per_device_train_batch_size == BATCH, "the other side trains with the same batch"
    data = [trainer.data_collator([row]) for row in trainer.train_dataset]
    learned = sum(int((batch["labels"] != -100).sum()) for batch in data)
    lengths = [int(batch["input_ids"].numel()) for batch in data]
    (folder / "tokens.json").write_text(json.dumps({"lengths": lengths, "learned": learned}))
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
