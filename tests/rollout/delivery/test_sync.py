"""Delivery of adapters to real vLLM servers: what was proved is what answers, and no lie on the way there passes."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.model.source import resolve_source
from finetune.rollout.canary import distance
from finetune.rollout.server import ManagedServer
from finetune.rollout.sync import Syncer
from finetune.rollout.versions import VersionStore, base_version
from finetune.rollout.vllm import VllmEngine
from tests.rollout.delivery import proxy
from tests.rollout.delivery.engines import (
    EXACT,
    VOCAB,
    adapters,
    answered,
    flat,
    put_back,
    served_versions,
)
from tests.rollout.delivery.policies import Trainer, version
from tests.rollout.delivery.proxy import Proxy

pytestmark = pytest.mark.slow


def test_versions_are_served_exactly_and_leave_the_base_as_it_was(
    engine: VllmEngine, store: VersionStore, trainer: Trainer
) -> None:
    syncer = Syncer(engine, store, "adapter")
    before = engine.weight_digests(0)
    assert before
    first = syncer.deliver(base_version(), trainer.canary(None))
    assert (first.method, first.attempts) == ("base", 1)
    assert first.noise is not None
    assert first.noise < EXACT
    assert served_versions(engine) == {"base"}
    previous: dict[str, Tensor] | None = None
    for number in (1, 2, 3):
        adapter = trainer.adapter(number)
        report = syncer.deliver(version(number, adapter), trainer.canary(adapter, previous))
        assert (report.version, report.method, report.attempts) == (f"step-{number:06d}", "direct", 1)
        assert report.margin is not None
        assert report.margin.ratio > 100
        (name,) = adapters(engine)  # the one before is unloaded
        assert report.acknowledged == (name,)
        assert distance(flat(answered(engine, name)), flat(trainer.scores(adapter))) < EXACT
        assert served_versions(engine) == {f"step-{number:06d}"}
        previous = adapter
    assert engine.weight_digests(0) == before
    assert len([path for path in store.folder.iterdir() if path.name.startswith("v")]) == 1


def test_a_skipped_step_and_a_version_of_zeros_load_nothing(
    engine: VllmEngine, store: VersionStore, trainer: Trainer, front: Proxy
) -> None:
    syncer = Syncer(engine, store, "adapter")
    zeros = {name: tensor * (".lora_A." in name) for name, tensor in trainer.adapter(1).items()}
    assert syncer.deliver(version(0, zeros), trainer.canary(None)).method == "base"
    adapter = trainer.adapter(1)
    syncer.deliver(version(1, adapter), trainer.canary(adapter))
    asked = len(front.asked)
    assert syncer.deliver(version(1, adapter), trainer.canary(adapter)).method == "unchanged"
    assert len(front.asked) == asked
    assert syncer.deliver(version(2, zeros), trainer.canary(None, adapter)).version == "base"
    assert served_versions(engine) == {"base"}
    assert adapters(engine) == []


def test_older_versions_stay_as_long_as_they_are_wanted(
    engine: VllmEngine, store: VersionStore, trainer: Trainer
) -> None:
    syncer = Syncer(engine, store, "adapter", keep=1)
    syncer.deliver(base_version(), trainer.canary(None))
    previous = None
    for number in (1, 2, 3):
        adapter = trainer.adapter(number)
        syncer.deliver(version(number, adapter), trainer.canary(adapter, previous))
        previous = adapter
    assert [name[:11] for name in adapters(engine)] == ["step-000002", "step-000003"]


@pytest.mark.parametrize(
    ("lying", "has_extension"),
    [
        ("drops", True),
        ("previous", True),
        ("zeroed", True),
        ("prefixed", True),
        ("drops", False),
        ("zeroed", False),
        ("nothing", False),
    ],
)
def test_lies_about_an_adapter_do_not_pass(
    engine: VllmEngine, store: VersionStore, trainer: Trainer, front: Proxy, lying: str, has_extension: bool
) -> None:
    front.lie = None if has_extension else front.without_extension
    syncer = Syncer(engine, store, "adapter", retries=1)
    old, new = trainer.adapter(1), trainer.adapter(2)
    syncer.deliver(base_version(), trainer.canary(None))
    syncer.deliver(version(1, old), trainer.canary(old))
    copy = store.folder / "old"
    shutil.copytree(next(store.folder.glob("v000001*")), copy)
    lies: dict[str, proxy.Lie] = {
        "drops": front.drops_loads,
        "previous": proxy.loads_instead(copy),
        "zeroed": proxy.rewrites(proxy.half_zeroed),
        "prefixed": proxy.rewrites(proxy.wrongly_prefixed),
        "nothing": lambda request: None,
    }
    lie = lies[lying]
    front.lie = lie if has_extension else lambda request: front.without_extension(request) or lie(request)
    if lying == "nothing":
        assert syncer.deliver(version(2, new), trainer.canary(new, old)).method == "direct"
        return
    with pytest.raises(FinetuneError) as caught:
        syncer.deliver(version(2, new), trainer.canary(new, old))
    assert caught.value.code == "sync_unproved"
    loads = [request.body for request in front.asked if request.path == "/v1/load_lora_adapter"]
    assert len({body["lora_name"] for body in loads}) == len(loads) == 3  # a new name for each attempt
    front.lie = None
    assert engine.version == "step-000001"
    assert served_versions(engine) == {"step-000001"}
    assert not [name for name in adapters(engine) if name.startswith("step-000002")]


def test_keys_that_fit_no_module_of_the_engine_are_refused(
    engine: VllmEngine, store: VersionStore, trainer: Trainer
) -> None:
    syncer = Syncer(engine, store, "adapter")
    syncer.deliver(base_version(), trainer.canary(None))
    adapter = trainer.adapter(1)
    strange = {name.replace("layers.0", "layers.9"): tensor for name, tensor in adapter.items()}
    with pytest.raises(FinetuneError) as caught:
        syncer.deliver(version(1, strange), trainer.canary(adapter))
    assert caught.value.code == "bad_adapter"


def test_another_model_is_no_base(engine: VllmEngine, store: VersionStore) -> None:
    other = Trainer("builtin:tiny?seed=6&tied=1", torch.float32)
    for mode in ("adapter", "merged"):
        syncer = Syncer(engine, store, mode, retries=0)  # type: ignore[arg-type]
        if mode == "merged":
            store = VersionStore(
                resolve_source("builtin:tiny?seed=6&tied=1"), torch.float32, "other", store.folder
            )
            syncer = Syncer(engine, store, "merged", retries=0)
        with pytest.raises(FinetuneError) as caught:
            syncer.deliver(base_version(), other.canary(None))
        assert caught.value.code == "sync_unproved"


# Two servers of their own for each mode: the second is long, and `make proof ROW=long-tests` runs it.
@pytest.mark.parametrize("mode", ["adapter", pytest.param("merged", marks=pytest.mark.proof)])
def test_a_version_that_one_of_two_engines_missed_is_active_on_none(
    server: ManagedServer,
    front: Proxy,
    store: VersionStore,
    trainer: Trainer,
    second: ManagedServer,
    mode: str,
) -> None:
    assert second.url
    with Proxy(second.url) as other:
        engine = VllmEngine([front.url, other.url], vocab_size=VOCAB, timeout_s=120, concurrency=8)
        syncer = Syncer(engine, store, mode, retries=1)  # type: ignore[arg-type]
        old, new = trainer.adapter(1), trainer.adapter(2)
        try:
            syncer.deliver(base_version(), trainer.canary(None))
            report = syncer.deliver(version(1, old), trainer.canary(old))
            assert len(report.acknowledged) == 2
            held = [engine.weight_digests(index) for index in (0, 1)]
            other.lie = other.drops_loads if mode == "adapter" else proxy.drops_reloads
            with pytest.raises(FinetuneError) as caught:
                syncer.deliver(version(2, new), trainer.canary(new, old))
            assert caught.value.code == "sync_unproved"
            assert "engine 1" in caught.value.message
            other.lie = None
            assert served_versions(engine) == {"step-000001"}
            assert [
                engine.weight_digests(index) for index in (0, 1)
            ] == held  # also where the first had changed over
            report = syncer.deliver(version(3, new), trainer.canary(new, old))
            assert (report.attempts, len(report.acknowledged)) == (1, 2)
            assert served_versions(engine) == {"step-000003"}
        finally:
            if mode == "merged":
                put_back(engine, store)
            engine.close()
