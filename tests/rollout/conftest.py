"""Fixtures of the rollout tests: settings of a server, a stand-in for one, and an engine on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.rollout.server import ServerSettings
from finetune.rollout.vllm import VllmEngine
from tests.rollout.stub_server import VOCAB, Stub, StubServer


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    (tmp_path / "config.json").write_text("{}")
    return ServerSettings(
        tmp_path, tmp_path / "logs" / "vllm-0-0.log", max_model_len=128, concurrency=16, start_timeout_s=20
    )


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    with StubServer(stub):
        yield stub


@pytest.fixture
def engine(stub: Stub) -> Iterator[VllmEngine]:
    engine = VllmEngine([stub.url], vocab_size=VOCAB, timeout_s=20, concurrency=8)
    stub.asked.clear()
    yield engine
    engine.close()
