"""Our SFT loss and gradients against trl's SFTTrainer on one batch of ragged rows (fp32, given labels)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import TrainerCallback

from finetune.config import SftConfig
from finetune.data.batches import Budget, rank_batches
from finetune.knobs import build
from finetune.model.builtin import load_model, load_tokenizer
from finetune.model.policy import build_policy
from finetune.model.source import resolve_source
from finetune.train.losses import weighted_nll
from tests.train.runs import TINY, ragged_examples, relative_difference

EXAMPLES = ragged_examples(8, seed=4)


@pytest.fixture(scope="module")
def start_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    model = get_peft_model(
        load_model(resolve_source(TINY), torch.float32, "sdpa"),
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    folder = tmp_path_factory.mktemp("start")
    model.save_pretrained(str(folder))
    return folder


def ours(start_adapter: Path, budget: Budget) -> tuple[float, dict[str, Tensor]]:
    values = {
        "model": TINY,
        "data": ["x"],
        "dtype": "fp32",
        "attention": "sdpa",
        "gradient_checkpointing": False,
    }
    policy = build_policy(
        build(SftConfig, {**values, "init_adapter": str(start_adapter)}), resolve_source(TINY)
    )
    batches, total = rank_batches(range(8), EXAMPLES, budget, 0, 1)
    loss = 0.0
    for batch in batches:
        share = weighted_nll(policy(batch), batch.weights_N) / total
        share.backward()
        loss += float(share.detach())
    return loss, {name: parameter.grad for name, parameter in policy.trainable().items()}


class Grab(TrainerCallback):
    """Keeps the gradients of the first step, before the optimizer uses them."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any
    ) -> None:
        named = {
            name.replace(".default", ""): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.gradients = {name: parameter.grad.clone() for name, parameter in named.items()}


def theirs(start_adapter: Path, folder: Path, batch_size: int) -> tuple[float, dict[str, Tensor]]:
    from datasets import Dataset
    from peft import PeftModel
    from trl import SFTConfig, SFTTrainer

    source = resolve_source(TINY)
    model = PeftModel.from_pretrained(
        load_model(source, torch.float32, "sdpa"), str(start_adapter), is_trainable=True
    )
    labels = [
        [
            token if weight > 0 else -100
            for token, weight in zip(example.input_ids, example.weights, strict=True)
        ]
        for example in EXAMPLES
    ]
    rows = Dataset.from_dict({"input_ids": [example.input_ids for example in EXAMPLES], "labels": labels})
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=1,
        learning_rate=0.0,
        max_grad_norm=0.0,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=8 // batch_size,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    grab = Grab()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=load_tokenizer(source),
        callbacks=[grab],
    )
    trainer.train()
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line), grab.gradients


@pytest.mark.parametrize(
    ("budget", "batch_size"), [(Budget(4096), 8), (Budget(100), 2), (Budget(4096, packing=True), 4)]
)
def test_loss_and_gradients_equal_trl(
    budget: Budget, batch_size: int, start_adapter: Path, tmp_path: Path
) -> None:
    loss, gradients = ours(start_adapter, budget)
    their_loss, their_gradients = theirs(start_adapter, tmp_path, batch_size)
    assert loss == pytest.approx(their_loss, abs=2e-4)  # trl's log rounds to four digits
    assert relative_difference(their_gradients, gradients) < 2e-6
