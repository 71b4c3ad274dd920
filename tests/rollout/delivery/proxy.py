"""An HTTP proxy in front of a real vLLM server that passes everything on, but for what a test has it lie about."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS = "adapter_model.safetensors"
WEIGHTS = "model.safetensors"


@dataclass
class Request:
    path: str
    body: dict[str, Any]


@dataclass
class Answer:
    status: int
    text: str = ""


# Changes a request in place (None: pass it on) or answers it itself.
Lie = Callable[[Request], Answer | None]


@dataclass
class Proxy:
    """Passes requests on to `target`. asked: what came; pretended: adapters listed that the server was never given."""

    target: str
    lie: Lie | None = None
    asked: list[Request] = field(default_factory=list)
    pretended: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, method: str, path: str, content: bytes) -> Answer:
        request = Request(path, json.loads(content) if content else {})
        self.asked.append(request)
        if request.body.get("model") in self.pretended:
            request.body["model"] = "base"
        if path == "/v1/unload_lora_adapter" and request.body["lora_name"] in self.pretended:
            self.pretended.remove(request.body["lora_name"])
            return Answer(200)
        if self.lie is not None and (own := self.lie(request)) is not None:
            return own
        passed = json.dumps(request.body).encode() if content else b""
        headers = {"content-type": "application/json"}
        try:
            response = httpx.request(
                method, self.target + path, content=passed, headers=headers, timeout=120, trust_env=False
            )
        except httpx.HTTPError as error:
            return Answer(502, str(error))
        text = response.text
        if path == "/v1/models" and self.pretended:
            listed = response.json()
            listed["data"] += [{"id": name, "parent": "base"} for name in self.pretended]
            text = json.dumps(listed)
        return Answer(response.status_code, text)

    def __enter__(self) -> Proxy:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def _pass(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length") or 0))
                answer = proxy.answer(self.command, self.path, content)
                self.send_response(answer.status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer.text.encode())))
                self.end_headers()
                self.wfile.write(answer.text.encode())

            do_GET = do_POST = _pass

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    # Lies about adapters.

    def drops_loads(self, request: Request) -> Answer | None:
        """Answer a load with success, list the name, and serve the base under it."""
        if request.path != "/v1/load_lora_adapter":
            return None
        self.pretended.append(request.body["lora_name"])
        return Answer(200)

    def without_extension(self, request: Request) -> Answer | None:
        return Answer(404) if request.path == "/collective_rpc" else None


def loads_instead(folder: Path) -> Lie:
    """Load the adapter of another folder under the name that was asked for."""

    def lie(request: Request) -> None:
        if request.path == "/v1/load_lora_adapter":
            request.body["lora_path"] = str(folder)

    return lie


def rewrites(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Lie:
    """Change the tensors of an adapter, or of a model, on their way."""

    def lie(request: Request) -> None:
        body = request.body
        if request.path == "/v1/load_lora_adapter":
            body["lora_path"] = str(_changed(Path(body["lora_path"]), TENSORS, change))
        if request.path == "/collective_rpc" and body["method"] == "reload_weights":
            body["kwargs"]["weights_path"] = str(
                _changed(Path(body["kwargs"]["weights_path"]), WEIGHTS, change)
            )

    return lie


def reloads_instead(folder: Path) -> Lie:
    """Reload other weights than were asked for."""

    def lie(request: Request) -> None:
        if request.path == "/collective_rpc" and request.body["method"] == "reload_weights":
            request.body["kwargs"]["weights_path"] = str(folder)

    return lie


def drops_reloads(request: Request) -> Answer | None:
    is_reload = request.path == "/collective_rpc" and request.body["method"] == "reload_weights"
    return Answer(200, '{"results": [null]}') if is_reload else None


def half_zeroed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = sorted(name for name in tensors if "_proj" in name)
    return tensors | {name: tensors[name] * 0 for name in names[: len(names) // 2]}


def wrongly_prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("base_model.model.", "base_model.model.module."): tensor
        for name, tensor in tensors.items()
    }


def _changed(folder: Path, file: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Return a folder beside `folder` with its files, those of the weights changed."""
    other = folder.with_name(f"{folder.name}.changed")
    other.mkdir(exist_ok=True)
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    save_file(change(load_file(folder / file)), other / file, metadata={"format": "pt"})
    return other
