"""A model that follows a script, behind an OpenAI-compatible endpoint: it knows what it has read in its conversation, no more.

It reads the router skill, then goes the way that stands there, one command after the other; what the commands leave open
(a plan id, a run folder) it takes from the answers. It gives no command that it has not read.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Policy = Callable[[list[str]], str | None]


def outputs_of(messages: list[dict[str, Any]]) -> list[str]:
    """Return what the tools answered so far, in order."""
    return [_text(message["content"]) for message in messages if message["role"] == "tool"]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def answers_in(outputs: list[str]) -> list[dict[str, Any]]:
    """Return the answers of the product among the outputs: each is one line of JSON."""
    lines = [line for text in outputs for line in text.splitlines() if line.startswith('{"schema_version"')]
    return [json.loads(line) for line in lines]


def the_whole_way(skill: str) -> list[str]:
    """Return the commands of the first code block of a skill."""
    block = re.search(r"```sh\n(.*?)```", skill, re.DOTALL)
    assert block is not None, "the router shows the whole way"
    return [line for line in block[1].splitlines() if line.startswith("finetune ")]


def begins(outputs: list[str]) -> str | None:
    """Read the skill, check, plan, start; None when the run is under way: the conversation is over."""
    if not outputs:
        return "cat SKILL.md"
    way, answers = the_whole_way(outputs[0]), answers_in(outputs)
    if len(answers) == 4:
        return None
    command = way[len(answers)]
    if answers and answers[-1]["command"] == "plan":
        command = command.replace("PLAN_ID", answers[-1]["data"]["plan_id"])
    return command


def comes_back(outputs: list[str]) -> str | None:
    """In a conversation that knows nothing of the first: find the run, wait for it, evaluate, export."""
    if not outputs:
        return "cat SKILL.md"
    way, answers = the_whole_way(outputs[0]), answers_in(outputs)
    if not answers:
        return "finetune list"
    run = answers[0]["data"]["runs"][0]["run_dir"]
    told = {answer["command"]: answer for answer in answers}
    if told.get("status", {}).get("status") != "succeeded":
        return way[4].replace("RUN", run)
    for command in way[5:]:
        if command.split()[1] not in told:
            return command.replace("RUN", run)
    return None


class ScriptedModel:
    """Serves one policy on a free port of the loopback; `with` it. conversation: the messages of the last request."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.conversation: list[dict[str, Any]] = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                model.conversation = body["messages"]
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for chunk in model.chunks(body["messages"]):
                    self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> ScriptedModel:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def chunks(self, messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        outputs = outputs_of(messages)
        command = self.policy(outputs)
        if command is None:
            yield _chunk({"role": "assistant", "content": "Done."})
            yield _chunk({}, "stop")
            return
        arguments = json.dumps({"command": command, "description": "follows the skill"})
        function = {"name": "bash", "arguments": arguments}
        call = {"index": 0, "id": f"call_{len(outputs)}", "type": "function", "function": function}
        yield _chunk({"role": "assistant", "tool_calls": [call]})
        yield _chunk({}, "tool_calls")


def _chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "scripted",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "scripted",
        "choices": [choice],
    }
