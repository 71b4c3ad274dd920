"""A delivery to servers of which one may have died since it was asked last."""

from typing import Any

import pytest

from finetune.errors import FinetuneError
from finetune.rollout.canary import Canary
from finetune.rollout.sync import SyncReport
from finetune.train.delivery import FleetDelivery, PolicyVersion

BASE = PolicyVersion(0, "base", "digest", {})
CANARY = Canary([[1, 2]], lambda _: [[0.0]], lambda _: [[0.0]])


class Engine:
    """Says of each look whether a server had to be started again."""

    def __init__(self, *looks: bool) -> None:
        self.looks = list(looks)

    def revive(self) -> bool:
        return self.looks.pop(0)


class Sync:
    """Fails with these codes, one delivery each, and then delivers."""

    mode = "adapter"

    def __init__(self, *codes: str) -> None:
        self.codes, self.deliveries = list(codes), 0

    def deliver(self, version: Any, canary: Canary) -> SyncReport:
        self.deliveries += 1
        if self.codes:
            raise FinetuneError(self.codes.pop(0), "no")
        return SyncReport(version.name, "base")


def delivered(engine: Engine, syncer: Sync) -> dict[str, Any]:
    return FleetDelivery(None, engine, syncer).deliver(BASE, CANARY)  # type: ignore[arg-type]


def test_servers_are_looked_at_before_a_delivery() -> None:
    engine, syncer = Engine(True), Sync()
    assert delivered(engine, syncer)["sync_version"] == "base"
    assert (engine.looks, syncer.deliveries) == ([], 1)


def test_a_server_that_dies_during_a_delivery_is_started_again_and_gets_it_once_more() -> None:
    engine, syncer = Engine(False, True), Sync("sync_unproved")
    assert delivered(engine, syncer)["sync_version"] == "base"
    assert (engine.looks, syncer.deliveries) == ([], 2)


def test_a_version_that_living_servers_do_not_prove_is_not_delivered_again() -> None:
    engine, syncer = Engine(False, False), Sync("sync_unproved")
    with pytest.raises(FinetuneError, match="no"):
        delivered(engine, syncer)
    assert syncer.deliveries == 1


def test_another_failure_is_no_reason_to_look_again() -> None:
    engine, syncer = Engine(False), Sync("disk_full")
    with pytest.raises(FinetuneError) as caught:
        delivered(engine, syncer)
    assert caught.value.code == "disk_full"
    assert engine.looks == []
