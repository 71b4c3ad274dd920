"""The harness `loop`: a tool loop of our own in this process, whose one tool runs a shell command in a box.

Rule: it asks over the same endpoint as any agent program, so what it trains is recorded in the same way.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.boxes.launching import Limits
from finetune.boxes.process import Box
from finetune.errors import FinetuneError
from finetune.rollout.bridge import POLICY, Session
from finetune.rollout.harness_program import HarnessOutcome, HarnessSettings, Status

SYSTEM_PROMPT = (
    "You work on a task in the current folder with the bash tool. Each command runs in a new shell. "
    "When the task is done, say so without a tool call."
)
BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command and get its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
_TRIES = 3  # of a request that the engine did not answer
_OUTPUT_CHARACTERS = 8000


class _Over(Exception):
    """How the loop ends before the policy ends it."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass(frozen=True)
class LoopHarness:
    """At most max_steps answers, each with any number of commands; the time of the limits is that of all together."""

    settings: HarnessSettings
    name: str = "loop"
    helper_prompts: tuple[str, ...] = ()

    def check(self) -> None:
        """Nothing of ours can be missing."""

    def run(
        self, task_prompt: str, workspace: Path, session: Session, box: Box, limits: Limits
    ) -> HarnessOutcome:
        end = time.monotonic() + limits.seconds
        log: list[str] = []
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task_prompt},
        ]
        try:
            for _ in range(self.settings.max_steps):
                answer = _asked(session, messages, end)
                messages.append(answer)
                if not answer.get("tool_calls"):
                    return HarnessOutcome("finished", 0, "\n".join(log), session.num_calls)
                for call in answer["tool_calls"]:
                    output = self._done(call["function"], workspace, box, limits, end)
                    log.append(f"$ {call['function']['arguments']}\n{output}")
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
            raise _Over("step_limit", f"{self.settings.max_steps} answers were given")
        except _Over as over:
            return HarnessOutcome(over.status, None, "\n".join([*log, over.text]), session.num_calls)

    def _done(self, function: dict[str, Any], workspace: Path, box: Box, limits: Limits, end: float) -> str:
        """Return the output of one tool call; what the policy did wrong is told to it."""
        command = json.loads(function["arguments"]).get("command")
        if function["name"] != "bash" or not isinstance(command, str):
            return "error: there is one tool, bash, with one parameter, command, a text"
        seconds = min(self.settings.tool_timeout_s, _left(end))
        try:
            result = box.run(["/bin/sh", "-c", command], workspace, replace(limits, seconds=seconds))
        except FinetuneError as error:
            if error.code != "no_sandbox":
                raise
            raise _Over("sandbox", error.message) from error
        if result.timed_out and _left(end) <= 0.001:
            raise _Over("timeout", "the time of the task is over")
        ending = "timed out" if result.timed_out else f"exit code {result.exit_code}"
        output = f"{result.stdout}{result.stderr}".rstrip()
        return f"{output[:_OUTPUT_CHARACTERS]}\n[{ending}]".lstrip("\n")


def _left(end: float) -> float:
    """Return the seconds that are left, a little where none are: no command and no request waits for ever."""
    return max(end - time.monotonic(), 0.001)


def _asked(session: Session, messages: list[dict[str, Any]], end: float) -> dict[str, Any]:
    """Return the policy's answer to the conversation."""
    body = json.dumps({"model": POLICY, "messages": messages, "tools": [BASH_TOOL]}).encode()
    for _ in range(_TRIES):
        try:
            status, answer = _posted(session, body, _left(end))
        except TimeoutError as error:
            raise _Over("timeout", "the time of the task is over") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Over("server", f"the endpoint: {type(error).__name__} {error}") from error
        if status == 200:
            return answer["choices"][0]["message"]
        problem = answer["error"]
        if problem["code"] in ("step_limit", "context_length_exceeded"):
            raise _Over("step_limit", problem["message"])
        if status < 500:
            raise _Over("crashed", f"the endpoint refused a request: {problem['message']}")
    raise _Over("server", f"the engine had no answer: {problem['message']}")


def _posted(session: Session, body: bytes, timeout: float) -> tuple[int, dict[str, Any]]:
    connection = _UnixConnection(str(session.socket), timeout)
    try:
        headers = {"Authorization": f"Bearer {session.token}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
