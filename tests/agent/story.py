"""The whole way of an agent through the tools, as a process of its own that can be killed in the middle.

    python tests/agent/story.py mcp|openai begin|finish FOLDER MODEL STEPS

begin: doctor, check-data, plan, start; then it waits to be killed. finish: find the run again, status until it has ended,
evaluate, export. Nothing passes from one to the other: what finish knows it learns from the tools. FOLDER holds rows.jsonl.
Each call is printed as one line {tool, seconds, is_error, answer}. mcp: the official client, a real server over stdio.
openai: messages with tool_calls as a chat completion returns them, executed in this process.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
FINETUNE = [sys.executable, str(ROOT / "scripts" / "finetune_cli.py")]
LONGEST_S = 600
Call = Callable[[str, dict[str, Any]], tuple[dict[str, Any], bool]]


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


class Agent:
    """Decides by what the tools answer, as a model would."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def use(self, tool: str, **arguments: Any) -> dict[str, Any]:
        began = time.monotonic()
        answer, is_error = self._call(tool, arguments)
        seconds = round(time.monotonic() - began, 2)
        say({"tool": tool, "seconds": seconds, "is_error": is_error, "answer": answer})
        return answer

    def follow(self, name: str) -> dict[str, Any]:
        """Ask for a run or a job until it has ended."""
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end:
            answer = self.use("ft_status", run=name, wait=20)
            if answer["ok"] or answer["errors"][0]["code"] != "still_running":
                return answer
        raise TimeoutError(name)

    def job(self, tool: str, **arguments: Any) -> dict[str, Any]:
        started = self.use(tool, **arguments)
        assert started["status"] == "running", started
        done = self.follow(started["data"]["job_id"])
        assert done["status"] == "succeeded", done
        return done

    def begin(self, model: str, steps: int) -> None:
        assert self.use("ft_doctor")["ok"]
        settings = {
            "model": model,
            "data": ["rows.jsonl"],
            "device": "cpu",
            "dtype": "fp32",
            "max_steps": steps,
            "global_batch_size": 4,
            "eval_fraction": 0.25,
            "learning_rate": 0.003,
            "out": "run",
        }
        chosen = {"method": "sft", "settings": settings}
        assert self.job("ft_check_data", **chosen)["data"]["result"]["ledger"]["read"] == 24
        plan = self.use("ft_plan", **chosen)
        assert plan["data"]["arithmetic"]["steps"] == steps
        started = self.use("ft_start", plan=plan["data"]["plan_id"])
        assert started["ok"], started
        say({"started": started["run_id"]})

    def finish(self) -> None:
        run = self.use("ft_list_runs")["data"]["runs"][0]["run_id"]
        assert self.follow(run)["status"] == "succeeded"
        measured = self.job("ft_evaluate", run=run)
        assert measured["data"]["result"]["loss"] > 0
        exported = self.job("ft_export", run=run, kind="merged", to="merged")
        assert {Path(item["path"]).name for item in exported["artifacts"]} >= {"model.safetensors"}


@contextmanager
def over_mcp(folder: Path) -> Iterator[Call]:
    from anyio.from_thread import start_blocking_portal
    from mcp import StdioServerParameters
    from mcp.client import Client

    argv = [*FINETUNE[1:], "serve-mcp", "--root", str(folder)]
    server = StdioServerParameters(command=FINETUNE[0], args=argv, env=dict(os.environ), cwd="/")
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(server)) as client,
    ):

        def call(tool: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], bool]:
            result = portal.call(client.call_tool, tool, arguments)
            assert json.loads(result.content[-1].text) == result.structured_content
            return result.structured_content, result.is_error

        yield call


@contextmanager
def over_openai(folder: Path) -> Iterator[Call]:
    import jsonschema

    from agent import tools
    from agent.roots import Roots

    schemas = {item["function"]["name"]: item["function"]["parameters"] for item in tools.definitions()}
    roots, messages = Roots.of([folder]), [{"role": "user", "content": "Finetune on rows.jsonl."}]

    def call(tool: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        jsonschema.validate(arguments, schemas[tool])
        function = {"name": tool, "arguments": json.dumps(arguments)}
        asked = {"id": f"call_{len(messages)}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [asked]})
        messages.append(tools.message(asked, roots))
        assert messages[-1]["tool_call_id"] == asked["id"]
        answer = json.loads(messages[-1]["content"])
        return answer, tools.is_failure(answer)

    yield call


def main(way: str, part: str, folder: str, model: str, steps: str) -> None:
    with {"mcp": over_mcp, "openai": over_openai}[way](Path(folder)) as call:
        if part == "finish":
            Agent(call).finish()
            return
        Agent(call).begin(model, int(steps))
        time.sleep(LONGEST_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
