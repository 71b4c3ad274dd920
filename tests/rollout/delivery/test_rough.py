"""Delivery in bf16, where trainer and engine differ by more than a step changes."""

from __future__ import annotations

import shutil

import pytest

from finetune.errors import FinetuneError
from finetune.rollout.sync import Syncer
from finetune.rollout.versions import VersionStore, base_version
from finetune.rollout.vllm import VllmEngine
from tests.rollout.delivery import policies, proxy
from tests.rollout.delivery.engines import (
    adapters,
    served_versions,
)
from tests.rollout.delivery.policies import Trainer, version
from tests.rollout.delivery.proxy import Proxy

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("lying", ["nothing", "drops", "previous", "zeroed"])
def test_a_change_below_the_noise_is_proved_by_what_the_kernels_hold(
    rough_engine: VllmEngine,
    rough_store: VersionStore,
    rough_trainer: Trainer,
    rough_front: Proxy,
    lying: str,
) -> None:
    syncer = Syncer(rough_engine, rough_store, "adapter", retries=0)
    old = rough_trainer.adapter(1, size=0.01)
    new = policies.moved(old, 0.005)
    syncer.deliver(base_version(), rough_trainer.canary(None))
    syncer.deliver(version(1, old), rough_trainer.canary(old))
    copy = rough_store.folder / "old"
    shutil.copytree(next(rough_store.folder.glob("v000001*")), copy)
    lies: dict[str, proxy.Lie] = {
        "nothing": lambda request: None,
        "drops": rough_front.drops_loads,
        "previous": proxy.loads_instead(copy),
        "zeroed": proxy.rewrites(lambda tensors: tensors | {min(tensors): tensors[min(tensors)] * 0}),
    }
    rough_front.lie = lies[lying]
    if lying == "nothing":
        report = syncer.deliver(version(2, new), rough_trainer.canary(new, old))
        assert report.method == "digest"
        assert report.margin is not None
        assert not report.margin.proves  # log-probs alone could not tell
        assert served_versions(rough_engine) == {"step-000002"}
        return
    with pytest.raises(FinetuneError) as caught:
        syncer.deliver(version(2, new), rough_trainer.canary(new, old))
    assert caught.value.code == "sync_unproved"


@pytest.mark.parametrize("lying", ["nothing", "drops", "zeroed"])
def test_without_our_extension_a_probe_at_a_larger_scale_proves_a_small_version(
    rough_engine: VllmEngine,
    rough_store: VersionStore,
    rough_trainer: Trainer,
    rough_front: Proxy,
    lying: str,
) -> None:
    rough_front.lie = rough_front.without_extension
    syncer = Syncer(rough_engine, rough_store, "adapter", retries=0)
    small = rough_trainer.adapter(1, size=0.01)
    syncer.deliver(base_version(), rough_trainer.canary(None))
    lies: dict[str, proxy.Lie] = {
        "nothing": lambda request: None,
        "drops": rough_front.drops_loads,
        "zeroed": proxy.rewrites(proxy.half_zeroed),
    }
    lie = lies[lying]
    rough_front.lie = lambda request: rough_front.without_extension(request) or lie(request)
    if lying == "nothing":
        report = syncer.deliver(version(1, small), rough_trainer.canary(small))
        assert report.method == "probe"
        assert report.margin is not None
        assert report.margin.factor > 1
        assert report.margin.proves
        assert len(adapters(rough_engine)) == 1  # the probe is gone
        return
    with pytest.raises(FinetuneError) as caught:
        syncer.deliver(version(1, small), rough_trainer.canary(small))
    assert caught.value.code == "sync_unproved"
