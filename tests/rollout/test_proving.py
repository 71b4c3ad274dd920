"""What a version is believed for, on an engine whose every word the test chooses: noise, order and what the trainer is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import FinetuneError
from finetune.rollout.canary import Canary
from finetune.rollout.sync import Syncer
from finetune.rollout.versions import Files, Version, base_version

FIRST, SECOND = [list(range(12))], [list(range(100, 112))]
# Log-probs of the eleven tokens of a canary, all of them moved by so much.
Moved = Callable[[str, list[list[int]]], float]


def logps(moved: float) -> list[list[float]]:
    return [[-2.0 - 0.1 * place + moved for place in range(11)]]


@dataclass
class Engine:
    """One engine. says: how far its log-probs are moved under a name (merged: of what it holds) on a canary."""

    says: Moved
    num_servers: int = 1
    names: list[str] = field(default_factory=list)
    held: str = "base"
    called: list[str] = field(default_factory=list)

    def score(self, server: int, sequences: Any, model: str) -> list[list[float]]:
        return logps(self.says(self.held if model == "base" else model, list(sequences)))

    def load_adapter(self, server: int, name: str, folder: Path) -> None:
        self.names.append(name)

    def unload_adapter(self, server: int, name: str) -> None:
        self.names.remove(name)

    def reload_weights(self, server: int, folder: Path) -> None:
        self.held = folder.name

    def weight_digests(self, server: int) -> dict[str, str]:
        self.called.append("finetune_weight_digests")
        return {"m.weight": self.held}

    def call_workers(self, server: int, method: str, **more: Any) -> list[Any]:
        self.called.append(method)
        answers = {
            "finetune_weight_names": ["m.weight"],
            "finetune_adapter_digests": [{"m.A": name} for name in self.names],
            "finetune_sampled_digests": {"m.weight": self.held},
        }
        return [answers.get(method)]

    def list_models(self, server: int) -> list[str]:
        return ["base", *self.names]

    def activate(self, version: str, model: str | None = None) -> None:
        pass

    def reset_prefix_cache(self, server: int) -> None:
        pass

    def stamp_version(self, server: int, version: str) -> None:
        pass


class Store:
    """Versions as files that are not there, their name for a digest."""

    base_folder = Path("base")

    def write_adapter(self, version: Version) -> Files:
        return Files(version, Path(version.name), {"m.A": version.name}, rank=8)

    def write_merged(self, version: Version) -> Files:
        draw = None if version.is_base else "draw"
        return Files(version, Path(version.name), {"m.weight": version.name}, draw=draw)

    def whole_digests(self, files: Files) -> dict[str, str]:
        return files.digests

    def served_name(self, version: Version) -> str:
        return version.name

    def linked(self, files: Files) -> Files:
        return files

    def remove(self, files: Files) -> None:
        pass


def syncer(engine: Engine, mode: str) -> Syncer:
    return Syncer(engine, Store(), mode, retries=0)  # type: ignore[arg-type]


def adapter(number: int) -> Version:
    tensors = tuple((f"base_model.model.m.lora_{side}.weight", torch.ones(8, 8)) for side in "AB")
    return Version(number, tensors, {"adapter_config.json": "{}"})


def canary(sequences: list[list[int]], new: float, old: float, asked: list[str] | None = None) -> Canary:
    asked = [] if asked is None else asked
    return Canary(
        sequences,
        lambda _: asked.append("new") or logps(new),  # type: ignore[func-returns-value]
        lambda _: asked.append("old") or logps(old),  # type: ignore[func-returns-value]
    )


@pytest.mark.parametrize("mode", ["adapter", "merged"])
def test_the_trainer_is_asked_nothing_when_an_engine_is_proved_again(mode: str) -> None:
    moved = {"base": 0.0, "step-000001": 0.5, "step-000002": 1.0}
    engine, asked = Engine(lambda name, _: moved[name]), list[str]()
    own = syncer(engine, mode)
    own.deliver(base_version(), canary(FIRST, 0.0, 0.0))
    own.deliver(adapter(1), canary(FIRST, 0.5, 0.0))
    own.deliver(adapter(2), canary(FIRST, 1.0, 0.5, asked))
    assert asked == ["new"]  # of the version before it was known
    engine.names.clear()
    own.redeliver(0)
    moved["step-000002"] = 1.001  # off by more than noise, and the trainer is at other weights by now
    engine.names.clear()
    if mode == "merged":
        with pytest.raises(FinetuneError, match="its weights are ours"):
            own.redeliver(0)
    assert asked == ["new"]


def test_being_told_to_stop_is_no_reason_to_try_again() -> None:
    def told(name: str, sequences: list[list[int]]) -> float:
        raise FinetuneError("stopped", "told to stop while sampling")

    engine = Engine(lambda name, _: 0.0)
    own = syncer(engine, "adapter")
    own.deliver(base_version(), canary(FIRST, 0.0, 0.0))
    engine.says = told
    with pytest.raises(FinetuneError) as caught:
        own.redeliver(0)
    assert caught.value.code == "stopped"


@pytest.mark.parametrize("mode", ["adapter", "merged"])
@pytest.mark.parametrize(("answer", "is_right"), [(0.04, True), (5.0, False)])
def test_noise_is_that_of_the_canary_that_is_asked(mode: str, answer: float, is_right: bool) -> None:
    """Noise is 0.001 on the first canary and 0.05 on the second, where the step itself changes 0.02."""
    on_second = {"base": 0.05, "step-000001": answer}
    engine = Engine(lambda name, asked: 0.001 if asked == FIRST else on_second[name])
    own = syncer(engine, mode)
    own.deliver(base_version(), canary(FIRST, 0.0, 0.0))
    step = canary(SECOND, -0.02, 0.0)
    if is_right:
        assert own.deliver(adapter(1), step).method == "digest"
        return
    with pytest.raises(FinetuneError, match="its weights are ours, and its log-probs are not"):
        own.deliver(adapter(1), step)


def test_equal_answers_after_rounding_are_decided_by_all_of_the_merged_weights() -> None:
    engine = Engine(lambda name, _: 0.0)
    own = syncer(engine, "merged")
    own.deliver(base_version(), canary(FIRST, 0.0, 0.0))
    assert own.deliver(adapter(1), canary(FIRST, 1e-6, 0.0)).method == "digest"
    assert engine.called.count("finetune_weight_digests") == 2  # of the base, and now
    adapters = syncer(Engine(lambda name, _: 0.0), "adapter")
    adapters.deliver(base_version(), canary(FIRST, 0.0, 0.0))
    with pytest.raises(FinetuneError, match="exactly as the version before"):
        adapters.deliver(adapter(1), canary(FIRST, 1e-6, 0.0))
