"""AdamW, its learning rate at every step, and its state as whole tensors by name."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from finetune.config import RunConfig
from finetune.parallel.shard import copy_full, full_tensor

STATES = ("exp_avg", "exp_avg_sq")


def make_optimizer(parameters: dict[str, nn.Parameter], config: RunConfig) -> torch.optim.AdamW:
    """Return AdamW over the parameters in their order; vectors (norms, biases) are never decayed."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate)


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """Return the rate of step `step` (counted from 1) of `num_steps`.

    Warmup of w = floor(warmup_ratio * num_steps) steps: peak * k / w for k = 1..w. Then with k steps done of n:
    linear peak * (1 - k / n), cosine peak * (1 + cos(pi * k / n)) / 2, or constant, k counted from the warmup's end.
    """
    warmup = int(config.warmup_ratio * num_steps)
    if step <= warmup:
        return config.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, num_steps - warmup)
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def full_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the optimizer's state as whole tensors on the CPU, keyed "state/parameter"; every rank must call it.

    It is empty where no step was made yet.
    """
    found: dict[str, Tensor] = {}
    if not optimizer.state:
        return found
    for name, parameter in parameters.items():
        for state in STATES:
            found[f"{state}/{name}"] = full_tensor(optimizer.state[parameter][state]).cpu()
        found[f"step/{name}"] = optimizer.state[parameter]["step"].cpu().reshape(1)
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], saved: dict[str, Tensor]
) -> None:
    """Set the optimizer's state from whole tensors, whatever the ranks that saved them."""
    if not saved:
        return
    for name, parameter in parameters.items():
        own = optimizer.state[parameter]
        for state in STATES:
            own[state] = torch.zeros_like(parameter)
            copy_full(own[state], saved[f"{state}/{name}"])
        own["step"] = saved[f"step/{name}"].reshape(()).clone()
