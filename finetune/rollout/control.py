"""Ask one vLLM server for anything but completions: adapters, weights, versions, health, and whether it is fit for training.

Rule: nothing is taken for done without the server's own acknowledgement, and a server that somebody else started is
judged by what it does, not by what it was told.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from finetune.errors import FinetuneError
from finetune.rollout.answers import read_candidates, read_stamp, trial_request

GENERATE = "/inference/v1/generate"
DIGESTS = "finetune_weight_digests"  # method of the worker extension
OLDEST = (0, 30)  # of vLLM
_TRIAL_PROMPTS = ([3, 1, 2], [7, 5, 6, 4], [2, 9, 8], [11, 12, 10, 1, 13])
_CANDIDATES = 5
_LEAST_GAP = 1e-3  # nats between candidates, below which temperature 0.5 could not be told from 1
_FLOOR = -9998.0
_PAUSE_S = 0.05


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


class Control:
    """One server. base: the name of its model without adapters; stamp: the name of its weights as it last said it."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.base = ""
        self.stamp: str | None = None
        self.origin: str | None = None  # the stamp when we first saw the server
        self.context = 0
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            trust_env=not is_loopback(url),  # no proxy may come between us and a server on this machine
            # After an error inside it the server closes the connection that its next request would come by.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def close(self) -> None:
        self._client.close()

    def connect(self) -> None:
        """Learn the names of the model and of the weights, and the context; raises FinetuneError(engine_failed)."""
        models = self._models()
        own = [model for model in models if not model.get("parent")]
        if not own:
            raise FinetuneError("engine_failed", f"the engine at {self.url} serves no model", url=self.url)
        self.base, self.context = own[0]["id"], int(own[0].get("max_model_len") or 0)
        answer = self._send("GET", "/weight_info", may_lack=True)
        self.stamp = self.origin = str(answer.json()["weight_version"]) if answer else None

    def _models(self) -> list[dict[str, Any]]:
        answer = self._send("GET", "/v1/models").json()
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list) or not all(
            isinstance(model, dict) and "id" in model for model in models
        ):
            raise FinetuneError("engine_failed", f"{self.url}/v1/models names no models", url=self.url)
        return models

    def _send(self, method: str, path: str, body: Any = None, may_lack: bool = False) -> Any:
        """Return the response; raise FinetuneError(engine_failed) for any that is no success (None for a 404 that may be)."""
        try:
            response = self._client.request(method, self.url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            text = f"no answer from the engine at {self.url}{path}: {type(error).__name__} {error}"
            raise FinetuneError("engine_failed", text, url=self.url) from error
        if may_lack and response.status_code == 404:
            return None
        if response.status_code != 200:
            text = f"the engine at {self.url}{path} answered {response.status_code}: {response.text[:500]}"
            raise FinetuneError("engine_failed", text, url=self.url, status=response.status_code)
        return response

    def health(self) -> bool:
        try:
            return self._client.get(f"{self.url}/health", timeout=10.0).status_code == 200
        except httpx.HTTPError:
            return False

    def list_models(self) -> list[str]:
        return [model["id"] for model in self._models()]

    def load_adapter(self, name: str, folder: Path) -> None:
        self._send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def call_workers(self, method: str, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        body = {"method": method, "kwargs": kwargs} | ({"timeout": timeout_s} if timeout_s else {})
        answer = self._send("POST", "/collective_rpc", body)
        return answer.json()["results"] if answer.content else []

    def reload_weights(self, folder: Path) -> None:
        self.call_workers("reload_weights", weights_path=str(folder))

    def reset_prefix_cache(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._send("POST", "/reset_prefix_cache").json().get("success") is not True:
            if time.monotonic() > deadline:
                text = f"the engine at {self.url} kept its prefix cache for {limit_s:g} s: requests still hold blocks of it"
                raise FinetuneError("engine_failed", text, url=self.url)
            time.sleep(_PAUSE_S)

    def stamp_version(self, version: str) -> None:
        self._send("POST", "/update_weight_version", {"new_version": version})
        self.read_stamp()
        if self.stamp != version:
            text = (
                f"the engine at {self.url} names its weights {self.stamp!r} after they were named {version!r}"
            )
            raise FinetuneError("engine_failed", text, url=self.url)

    def read_stamp(self) -> str:
        self.stamp = str(self._send("GET", "/weight_info").json()["weight_version"])
        return self.stamp

    def weight_digests(self) -> dict[str, str] | None:
        try:
            results = self.call_workers(DIGESTS)
        except FinetuneError as error:
            if error.evidence.get("status") == 404 or "has no attribute" in error.message:
                return None
            raise
        if len(results) != 1 or not isinstance(results[0], dict):
            text = f"the engine at {self.url} answered with digests of {len(results)} workers; one can be compared"
            raise FinetuneError("engine_failed", text, url=self.url)
        return results[0]

    # Whether a server that we did not start can be trained with.

    def check_fitness(self, sync: Literal["adapter", "merged"] | None, lora_rank: int | None) -> None:
        """Raise FinetuneError(engine_unfit) that names the argument or variable that the server lacks."""
        version = str(self._send("GET", "/version").json().get("version"))
        found = re.match(r"(\d+)\.(\d+)", version)
        if found and (int(found[1]), int(found[2])) < OLDEST:
            self._refuse(f"it is vLLM {version}; {'.'.join(map(str, OLDEST))} or later is needed")
        self._check_distribution()
        if sync == "merged" and self._send("GET", "/weight_info", may_lack=True) is None:
            self._refuse(
                "its weights cannot be reloaded: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if sync == "adapter":
            self._check_adapters(lora_rank)

    def _refuse(self, text: str) -> None:
        raise FinetuneError("engine_unfit", f"vllm_url {self.url}: {text}", url=self.url, setting="vllm_url")

    def _check_distribution(self) -> None:
        """Refuse a server whose log-probs are not those of the distribution that it draws from.

        At temperature 0.5 the log-probs of two tokens lie twice as far apart as at 1; those before temperature stay.
        """
        best: tuple[dict[int, float], dict[int, float]] | None = None
        for prompt in _TRIAL_PROMPTS:
            first, second = self._candidates(prompt, 1.0), self._candidates(prompt, 0.5)
            if min([*first.values(), *second.values()]) < _FLOOR:
                self._refuse(
                    "it cuts off unlikely tokens (top-k, top-p or min-p) although requests ask for all"
                )
            if best is None or _gap(first, second)[0] > _gap(*best)[0]:
                best = first, second
        assert best is not None
        at_one, at_half = _gap(*best)
        if at_one < _LEAST_GAP:
            self._refuse("the log-probs of its most likely tokens do not differ, so they cannot be checked")
        if not 1.8 < at_half / at_one < 2.2:
            ratio = f"halving the temperature widens them {at_half / at_one:.2f} times, not twice"
            self._refuse(
                f"its log-probs are not those after temperature ({ratio}): add --logprobs-mode processed_logprobs"
            )

    def _candidates(self, prompt: list[int], temperature: float) -> dict[int, float]:
        try:
            answer = self._send("POST", GENERATE, trial_request(prompt, self.base, temperature, _CANDIDATES))
        except FinetuneError as error:
            if error.evidence.get("status") in (403, 404):
                self._refuse("it does not serve token ids: start it with --enable-scale-out")
            raise
        found = read_candidates(answer.json())
        self.stamp = self.stamp or read_stamp(answer.json())
        self.origin = self.origin or self.stamp
        if not found or len(found) < 2:
            self._refuse("its answers have no log-probs of candidates: leave --max-logprobs at its default")
        return found or {}

    def _check_adapters(self, lora_rank: int | None) -> None:
        # The path takes POST only, so a server that has it answers 405.
        if self._client.get(f"{self.url}/v1/load_lora_adapter").status_code == 404:
            what = "start it with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
            self._refuse(f"adapters cannot be loaded: {what}")
        info = self._send("GET", "/server_info?config_format=json", may_lack=True)
        if info is None:  # told only in development mode; else the first load says it
            return
        lora = info.json()["vllm_config"].get("lora_config")
        if lora is None:
            self._refuse("adapters cannot be loaded: start it with --enable-lora")
        elif lora_rank is not None and lora["max_lora_rank"] < lora_rank:
            most = f"it serves adapters up to rank {lora['max_lora_rank']}, this run trains rank {lora_rank}"
            self._refuse(f"{most}: start it with a higher --max-lora-rank")


def _gap(first: dict[int, float], second: dict[int, float]) -> tuple[float, float]:
    """Return how far the most and the least likely of the common candidates lie apart, in each of the two."""
    common = sorted(first.keys() & second.keys(), key=first.__getitem__)
    return (
        (first[common[-1]] - first[common[0]], second[common[-1]] - second[common[0]])
        if common
        else (0.0, 0.0)
    )
