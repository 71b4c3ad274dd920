"""The MCP server: what it lists, results and tool errors, progress, and as a process of its own: stdout, stdin, survival."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from mcp.client import Client

from agent import tools
from agent.folder import RunFolder, check_against_schema, schema
from agent.mcp import make_server
from agent.processes import wait_until
from agent.roots import Roots
from tests.agent.calls import SLOW, STANDIN, TINY, Standin, checked, wait_for_step

ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, str(ROOT / "scripts" / "finetune_cli.py"), "serve-mcp"]


def with_client(roots: Roots, work: Callable[[Client], Awaitable[Any]], mode: str = "auto") -> Any:
    async def run() -> Any:
        async with Client(make_server(roots), mode=mode) as client:
            return await work(client)

    return anyio.run(run)


# The four hints of each tool: read only, destructive, idempotent, open world.
HINTS = {
    "ft_doctor": (True, False, True, False),
    "ft_check_data": (True, False, True, False),
    "ft_plan": (True, False, True, True),
    "ft_start": (False, False, True, True),
    "ft_status": (True, False, True, False),
    "ft_logs": (True, False, True, False),
    "ft_list_runs": (True, False, True, False),
    "ft_stop": (False, True, True, False),
    "ft_resume": (False, False, True, True),
    "ft_evaluate": (True, False, True, True),
    "ft_generate": (True, False, True, False),
    "ft_export": (False, False, True, False),
    "ft_explain_error": (True, False, True, False),
    "ft_report": (False, False, True, False),
}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_tools_are_listed_with_four_hints_and_both_schemas(roots: Roots, mode: str) -> None:
    listed = with_client(roots, lambda client: client.list_tools(), mode).tools
    found = {}
    for tool in listed:
        hints = tool.annotations
        found[tool.name] = (
            hints.read_only_hint,
            hints.destructive_hint,
            hints.idempotent_hint,
            hints.open_world_hint,
        )
        assert tool.input_schema == tools.parameters(tool.name)
        assert tool.output_schema == schema("answer")
    assert found == HINTS
    assert [tool.name for tool in listed] == list(HINTS)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_result_is_structured_and_repeated_as_text(roots: Roots, mode: str) -> None:
    result = with_client(
        roots, lambda client: client.call_tool("ft_explain_error", {"what": "no_rows"}), mode
    )
    assert not result.is_error
    jsonschema.validate(result.structured_content, schema("answer"))
    assert [json.loads(item.text) for item in result.content] == [result.structured_content]
    assert result.structured_content["data"]["hint_id"] == "no_rows"


@pytest.mark.parametrize(
    ("tool", "arguments", "code"),
    [
        ("ft_status", {"run": "no-such-run"}, "run_missing"),
        ("ft_status", {"run": 5}, "bad_value"),
        ("ft_statu", {}, "usage"),
        ("ft_explain_error", {"what": "/etc/hostname"}, "path_outside_roots"),
        ("ft_plan", {"method": "sft", "settings": {"model": "builtin:tiny"}}, "usage"),
    ],
)
def test_an_expected_failure_is_a_tool_error_that_says_cause_fix_and_example(
    roots: Roots, tool: str, arguments: Any, code: str
) -> None:
    result = with_client(roots, lambda client: client.call_tool(tool, arguments))
    assert result.is_error
    text, document = result.content[0].text, json.loads(result.content[1].text)
    error = document["errors"][0]
    assert error["code"] == code
    assert text.startswith(f"{code}: {error['cause']}; fix: {error['fix']}; example: ft_")
    assert result.structured_content == document
    check_against_schema("answer", document)
    name, _, example = text.splitlines()[0].rpartition("; example: ")[2].partition(" ")
    jsonschema.validate(json.loads(example), tools.parameters(name))


def test_a_failure_told_twice_stays_within_what_one_answer_may_be(roots: Roots) -> None:
    settings = {f"no_such_setting_{number}": number for number in range(40)}
    arguments = {"method": "sft", "settings": settings}
    result = with_client(roots, lambda client: client.call_tool("ft_plan", arguments))
    assert result.is_error
    assert sum(len(item.text) for item in result.content) <= 8400
    assert len(result.structured_content["errors"]) > 1


def test_a_wait_tells_how_the_run_goes_and_its_end_is_no_error(
    roots: Roots, standin: Standin, rows: Path
) -> None:
    out = roots.first / "run"
    process = standin.start("run", *TINY, "--data", str(rows), "--out", str(out), how=SLOW)
    wait_for_step(RunFolder(out), 1)
    told: list[tuple[float, float | None, str | None]] = []

    async def listen(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, total, message))

    async def work(client: Client) -> Any:
        arguments = {"run": str(out), "wait": 4}
        return await client.call_tool("ft_status", arguments, progress_callback=listen)

    result = with_client(roots, work)
    assert not result.is_error
    assert result.structured_content["errors"][0]["code"] == "still_running"
    assert len(told) >= 2
    assert [item[0] for item in told] == sorted({item[0] for item in told})
    assert all(total == 4 and "step" in str(message) for _, total, message in told)
    process.terminate()
    standin.finish(process)


# ---- as a process ----


class Server:
    """A real server on its own pipes, spoken to line by line; mode is the handshake of 2025-11-25."""

    def __init__(
        self, folder: Path, home: Path, *argv: str, command: list[str] = SERVE, **environ: str
    ) -> None:
        environ = os.environ | {"FINETUNE_HOME": str(home)} | environ
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(
            [*command, *argv], cwd=folder, env=environ, text=True, start_new_session=True, **pipes
        )
        self.lines: list[str] = []
        self._number = 0

    def send(self, method: str, params: dict[str, Any], number: int | None = None) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        message |= {} if number is None else {"id": number}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        self.send(method, params, self._number)
        while (message := self.read()).get("id") != self._number:
            pass
        return message["result"]

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0], "the server says nothing"
        self.lines.append(self.process.stdout.readline())
        return json.loads(self.lines[-1])

    def open(self) -> dict[str, Any]:
        client = {"name": "test", "version": "1"}
        versions = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
        opened = self.ask("initialize", versions)
        self.send("notifications/initialized", {})
        return opened

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return self.ask("tools/call", {"name": tool, "arguments": arguments})["structuredContent"]


@pytest.fixture
def server(roots: Roots, home: Path) -> Iterator[Server]:
    started = Server(roots.first, home)
    yield started
    if started.process.poll() is None:
        started.process.kill()
    started.process.wait()


@pytest.mark.slow
def test_a_server_says_nothing_but_the_protocol_and_ends_with_its_stdin(server: Server, roots: Roots) -> None:
    for name in ("agent", "mcp"):  # folders of these names where it is started are no packages of ours
        (roots.first / name).mkdir()
        (roots.first / name / "__init__.py").write_text("raise RuntimeError('shadowed')\n")
    opened = server.open()
    assert opened["serverInfo"]["name"] == "finetune_mcp"
    assert "ft_start" in opened["instructions"]
    assert len(server.ask("tools/list", {})["tools"]) == 14
    assert server.call("ft_list_runs")["data"]["runs"] == []
    assert server.call("ft_plan", settings={"model": "builtin:tiny"})["ok"] is False
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert server.process.wait(20) == 0
    assert server.process.stdout is not None
    assert server.process.stdout.read() == ""
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in server.lines)


@pytest.mark.slow
def test_a_server_that_waits_for_a_run_ends_with_its_stdin_too(
    server: Server, standin: Standin, roots: Roots, rows: Path
) -> None:
    out = roots.first / "run"
    process = standin.start("run", *TINY, "--data", str(rows), "--out", str(out), how=SLOW)
    wait_for_step(RunFolder(out), 1)
    server.open()
    waiting = {"name": "ft_status", "arguments": {"run": str(out), "wait": 50}}
    server.send("tools/call", waiting, 77)
    time.sleep(1)
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert wait_until(lambda: server.process.poll() == 0, 20)
    assert process.poll() is None
    process.terminate()
    standin.finish(process)


def test_a_run_goes_on_when_the_process_group_of_its_server_is_killed(
    roots: Roots, home: Path, standin: Standin, rows: Path
) -> None:
    folder = RunFolder(roots.first / "run")
    (roots.first / "rows.jsonl").write_text(rows.read_text())
    server = Server(roots.first, home, "--serve", str(roots.first), command=STANDIN, FINETUNE_STANDIN=SLOW)
    try:
        server.open()
        settings = {"model": "builtin:tiny", "device": "cpu", "data": ["rows.jsonl"], "out": "run"}
        started = server.call("ft_start", method="sft", settings=settings)
        assert started["ok"], started["summary"]
        wait_for_step(folder, 1, 60)
        assert server.process.stdin is not None
        server.process.stdin.close()
    finally:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    seen = folder.metrics.read_bytes().count(b"\n")
    wait_for_step(folder, seen + 3)
    stopped, code = standin("stop", str(folder.path))
    assert (code, stopped["status"], stopped["run_id"]) == (0, "stopped", started["run_id"])


def test_a_server_that_cannot_start_says_so_as_any_verb(tmp_path: Path, home: Path) -> None:
    server = Server(tmp_path, home, "--root", "none", "--root", str(tmp_path))
    output = server.process.communicate(timeout=60)[0]
    answer = checked(output, server.process.returncode)
    assert (server.process.returncode, answer["errors"][0]["code"]) == (3, "file_missing")


def test_the_configuration_of_this_repository_starts_the_server() -> None:
    entry = json.loads((ROOT / ".mcp.json").read_text())["mcpServers"]["finetune"]
    script = entry["args"][0].replace("${CLAUDE_PLUGIN_ROOT:-.}", str(ROOT))
    done = subprocess.run(
        [entry["command"], script, *entry["args"][1:], "--root", "/no/such/folder"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["errors"][0]["code"] == "file_missing"
