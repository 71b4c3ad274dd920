"""The peer's side: trl's GRPOTrainer that samples with the model itself, on the same model, questions, adapter and batch.

    python -m bench.grpo_peer MODEL_FOLDER OUT_FOLDER STEPS

Writes OUT_FOLDER/metrics.jsonl, one line per optimizer step, as our own runs do. trl's defaults, but for activations
that are kept, as ours are: recomputing them, which it does by default, takes it longer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from bench.grpo import GROUP, LEARNING_RATE, PROMPTS, TOKENS
from bench.peer import StepLines
from bench.reward import odd_share
from finetune.data.rows import ARITHMETIC, arithmetic_rows


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """Return what the verifier of our own side says of each completion."""
    return [odd_share({}, completion[0]["content"]) for completion in completions]


def main(model: str, out: str, steps: str) -> None:
    """Train for `steps` steps and write how long the completions were."""
    folder = Path(out)
    folder.mkdir(parents=True)
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in arithmetic_rows(ARITHMETIC)]
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "trainer"),
            use_cpu=True,
            max_steps=int(steps),
            model_init_kwargs={"dtype": "bfloat16"},
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[StepLines(folder / "metrics.jsonl")],
    )
    trainer.train()
    logged = trainer.state.log_history
    lengths = [line["completions/mean_length"] for line in logged if "completions/mean_length" in line]
    (folder / "lengths.json").write_text(json.dumps(lengths))


if __name__ == "__main__":
    main(*sys.argv[1:])
