"""Servers in fp32 and bf16, one of each kind for all tests, each behind a proxy of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from finetune.model.source import resolve_source
from finetune.rollout.server import ManagedServer
from finetune.rollout.sync import Syncer
from finetune.rollout.versions import VersionStore
from finetune.rollout.vllm import VllmEngine
from tests.rollout.delivery.engines import (
    MODEL,
    ROUGH,
    ROUGH_VOCAB,
    VOCAB,
    adapters,
    put_back,
    start,
)
from tests.rollout.delivery.policies import Trainer
from tests.rollout.delivery.proxy import Proxy


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedServer]:
    server = start(MODEL, "float32", tmp_path_factory.mktemp("server"))
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def trainer() -> Trainer:
    return Trainer(MODEL, torch.float32)


@pytest.fixture
def front(server: ManagedServer) -> Iterator[Proxy]:
    assert server.url
    with Proxy(server.url) as front:
        yield front


@pytest.fixture
def engine(front: Proxy) -> Iterator[VllmEngine]:
    engine = VllmEngine([front.url], vocab_size=VOCAB, timeout_s=120, concurrency=8)
    yield engine
    front.lie = None
    for name in set(adapters(engine)) - set(front.pretended):
        engine.unload_adapter(0, name)
    engine.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionStore]:
    store = VersionStore(resolve_source(MODEL), torch.float32, "run", tmp_path)
    yield store
    store.close()


@pytest.fixture
def merged(engine: VllmEngine, store: VersionStore, front: Proxy) -> Iterator[Syncer]:
    """A syncer of merged weights on a server that gets its own weights back afterwards."""
    syncer = Syncer(engine, store, "merged", retries=1)
    yield syncer
    front.lie = None
    put_back(engine, store)


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedServer]:
    server = start(MODEL, "float32", tmp_path_factory.mktemp("second"))
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def rough(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedServer]:
    """A server in bf16, whose log-probs differ from ours by more than a small step changes them."""
    server = start(ROUGH, "bfloat16", tmp_path_factory.mktemp("rough"))
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def rough_trainer() -> Trainer:
    return Trainer(ROUGH, torch.bfloat16)


@pytest.fixture
def rough_front(rough: ManagedServer) -> Iterator[Proxy]:
    assert rough.url
    with Proxy(rough.url) as front:
        yield front


@pytest.fixture
def rough_engine(rough_front: Proxy) -> Iterator[VllmEngine]:
    engine = VllmEngine([rough_front.url], vocab_size=ROUGH_VOCAB, timeout_s=120, concurrency=8)
    yield engine
    rough_front.lie = None
    for name in set(adapters(engine)) - set(rough_front.pretended):
        engine.unload_adapter(0, name)
    engine.close()


@pytest.fixture
def rough_store(tmp_path: Path) -> Iterator[VersionStore]:
    store = VersionStore(resolve_source(ROUGH), torch.bfloat16, "rough", tmp_path)
    yield store
    store.close()
