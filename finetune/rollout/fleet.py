"""The engines of a node together: started side by side, joined to one client, given weights by one syncer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from finetune.config import GrpoConfig
from finetune.model.adapter import read_adapter_config
from finetune.model.footprint import OWN_DEVICE_SHARE
from finetune.model.source import Source, model_facts
from finetune.rollout.server import ManagedServer, ServerSettings
from finetune.rollout.sync import Syncer
from finetune.rollout.versions import VersionStore
from finetune.rollout.vllm import VllmEngine

_SERVED = {"bf16": ("bfloat16", torch.bfloat16), "fp32": ("float32", torch.float32)}


@dataclass
class Fleet:
    """Servers on their way up, or the addresses of running ones, and the files of versions that they will be given."""

    config: GrpoConfig
    source: Source
    store: VersionStore
    servers: list[ManagedServer | str]
    engine: VllmEngine | None = None
    syncer: Syncer | None = None

    def connect(self, beat: Callable[[str], None], tell: Callable[..., None]) -> tuple[VllmEngine, Syncer]:
        """Wait for the servers and return what samples from them and what brings weights to them.

        tell(kind, **facts): is told of what happens to them; of a restart, how the weights were proved there.

        Raises FinetuneError: engine_failed and its kin for a server that does not come up, engine_unfit for a running one
        that would not give exact tokens.
        """
        for server in self.servers:
            if isinstance(server, ManagedServer):
                server.wait_ready(lambda: beat("waiting for the engines to start"))
        mode = sync_mode(self.config)
        self.engine = VllmEngine(
            self.servers,
            vocab_size=model_facts(self.source).vocab_rows,
            timeout_s=self.config.request_timeout,
            concurrency=self.config.concurrency,
            sync=mode,
            lora_rank=lora_rank(self.config) if mode == "adapter" else None,
            on_restart=lambda index: self._redeliver(index, tell),
            beat=lambda: beat("sampling"),
        )
        keep = self.config.max_staleness + 1 if self.config.max_staleness else 0
        self.syncer = Syncer(self.engine, self.store, mode, self.config.sync_retries, keep)
        return self.engine, self.syncer

    def _redeliver(self, index: int, tell: Callable[..., None]) -> None:
        assert self.syncer is not None, "servers are restarted once they have served"
        report = self.syncer.redeliver(index)
        tell("engine_restarted", engine=index, **(report.facts if report else {}))

    def close(self) -> None:
        """Stop own servers and remove the versions' files."""
        if self.engine is not None:
            self.engine.close()
        for server in self.servers:
            if isinstance(server, ManagedServer):
                server.stop(0.0)
        self.store.close()


def sync_mode(config: GrpoConfig) -> Literal["adapter", "merged"]:
    """Return how weights reach the engines; the plan has decided it, but for plans made by hand."""
    if config.sync != "auto":
        return config.sync
    return "adapter" if config.device == "cuda" and config.tuning == "lora" else "merged"


def lora_rank(config: GrpoConfig) -> int:
    return int(read_adapter_config(config.init_adapter).r) if config.init_adapter else config.lora_rank


def start_fleet(
    config: GrpoConfig,
    source: Source,
    run_dir: Path,
    places: Sequence[dict[str, Any]],
    rank_devices: set[str],
) -> Fleet:
    """Start the servers and return at once. places: index, devices and url of each, as the plan has them."""
    served, dtype = _SERVED[config.dtype]
    store = VersionStore(source, dtype, run_dir.name)
    mode = sync_mode(config)
    assert config.max_length is not None, "the plan decides it"
    servers: list[ManagedServer | str] = []
    for place in places:
        if place.get("url"):
            servers.append(str(place["url"]))
            continue
        shares = bool(rank_devices.intersection(place["devices"]))
        settings = ServerSettings(
            model=store.base_folder,
            log=run_dir / "logs" / f"vllm-0-{place['index']}.log",
            max_model_len=config.max_length,
            concurrency=config.concurrency,
            dtype=served,
            **({"python": config.vllm_python} if config.vllm_python else {}),
            lora_rank=lora_rank(config) if mode == "adapter" else None,
            max_loras=config.max_staleness + 3,
            devices=tuple(place["devices"]),
            tensor_parallel=config.rollout_tp,
            memory_fraction=config.vllm_memory_fraction if shares else OWN_DEVICE_SHARE,
            seed=config.seed,
            threads=os.cpu_count() or 1,
            more=tuple(config.vllm_args),
            start_timeout_s=config.vllm_start_timeout,
        )
        server = ManagedServer(settings)
        server.start()
        servers.append(server)
    return Fleet(config, source, store, servers)
