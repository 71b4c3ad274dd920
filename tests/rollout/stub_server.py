"""A stand-in for a vLLM server over real HTTP, that answers honestly unless a test tells it how to lie."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB = 50
STOP = 4
Lie = Callable[
    [dict[str, Any], dict[str, Any]], Any
]  # (request, honest answer) -> answer, or (status, answer)


def logprob_of(token: int) -> float:
    return -(token + 1) / 16


def completion_ids(prompt: list[int], seed: int, length: int) -> list[int]:
    """Return what the stub makes of a prompt and a seed: both can be read from the first two tokens; none is STOP."""
    return ([10 + sum(prompt) % 20, 30 + seed % 20] + [5] * length)[:length]


@dataclass
class Stub:
    """What the stub knows and was asked. lie: changes an answer; ends: of completions that end by STOP."""

    lie: Lie | None = None
    temperature_is_seen: bool = True
    names: list[str] = field(default_factory=lambda: ["base"])
    stamp: str = "default"
    version: str = "0.32.0"
    lacking: set[str] = field(default_factory=set)  # paths that answer 404 (403 for generate)
    cache_is_held: int = 0  # answers of /reset_prefix_cache that say false
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies of generate
    paths: list[str] = field(default_factory=list)
    url: str = ""

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        parameters, ids = body["sampling_params"], body["token_ids"]
        choices = []
        for index in range(parameters["n"]):
            made = completion_ids(ids, parameters["seed"] + index, parameters["max_tokens"])
            choices.append(self.choice(index, made, "length", None))
        answer = {
            "model": body["model"],
            "prompt_token_ids": ids,
            "prompt_logprobs": None,
            "choices": choices,
        }
        if parameters["prompt_logprobs"] is not None:
            scores = [{str(token): {"logprob": logprob_of(token)}} for token in ids[1:]]
            answer["prompt_logprobs"] = [None, *scores]
        if parameters["logprobs"] > 0:
            scale = parameters["temperature"] if self.temperature_is_seen else 1.0
            entry = choices[0]["logprobs"]["content"][0]
            entry["logprob"] = -1.0 / scale
            entry["top_logprobs"] = [{"token_id": 40 + i, "logprob": -(1 + i) / scale} for i in range(3)]
        return answer

    def choice(self, index: int, ids: list[int], finish: str, reason: int | None) -> dict[str, Any]:
        return {
            "index": index,
            "finish_reason": finish,
            "stop_reason": reason,
            "token_ids": ids,
            "weight_versions": [{"version": self.stamp, "start": 0, "end": len(ids)}],
            "logprobs": {"content": [{"token_id": token, "logprob": logprob_of(token)} for token in ids]},
        }

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/inference/v1/generate":
            self.asked.append(body)
            answer = self.generate(body)
            told = self.lie(body, answer) if self.lie else answer
            return told if isinstance(told, tuple) else (200, told)
        if path == "/v1/load_lora_adapter":
            self.names.append(body["lora_name"])
        if path == "/v1/unload_lora_adapter":
            self.names.remove(body["lora_name"])
        if path == "/update_weight_version":
            self.stamp = body["new_version"]
        if path == "/reset_prefix_cache":
            self.cache_is_held -= 1
            return 200, {"success": self.cache_is_held < 0}
        if path == "/collective_rpc":
            return 500, {"error": {"message": f"object has no attribute '{body['method']}'"}}
        return 200, {"success": True}

    def get(self, path: str) -> tuple[int, Any]:
        models = [
            {"id": name, "parent": None if name == "base" else "base", "max_model_len": 64}
            for name in self.names
        ]
        lora = {"max_lora_rank": 16}
        known: dict[str, Any] = {
            "/health": {},
            "/version": {"version": self.version},
            "/weight_info": {"weight_version": self.stamp},
            "/v1/models": {"data": models},
            "/server_info?config_format=json": {"vllm_config": {"lora_config": lora}},
        }
        return (200, known[path]) if path in known else (405, {})


class StubServer:
    """Serves a Stub at its url, for as long as the context lasts."""

    def __init__(self, stub: Stub) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null"))

            def reply(self, body: Any) -> None:
                stub.paths.append(self.path)
                if self.path in stub.lacking:
                    status, answer = (403 if self.path.endswith("/generate") else 404), {}
                else:
                    status, answer = (
                        stub.get(self.path) if self.command == "GET" else stub.post(self.path, body)
                    )
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        stub.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> StubServer:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()


def is_close(found: list[float], wanted: list[float]) -> bool:
    return len(found) == len(wanted) and all(math.isclose(a, b) for a, b in zip(found, wanted, strict=True))
