"""Start vLLM servers of our own, watch over them and say what went wrong: one process per engine.

Rule: a server never outlives the process that started it, serves one model under a name that only we know, and a
failure to start is told by its own log.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

import finetune
from finetune.errors import FinetuneError
from finetune.model.footprint import cache_bytes_per_token, served_cache_gib
from finetune.rollout import guard
from finetune.rollout.engine import BASE_VERSION
from finetune.rollout.serverlog import is_port_taken, read_since, start_failure
from finetune.rules import served_lora_rank

WORKER_EXTENSION = "finetune.rollout.weights.ServedWeights"
GRACE_S = 5.0  # in which a server told to stop may leave by itself
PORT_TRIES = 3
LEAST_BATCH_TOKENS = 4096  # that a server on the CPU takes in at once; a prompt is never split there
POLL_S = 0.25
_OWNED = (
    "model tokenizer host port uds api-key served-model-name generation-config override-generation-config logprobs-mode"
    " enable-scale-out max-model-len dtype enable-lora max-lora-rank max-loras max-cpu-loras worker-extension-cls"
    " tensor-parallel-size pipeline-parallel-size data-parallel-size gpu-memory-utilization seed config quantization"
    " enable-chunked-prefill speculative-config logits-processors enable-sleep-mode ssl-keyfile ssl-certfile root-path"
).split()
# Names of the environment that a server keeps; what a trailing * stands for is any ending. No rank of a launcher, no
# secret but the Hub's. VLLM_API_KEY would lock us out.
_KEPT = (
    "PATH HOME USER LOGNAME LANG LANGUAGE LC_* TZ TMPDIR XDG_CACHE_HOME VIRTUAL_ENV LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH"
    " CUDA_* CUBLAS_* CUDNN_* NVIDIA_* HIP_* ROCR_* ROCM_* HSA_* NCCL_* RCCL_* TORCH_* PYTORCH_* TORCHINDUCTOR_* TRITON_*"
    " FLASHINFER_* MALLOC_* ONEDNN_* DNNL_* HF_* HUGGING_FACE_HUB_TOKEN TRANSFORMERS_* VLLM_*"
).split()
_DROPPED = ("VLLM_API_KEY", "VLLM_PORT", "VLLM_PLUGINS", "VLLM_DP_*")


@dataclass(frozen=True)
class ServerSettings:
    """What a server is started with.

    devices: ids for CUDA_VISIBLE_DEVICES; none is a server on the CPU. lora_rank: of the adapters that will be served;
    None: no adapters. max_loras: adapters that may be loaded at once (max_staleness + 3). extension: class whose methods
    /collective_rpc can call in the server's workers; None: none. more: further arguments as `max-num-batched-tokens=512`.
    """

    model: Path
    log: Path
    max_model_len: int
    concurrency: int
    dtype: str = "bfloat16"
    python: str = sys.executable
    lora_rank: int | None = None
    max_loras: int = 3
    devices: tuple[str, ...] = ()
    tensor_parallel: int = 1
    memory_fraction: float = 0.9
    seed: int = 0
    threads: int = 2
    more: tuple[str, ...] = ()
    start_timeout_s: float = 900.0
    extension: str | None = WORKER_EXTENSION


def server_command(settings: ServerSettings, port: int, nonce: str) -> list[str]:
    """Return the argv of a server. It serves the model as `base` and as `nonce`, by which we know that it is ours.

    Raises FinetuneError(bad_value) for an argument among `more` on which exactness rests.
    """
    values: dict[str, str | int | float | None] = {
        "model": str(settings.model),
        "host": "127.0.0.1",
        "port": port,
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        "max-num-seqs": settings.concurrency,
        "seed": settings.seed,
        # The model's generation_config.json must not fill in what a request leaves open, and log-probs are those of
        # the distribution that was drawn from.
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "enable-scale-out": None,
    }
    if settings.extension:
        values["worker-extension-cls"] = settings.extension
    if settings.lora_rank is not None:
        values |= {"enable-lora": None, "max-lora-rank": served_lora_rank(settings.lora_rank)}
        values |= {"max-loras": settings.max_loras}
    if settings.devices:
        values |= {"tensor-parallel-size": settings.tensor_parallel}
        values |= {"gpu-memory-utilization": settings.memory_fraction}
    else:
        # A seeded request whose prompt is read in pieces kills the CPU backend ("CPU Generator does not use offset").
        values |= {"no-enable-chunked-prefill": None}
        values |= {"max-num-batched-tokens": max(settings.max_model_len, LEAST_BATCH_TOKENS)}
    argv = [settings.python, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in (values | _more(settings)).items():
        argv += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return [*argv, "--served-model-name", BASE_VERSION, nonce]


def _more(settings: ServerSettings) -> dict[str, str | int | float | None]:
    found: dict[str, str | int | float | None] = {}
    for text in settings.more:
        name, sign, value = text.partition("=")
        name = name.strip().lstrip("-").replace("_", "-")
        if not name or name in _OWNED or name.removeprefix("no-") in _OWNED:
            what = (
                f"vllm_args {text}: this argument is the runner's own, exact tokens rest on it; leave it out"
            )
            raise FinetuneError("bad_value", what, setting="vllm_args", argument=name)
        found[name] = value if sign else None
    return found


def server_environment(settings: ServerSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server: an allow-list of `environ` (no ranks, no secrets but HF_*) and what we set."""
    kept = {
        name: value
        for name, value in environ.items()
        if _matches(name, _KEPT) and not _matches(name, _DROPPED)
    }
    fixed = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder; a look at the network could only hang
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        # Threads that spin while they wait would take the cores from the trainer beside it.
        "OMP_NUM_THREADS": str(settings.threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }
    if settings.extension:
        fixed["PYTHONPATH"] = os.pathsep.join(filter(None, [_source_root(settings), kept.get("PYTHONPATH")]))
    if settings.devices:
        return kept | fixed | {"CUDA_VISIBLE_DEVICES": ",".join(settings.devices)}
    cpu = {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib(settings)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return cpu | kept | fixed | {"CUDA_VISIBLE_DEVICES": ""}


def _matches(name: str, patterns: list[str] | tuple[str, ...]) -> bool:
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns
    )


def _source_root(settings: ServerSettings) -> str:
    """Return the folder from which the server imports our worker extension.

    Another Python must not see the other packages of an environment that we are installed in: it gets a link to ours alone.
    """
    package = Path(finetune.__path__[0]).resolve()
    if settings.python == sys.executable or package.parent.name not in ("site-packages", "dist-packages"):
        return str(package.parent)
    link = settings.log.parent / "source" / package.name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(package)
    return str(link.parent)


def cache_gib(settings: ServerSettings) -> int:
    """Return the GiB of a CPU server's key-value cache: all its completions at full length, within a quarter of the memory."""
    config = json.loads((settings.model / "config.json").read_text(encoding="utf-8"))
    per_token = cache_bytes_per_token(
        config.get("text_config", config), 4 if settings.dtype == "float32" else 2
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return served_cache_gib(per_token, settings.max_model_len, settings.concurrency, memory)


class ManagedServer:
    """A server process of our own. `url` is None until it is started and changes with each start (a new port)."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.url: str | None = None
        self._nonce = f"finetune-{secrets.token_hex(8)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: int | None = None
        self._log_start = 0
        self._started_at = 0.0

    def start(self) -> None:
        """Start the process; returns at once. Raises FinetuneError: engine_missing for a Python that is not there, bad_value."""
        if self.is_alive:
            return
        self._started_at = time.monotonic()
        self._spawn()

    def _spawn(self) -> None:
        port = _free_port()
        command = server_command(self.settings, port, self._nonce)
        environment = server_environment(self.settings, os.environ)
        if not Path(self.settings.python).exists():
            text = f"no Python at {self.settings.python} to run vLLM with"
            raise FinetuneError("engine_missing", text, python=self.settings.python)
        self.settings.log.parent.mkdir(parents=True, exist_ok=True)
        # -I: the guard needs the standard library only, and nothing beside it may be taken for a part of it.
        watcher = [sys.executable, "-I", guard.__file__, str(os.getpid()), str(GRACE_S)]
        with open(self.settings.log, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*watcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.settings.log.parent,
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self, beat: Callable[[], None] = lambda: None) -> float:
        """Wait until it serves, calling `beat` meanwhile, and return the seconds since start().

        Raises FinetuneError: engine_missing, engine_out_of_memory, engine_model, engine_timeout, engine_failed, bad_value
        (of vllm_args), with the log's earliest traceback as evidence. A port that was taken meanwhile is replaced.
        """
        tries = 1
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while not self._serves(client):
                beat()
                if not self.is_alive:
                    if tries < PORT_TRIES and is_port_taken(self.log_text()):
                        tries += 1
                        self._spawn()
                        continue
                    raise self.failure()
                if time.monotonic() - self._started_at > self.settings.start_timeout_s:
                    self.stop(0.0)
                    what = f"the engine did not start within {self.settings.start_timeout_s:g} s"
                    raise start_failure("engine_timeout", what, self.log_text(), self.settings.log)
                time.sleep(POLL_S)
        return time.monotonic() - self._started_at

    def _serves(self, client: httpx.Client) -> bool:
        """Whether it answers and is ours: another program may have taken the port between our look and the server's."""
        try:
            if not self.is_alive or client.get(f"{self.url}/health").status_code != 200:
                return False
            answer = client.get(f"{self.url}/v1/models")
            return self._nonce in {model["id"] for model in answer.json()["data"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False

    def log_text(self) -> str:
        """Return what the server wrote since its last start, the end of it where that is much."""
        return read_since(self.settings.log, self._log_start)

    def failure(self) -> FinetuneError:
        """Return what the log says about the end of the process."""
        what = f"the engine ended (exit code {self._exit_code})"
        return start_failure(None, what, self.log_text(), self.settings.log)

    @property
    def is_alive(self) -> bool:
        if self._process is None:
            return False
        if self._process.poll() is None:
            return True
        self._clear()
        return False

    @property
    def pid(self) -> int | None:
        """Process id of the server's guard, which is the id of the server's process group."""
        return self._process.pid if self._process else None

    def _clear(self) -> None:
        """Kill what an ended server left behind: its workers are processes of their own."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._exit_code = process.wait()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End the process and all its children, by force after `grace_s`; does nothing if it does not run."""
        if self._process is not None and grace_s > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._clear()

    def restart(self, beat: Callable[[], None] = lambda: None) -> float:
        """Stop, start and wait until it serves (see wait_ready); the weights are the model's own again."""
        self.stop()
        self.start()
        return self.wait_ready(beat)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
