"""A delivery to servers of which one may have died since it was asked last, and what is told of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.config import GrpoConfig
from finetune.errors import FinetuneError
from finetune.model.source import resolve_source
from finetune.rollout.canary import Canary
from finetune.rollout.fleet import Fleet
from finetune.rollout.server import ServerSettings
from finetune.rollout.sync import SyncReport
from finetune.rollout.versions import base_version
from finetune.train.delivery import FleetDelivery, PolicyVersion
from tests.rollout.stub_server import Stub, logprob_of
from tests.rollout.test_proving import Store, adapter
from tests.rollout.test_recovery import Restartable

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


class Ready(Restartable):
    """A stand-in for a server, up from the beginning."""

    def wait_ready(self, beat: Callable[[], None] = lambda: None) -> float:
        return 0.0


def moved_under_an_adapter() -> Stub:
    """A server whose log-probs lie half a nat lower under any adapter."""

    def lie(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        for entry in answer["prompt_logprobs"] or [None]:
            for one in (entry or {}).values():
                one["logprob"] -= 0.5 * (body["model"] != "base")
        return answer

    return Stub(lie=lie)


def test_of_a_restart_is_told_which_version_was_proved_there_how_and_by_what_margin(tmp_path: Path) -> None:
    """The server dies; the next one gets the adapter again. Its log-probs are the adapter's to 7 digits, the base 0.5 off."""
    (tmp_path / "config.json").write_text("{}")
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    own = [logprob_of(token) for token in ids[1:]]
    trained = [value - 0.5 for value in own]
    first, second = moved_under_an_adapter(), moved_under_an_adapter()
    server = Ready(ServerSettings(tmp_path, tmp_path / "log", 64, 8), [first, second])
    config = GrpoConfig(model="builtin:tiny", data=["x"], sync="adapter", engine="vllm", device="cpu")
    fleet = Fleet(config, resolve_source("builtin:tiny"), Store(), [server])  # type: ignore[arg-type]
    told: list[tuple[str, dict[str, Any]]] = []
    engine, syncer = fleet.connect(lambda doing: None, lambda kind, **facts: told.append((kind, facts)))
    try:
        first.lacking.add("/health")
        assert engine.revive()
        assert told == [("engine_restarted", {"engine": 0})]  # nothing was delivered yet
        syncer.deliver(base_version(), Canary([ids], lambda _: [own], lambda _: [own]))
        syncer.deliver(adapter(1), Canary([ids], lambda _: [trained], lambda _: [own]))
        told.clear()
        server.stubs = iter([moved_under_an_adapter()])
        second.lacking.add("/health")
        assert engine.revive()
        ((kind, facts),) = told
        assert (kind, facts["engine"], facts["sync_version"]) == ("engine_restarted", 0, "step-000001")
        assert (facts["sync_method"], facts["sync_attempts"]) == ("direct", 1)
        assert facts["sync_acknowledged"] == ["step-000001"]
        assert facts["sync_margin"]["to_new"] < 1e-6
        assert facts["sync_margin"]["to_old"] == pytest.approx(0.5, abs=1e-6)
        assert facts["sync_margin"]["ratio"] > 1000
    finally:
        engine.close()
        server.stop()


def test_a_delivery_tells_of_time_proof_and_margin() -> None:
    """Names of issue 3, item 8."""
    names = {"sync_method", "sync_version", "sync_s", "sync_proof_s", "sync_margin"}
    assert names <= delivered(Engine(False), Sync()).keys()
