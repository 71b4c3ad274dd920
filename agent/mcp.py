"""The MCP server: the tools over stdin and stdout, on the official SDK. stdout carries the protocol and nothing else.

    python -m agent.mcp DIR ...      (finetune serve-mcp --root DIR ... starts it)

It keeps nothing between calls and ends when stdin closes: runs and jobs are processes of their own and go on. An expected
failure is a tool error, which the model can read and mend: cause, fix and an example as text, then the answer's JSON.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

import anyio
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    ToolAnnotations,
)
from mcp_types import Tool as Listed

from agent import tools
from agent.folder import schema
from agent.render import MOST_CHARACTERS, clean, text_of
from agent.roots import Roots
from agent.system import package_versions
from agent.toolset import BY_NAME, TOOLS

_LEAST_FAILURE = 400  # characters of what failed, whatever else an answer holds
_PROGRESS_EVERY_S = 1.0
_LEAST_FAILURE = 400  # characters of what failed, whatever else an answer holds
_INSTRUCTIONS = """Finetune open language models on your own data. The way: ft_doctor, ft_check_data, ft_plan (show its cost to
the user), ft_start {plan}, ft_status until it has ended, ft_evaluate, ft_export. Each answer is one JSON object: read ok,
errors[].fix and next_actions (console commands, which are these tools). Runs and jobs go on without this server; their ids
stay valid, and ft_list_runs finds them again. A failure is explained by ft_explain_error."""


def make_server(roots: Roots) -> Server[Any]:
    """Return the server whose tools touch the folders of `roots` alone."""

    async def list_tools(context: Any, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[listed(name) for name in BY_NAME])

    async def call_tool(
        context: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult:
        answer = await _called(context, params.name, params.arguments or {}, roots)
        return result(params.name, answer)

    return Server(
        "finetune_mcp",
        version=package_versions().get("finetune-skills", ""),
        title="Finetune language models",
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def listed(name: str) -> Listed:
    """Return a tool as MCP lists it, with all four hints and the schema of its answer."""
    tool = BY_NAME[name]
    return Listed(
        name=name,
        description=tool.description,
        input_schema=tools.parameters(name),
        output_schema=schema("answer"),
        annotations=ToolAnnotations(
            read_only_hint=tool.read_only,
            destructive_hint=tool.destructive,
            idempotent_hint=tool.idempotent,
            open_world_hint=tool.open_world,
        ),
    )


def result(name: str, answer: dict[str, Any]) -> CallToolResult:
    """Return an answer as the result of a call: as JSON and, for old clients, as its text."""
    is_error = tools.is_failure(answer)
    whole = text_of(answer)  # the failure stands in it too: both together stay within what one answer may be
    room = max(_LEAST_FAILURE, MOST_CHARACTERS - len(whole))
    texts = [*([clean(_failure(name, answer), room)] if is_error else []), whole]
    content: list[Any] = [TextContent(type="text", text=text) for text in texts]
    return CallToolResult(content=content, structured_content=answer, is_error=is_error)


def _failure(name: str, answer: dict[str, Any]) -> str:
    """Return the failures of an answer as "cause; fix; example", one a line."""
    tool = BY_NAME.get(name, TOOLS[0])
    example = f"{tool.name} {json.dumps(dict(tool.example))}"
    return "\n".join(
        f"{error['code']}: {error['cause']}; fix: {error['fix']}; example: {example}"
        for error in answer["errors"]
    )


async def _called(
    context: ServerRequestContext[Any, Any], name: str, arguments: dict[str, Any], roots: Roots
) -> dict[str, Any]:
    """Carry out a call in a thread. One that waits tells how it goes meanwhile; it is given up when the client leaves."""
    work = functools.partial(tools.call, name, arguments, roots)
    if not arguments.get("wait"):
        return await anyio.to_thread.run_sync(work)  # a start is not given up half-way: it takes seconds
    async with anyio.create_task_group() as group:
        group.start_soon(_tell_progress, context, name, arguments, roots)
        answer = await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
        group.cancel_scope.cancel()
    return answer


async def _tell_progress(
    context: ServerRequestContext[Any, Any], name: str, arguments: dict[str, Any], roots: Roots
) -> None:
    """Tell how many seconds of the wait have passed and how the run stands, to a client that asked for it."""
    began = anyio.current_time()
    look = functools.partial(tools.call, name, arguments | {"wait": 0}, roots)
    while True:
        await anyio.sleep(_PROGRESS_EVERY_S)
        answer = await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
        waited = round(anyio.current_time() - began, 1)
        await context.session.report_progress(waited, arguments["wait"], answer["summary"])


async def _serve(roots: Roots) -> None:
    server = make_server(roots)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


def main(folders: list[str]) -> None:
    """Serve until stdin closes."""
    roots = Roots.of(folders or [os.getcwd()])
    os.chdir(roots.first)
    anyio.run(_serve, roots)
    sys.stdout.flush()
    os._exit(0)  # a wait that nobody waits for any more would keep its thread, and with it this process


if __name__ == "__main__":
    main(sys.argv[1:])
