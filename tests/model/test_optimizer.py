"""The learning rate at every step, and optimizer state that comes back."""

import pytest
import torch
from torch import nn

from finetune.config import SftConfig
from finetune.knobs import build
from finetune.model.optimizer import full_optimizer_state, learning_rate, load_optimizer_state, make_optimizer


def config(**settings: object) -> SftConfig:
    made: SftConfig = build(
        SftConfig, {"model": "m", "data": ["d"], "learning_rate": 1e-3, "warmup_ratio": 0.0, **settings}
    )
    return made


def test_linear_schedule_falls_by_one_share_a_step() -> None:
    """LM-07."""
    rates = [learning_rate(config(schedule="linear"), step, 3) for step in (1, 2, 3)]
    assert rates == pytest.approx([0.001, 0.001 * 2 / 3, 0.001 / 3])


def test_fifth_step_of_ten_has_six_tenths() -> None:
    """CE-20: step k of S has lr0 * (1 - (k - 1) / S)."""
    assert learning_rate(config(schedule="linear"), 5, 10) == pytest.approx(0.0006)


def test_cosine_starts_at_the_peak_and_halves_in_the_middle() -> None:
    rates = [learning_rate(config(schedule="cosine"), step, 4) for step in (1, 3)]
    assert rates == pytest.approx([0.001, 0.0005])


def test_warmup_rises_to_the_peak_and_the_schedule_begins_after_it() -> None:
    rates = [learning_rate(config(schedule="linear", warmup_ratio=0.2), step, 10) for step in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.0005, 0.001, 0.001, 0.001 * 7 / 8])
    assert learning_rate(config(schedule="constant"), 9, 10) == 0.001


def test_vectors_are_not_decayed() -> None:
    parameters = {"matrix": nn.Parameter(torch.ones(2, 2)), "vector": nn.Parameter(torch.ones(2))}
    optimizer = make_optimizer(parameters, config(weight_decay=0.5))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert float(parameters["matrix"].detach().max()) == pytest.approx(1 - 1e-3 * 0.5)
    assert float(parameters["vector"].detach().min()) == 1


def test_state_comes_back_bit_for_bit() -> None:
    def steps(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            for parameter in parameters.values():
                parameter.grad = parameter.detach() * 0.3 + 0.1
            optimizer.step()

    def fresh() -> dict[str, nn.Parameter]:
        return {"a": nn.Parameter(torch.arange(6.0).reshape(2, 3))}

    straight, stopped, resumed = fresh(), fresh(), fresh()
    steps(straight, make_optimizer(straight, config()), 5)
    first = make_optimizer(stopped, config())
    steps(stopped, first, 2)
    second = make_optimizer(resumed, config())
    resumed["a"].data.copy_(stopped["a"])
    load_optimizer_state(second, resumed, full_optimizer_state(first, stopped))
    steps(resumed, second, 3)
    assert torch.equal(straight["a"], resumed["a"])
