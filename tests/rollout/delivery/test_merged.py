"""Delivery of merged and of whole weights to a real vLLM server, proved by what its kernels multiply with."""

from __future__ import annotations

import shutil

import pytest
import torch

from finetune.errors import FinetuneError
from finetune.model.builtin import load_model
from finetune.model.source import resolve_source
from finetune.rollout.canary import distance
from finetune.rollout.sync import Syncer
from finetune.rollout.versions import VersionStore, base_version, whole_version
from finetune.rollout.vllm import VllmEngine
from tests.rollout.delivery import proxy
from tests.rollout.delivery.engines import (
    EXACT,
    MODEL,
    adapters,
    answered,
    flat,
    put_back,
    served_versions,
)
from tests.rollout.delivery.policies import SEQUENCES, Trainer, version
from tests.rollout.delivery.proxy import Proxy

pytestmark = pytest.mark.slow


def test_merged_weights_are_proved_by_digests(
    merged: Syncer, engine: VllmEngine, trainer: Trainer, front: Proxy
) -> None:
    assert merged.deliver(base_version(), trainer.canary(None)).method == "base"
    previous = None
    for number in (1, 2):
        adapter = trainer.adapter(number)
        report = merged.deliver(version(number, adapter), trainer.canary(adapter, previous))
        assert (report.method, engine.stamp(0)) == ("digest", f"step-{number:06d}")
        assert distance(flat(answered(engine, "base")), flat(trainer.scores(adapter))) < EXACT
        assert served_versions(engine) == {f"step-{number:06d}"}
        previous = adapter
    asked = [request.body["method"] for request in front.asked if request.path == "/collective_rpc"]
    assert asked.count("finetune_weight_digests") == 1  # of all, for the base
    assert asked.count("finetune_sampled_digests") == 2
    draws = [request.body["kwargs"].get("draw") for request in front.asked if "kwargs" in request.body]
    assert len(set(draws) - {None}) == 2


def test_whole_weights_reach_the_head_that_shares_the_embedding(
    merged: Syncer, engine: VllmEngine, trainer: Trainer
) -> None:
    merged.deliver(base_version(), trainer.canary(None))
    model = load_model(resolve_source(MODEL), torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)

    def scores(factor: float) -> list[list[float]]:
        found = []
        for ids in SEQUENCES:
            with torch.inference_mode():
                logps_TV = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            found.append(logps_TV.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist())
        return found

    canary = trainer.canary(None)
    canary = type(canary)(SEQUENCES, scores, canary.previous)
    report = merged.deliver(whole_version(1, model.named_parameters()), canary)
    assert report.method == "digest"
    assert distance(flat(answered(engine, "base")), flat(scores(1.0))) < EXACT


@pytest.mark.parametrize(
    ("lying", "has_extension"),
    [("drops", True), ("previous", True), ("zeroed", True), ("drops", False), ("zeroed", False)],
)
def test_lies_about_merged_weights_do_not_pass(
    merged: Syncer,
    engine: VllmEngine,
    store: VersionStore,
    trainer: Trainer,
    front: Proxy,
    lying: str,
    has_extension: bool,
) -> None:
    front.lie = None if has_extension else hides_digests
    old, new = trainer.adapter(1), trainer.adapter(2)
    merged.deliver(base_version(), trainer.canary(None))
    merged.deliver(version(1, old), trainer.canary(old))
    copy = store.folder / "old"
    shutil.copytree(next(store.folder.glob("v000001*")), copy)
    lies: dict[str, proxy.Lie] = {
        "drops": proxy.drops_reloads,
        "previous": proxy.reloads_instead(copy),
        "zeroed": proxy.rewrites(proxy.half_zeroed),
    }
    lie = lies[lying]
    front.lie = lie if has_extension else lambda request: hides_digests(request) or lie(request)
    with pytest.raises(FinetuneError) as caught:
        merged.deliver(version(2, new), trainer.canary(new, old))
    assert caught.value.code == "sync_unproved"
    assert engine.version == "step-000001"


def test_a_server_that_holds_other_weights_gets_the_base_back(
    merged: Syncer, engine: VllmEngine, store: VersionStore, trainer: Trainer
) -> None:
    adapter = trainer.adapter(1)
    engine.reload_weights(0, store.write_merged(version(1, adapter)).folder)
    engine.reset_prefix_cache(0)
    report = merged.deliver(base_version(), trainer.canary(None))
    assert (report.method, report.attempts) == ("base", 2)
    assert distance(flat(answered(engine, "base")), flat(trainer.scores(None))) < EXACT


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["adapter", "merged"])
def test_what_an_engine_lost_is_brought_and_proved_again(
    engine: VllmEngine, store: VersionStore, trainer: Trainer, front: Proxy, mode: str
) -> None:
    syncer = Syncer(engine, store, mode, retries=1)  # type: ignore[arg-type]
    adapter = trainer.adapter(1)
    try:
        syncer.redeliver(0)  # nothing was delivered yet
        syncer.deliver(base_version(), trainer.canary(None))
        syncer.deliver(version(1, adapter), trainer.canary(adapter))
        lose(engine, store)
        syncer.redeliver(0)
        name = adapters(engine)[0] if mode == "adapter" else "base"
        assert distance(flat(answered(engine, name)), flat(trainer.scores(adapter))) < EXACT
        assert served_versions(engine) == {"step-000001"}
        lose(engine, store)
        front.lie = proxy.rewrites(proxy.half_zeroed)
        with pytest.raises(FinetuneError) as caught:
            syncer.redeliver(0)
        assert caught.value.code == "sync_unproved"
    finally:
        front.lie = None
        put_back(engine, store)


def lose(engine: VllmEngine, store: VersionStore) -> None:
    """Leave an engine as it is after its start."""
    for name in adapters(engine):
        engine.unload_adapter(0, name)
    put_back(engine, store)


def hides_digests(request: proxy.Request) -> proxy.Answer | None:
    """Have a server look like one without our worker extension."""
    is_ours = request.path == "/collective_rpc" and request.body["method"].startswith("finetune_")
    return proxy.Answer(404) if is_ours else None
