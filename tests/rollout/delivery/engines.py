"""Real vLLM servers for tests of delivery, and what is asked of them there."""

from __future__ import annotations

from pathlib import Path

from finetune.model.builtin import model_folder, write_model
from finetune.model.source import resolve_source
from finetune.rollout.engine import Call, Completion, Sampling
from finetune.rollout.server import ManagedServer, ServerSettings
from finetune.rollout.versions import VersionStore
from finetune.rollout.vllm import VllmEngine
from tests.rollout.delivery import policies
from tests.rollout.delivery.policies import SEQUENCES

MODEL = "builtin:tiny?seed=5&tied=1"
VOCAB = 328
ROUGH, ROUGH_VOCAB = "builtin:smollm2-135m", 49152  # in bf16
EXACT = 1e-4  # nats: fp32 against fp32


def start(model: str, dtype: str, folder: Path) -> ManagedServer:
    """Start a server and return at once; its log lies in `folder`, and a model without files of its own too."""
    source = resolve_source(model)
    files = folder / "model"
    if source.kind != "tiny":
        files = model_folder(source)
    elif not files.exists():
        write_model(source, files)
    settings = ServerSettings(
        files,
        folder / "log",
        128,
        16,
        dtype=dtype,
        lora_rank=policies.RANK,
        max_loras=4,
        start_timeout_s=400,
    )
    server = ManagedServer(settings)
    server.start()
    return server


def put_back(engine: VllmEngine, store: VersionStore) -> None:
    for index in range(engine.num_servers):
        engine.reload_weights(index, store.base_folder)
        engine.call_workers(index, "finetune_repack_head")
        engine.reset_prefix_cache(index)
        engine.stamp_version(index, "base")


def answered(engine: VllmEngine, name: str) -> list[list[float]]:
    return engine.score(0, SEQUENCES, name)


def flat(scores: list[list[float]]) -> list[float]:
    return [value for row in scores for value in row]


def served_versions(engine: VllmEngine) -> set[str]:
    """Return the versions that two sampled completions of each engine say they come from."""
    calls = [Call([5, 6, 7 + index], count=2) for index in range(engine.num_servers)]
    outcomes = [one for group in engine.sample(calls, Sampling(4, [], 1.0)) for one in group]
    assert all(isinstance(one, Completion) for one in outcomes), outcomes
    return {one.version for one in outcomes if isinstance(one, Completion)}


def adapters(engine: VllmEngine, index: int = 0) -> list[str]:
    return [name for name in engine.list_models(index) if name.startswith(("step-", "probe-"))]
