"""One rank of a training: its device, threads and heartbeat, then the method's own function; and how it failed.

python -m finetune.rank RUN_DIR RANK SIZE RENDEZVOUS      what launch starts, once for each rank
torchrun --nproc-per-node N -m finetune.rank RUN_DIR      each of torchrun's processes is a rank
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finetune.errors import FinetuneError, Problems
from finetune.knobs import build
from finetune.methods import method_named
from finetune.model.source import resolve_source
from finetune.parallel.profile import read_profile
from finetune.parallel.shard import Sharding
from finetune.parallel.world import World, joined_world
from finetune.records import Journal, StopFlag, TrainResult, jsonable, to_json, write_atomically
from finetune.train.step import Job


def read_job(run_dir: Path) -> tuple[Job, str]:
    """Return the job that RUN_DIR/plan.json describes, and the dotted name of the function that trains it."""
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    method = method_named(plan["method"])
    config = build(method.config, {name: setting["value"] for name, setting in plan["settings"].items()})
    source = resolve_source(config.model, config.revision, config.trust_remote_code, download=False)
    profile = read_profile(config.profile) if config.profile else None
    kind = profile.kind if profile else config.parallel
    sharding = Sharding(kind, profile.reshard, profile.cpu_offload) if profile else Sharding(kind)
    places = plan.get("parallel", {})
    job = Job(
        config,
        source,
        sharding,
        Path(plan["prepared"]),
        run_dir,
        engines=tuple(places.get("engines", ())),
        devices=tuple(device["id"] for device in places.get("devices", ())),
    )
    return job, method.train


def run_rank(run_dir: Path, rank: int, size: int, store: dist.Store | None, stop: StopFlag) -> TrainResult:
    """Train as one rank. Without a store several ranks meet where the environment says (torchrun's)."""
    journal = Journal(run_dir, rank)
    journal.heartbeat("starting", step=0)
    job, train_name = read_job(run_dir)
    config = job.config
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // local_size))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    module, name = train_name.split(":")
    train = getattr(importlib.import_module(module), name)
    if size == 1:
        return _trained(train, job, World(0, 1, device), journal, stop)
    with joined_world(rank, size, device, config.distributed_timeout, store) as world:
        return _trained(train, job, world, journal, stop)


def _trained(train: Any, job: Job, world: World, journal: Journal, stop: StopFlag) -> TrainResult:
    result: TrainResult = train(job, world, journal, stop)
    if world.rank == 0:
        write_atomically(job.run_dir / "heartbeat" / "result.json", to_json(jsonable(result)))
    journal.heartbeat("done", done=True)
    return result


def error_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "heartbeat" / f"rank{rank}.error.json"


def describe(error: Exception, rank: int) -> dict[str, Any]:
    """Return an exception as the outcome's error: its code where it is one of ours, else the kind its text shows."""
    first = error.errors[0] if isinstance(error, Problems) else error
    text = "".join(traceback.format_exception(error))
    if isinstance(first, FinetuneError):
        code, message, evidence = first.code, first.message, first.evidence
    else:
        code, message, evidence = _kind(first), f"{type(first).__name__}: {str(first)[:1000]}", {}
    collective = any(
        word in text for word in ("gloo", "Gloo", "NCCL", "DistBackendError", "Connection closed by peer")
    )
    return {
        "code": code,
        "message": message,
        "evidence": evidence,
        "rank": rank,
        "traceback": text[-4000:],
        "time": time.time(),
        "is_collective": collective and not isinstance(first, FinetuneError),
    }


def _kind(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in text
        or "out of memory" in text
    ):
        return "out_of_memory"
    if (isinstance(error, OSError) and error.errno == 28) or "No space left on device" in text:
        return "disk_full"
    return "missing_package" if isinstance(error, ImportError) else "training_failed"


def main() -> None:
    run_dir = Path(sys.argv[1]).resolve()
    stop = StopFlag()
    stop.listen()
    if len(sys.argv) == 2:
        sys.exit(_as_torchruns_rank(run_dir, stop))
    rank, size = int(sys.argv[2]), int(sys.argv[3])
    # The ranks of one node talk over the loopback interface, unless the user has chosen another one.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(sys.argv[4], size) if size > 1 else None
    if not _guarded(run_dir, rank, size, store, stop):
        sys.stderr.flush()
        os._exit(1)  # a failed rank must not wait in the exit handlers of a group whose peers have gone


def _as_torchruns_rank(run_dir: Path, stop: StopFlag) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0 if _guarded(run_dir, rank, size, None, stop) else 1


def _guarded(run_dir: Path, rank: int, size: int, store: dist.Store | None, stop: StopFlag) -> bool:
    """Train and return whether it went well; an error is left beside the heartbeat for whoever reports the run."""
    try:
        run_rank(run_dir, rank, size, store, stop)
        return True
    except Exception as error:
        if not (isinstance(error, FinetuneError) and error.code == "stopped"):
            traceback.print_exc()
        write_atomically(error_path(run_dir, rank), to_json(describe(error, rank)))
        return False


if __name__ == "__main__":
    main()
