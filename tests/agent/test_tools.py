"""The tools: their definitions, the command that a call becomes, refusals, and the same JSON as the console."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from mcp.client import Client

from agent import tools
from agent.mcp import make_server
from agent.roots import Roots
from agent.toolset import BY_NAME, TOOLS
from finetune.config import GrpoConfig, SftConfig
from finetune.knobs import knobs
from tests.agent.calls import TINY, Caller, codes

NAMES = [
    "ft_doctor",
    "ft_check_data",
    "ft_plan",
    "ft_start",
    "ft_status",
    "ft_logs",
    "ft_list_runs",
    "ft_stop",
    "ft_resume",
    "ft_evaluate",
    "ft_generate",
    "ft_export",
    "ft_explain_error",
    "ft_report",
]


# ---- definitions ----


def test_the_tools_are_these_in_this_order() -> None:
    listed = tools.definitions()
    assert [item["function"]["name"] for item in listed] == NAMES
    assert [tool.name for tool in TOOLS] == NAMES  # no name twice: the SDK would drop one in silence
    assert all(item["type"] == "function" and len(item["function"]["description"]) > 60 for item in listed)
    assert listed == tools.definitions()


@pytest.mark.parametrize("name", NAMES)
def test_each_schema_is_valid_closed_and_admits_the_example(name: str) -> None:
    schema = tools.parameters(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(dict(BY_NAME[name].example), schema)
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)
    assert not schema.keys() & {"oneOf", "anyOf", "allOf"}  # which some providers refuse at the top
    assert all(value.get("description") for value in schema["properties"].values())


def test_settings_come_with_their_kinds_bounds_and_choices() -> None:
    shown = tools.parameters("ft_plan")["properties"]["settings"]["properties"]
    for config in (SftConfig, GrpoConfig):
        mine = [item.name for item in knobs(config) if not item.advanced]
        assert set(mine) <= shown.keys()
        assert len(mine) <= 40
    assert shown["schedule"]["enum"] == ["cosine", "linear", "constant"]
    assert shown["lora_rank"] | {"description": ""} == {
        "type": "integer",
        "minimum": 1,
        "maximum": 512,
        "default": 16,
        "description": "",
    }
    assert shown["data"]["type"] == "array"
    # 1 for sft, 2 for grpo: the verb holds each method to its own.
    assert (shown["global_batch_size"]["type"], shown["global_batch_size"]["minimum"]) == (
        ["integer", "null"],
        1,
    )
    assert "default" not in shown["learning_rate"]  # 2e-4 for sft, 1e-5 for grpo
    assert "clip_cispo" not in shown  # advanced


def test_numbers_of_flags_have_bounds_and_waiting_is_short() -> None:
    wait = tools.parameters("ft_status")["properties"]["wait"]
    assert (wait["type"], wait["minimum"], wait["maximum"]) == ("number", 0, 50)
    limit = tools.parameters("ft_logs")["properties"]["limit"]
    assert (limit["type"], limit["minimum"], limit["maximum"]) == ("integer", 1, 1000)
    assert tools.parameters("ft_export")["properties"]["kind"]["enum"] == ["merged", "adapter"]
    assert tools.parameters("ft_status")["required"] == ["run"]
    assert tools.parameters("ft_doctor")["properties"]["quick"]["default"] is True


def test_a_call_becomes_this_command() -> None:
    given = {
        "method": "sft",
        "settings": {
            "model": "builtin:tiny",
            "data": ["a.jsonl", "--b"],
            "packing": True,
            "deterministic": False,
            "max_steps": None,
            "gradient_checkpointing": None,
            "learning_rate": 1e-05,
            "system_prompt": "-v = 1",
        },
    }
    assert tools.argv_of(BY_NAME["ft_plan"], given) == [
        "plan",
        "--method=sft",
        "--model=builtin:tiny",
        "--data=a.jsonl",
        "--data=--b",
        "--packing",
        "--no-deterministic",
        "--max-steps=none",
        "--learning-rate=1e-05",
        "--system-prompt=-v = 1",
    ]
    given = {"run": "r", "prompt": ["a", "--json"], "base": True, "temperature": 0.5}
    assert tools.argv_of(BY_NAME["ft_generate"], given) == [
        "generate",
        "r",
        "--base",
        "--prompt=a",
        "--prompt=--json",
        "--temperature=0.5",
        "--detach",
    ]
    assert tools.argv_of(BY_NAME["ft_status"], {"run": "r", "wait": 5}) == ["status", "r", "--wait=5"]


@pytest.mark.parametrize(
    ("tool", "is_detached"),
    [
        ("ft_check_data", True),
        ("ft_evaluate", True),
        ("ft_export", True),
        ("ft_resume", True),
        ("ft_plan", False),
        ("ft_status", False),
    ],
)
def test_what_loads_a_model_or_reads_all_rows_is_a_job(tool: str, is_detached: bool) -> None:
    assert ("--detach" in tools.argv_of(BY_NAME[tool], dict(BY_NAME[tool].example))) == is_detached


def test_a_plan_that_reads_all_rows_is_a_job_too() -> None:
    assert "--detach" in tools.argv_of(BY_NAME["ft_plan"], {"checks": "full"})


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "arguments", "code", "text"),
    [
        ("ft_statu", {}, "usage", "did you mean ft_status?"),
        ("ft_status", {"ru": "x"}, "unknown_setting", "ru: no such argument; did you mean run?"),
        ("ft_status", {}, "usage", "run: required"),
        ("ft_status", {"run": "--help-all"}, "bad_value", "run: '--help-all' does not match"),
        ("ft_status", {"run": 5}, "bad_value", "run: 5 is not of type 'string'"),
        ("ft_status", {"run": "r", "wait": 51}, "bad_value", "wait: 51 is greater than the maximum of 50"),
        ("ft_status", {"run": "r", "wait": float("nan")}, "bad_value", "wait: is not finite"),
        ("ft_status", {"run": "r\0"}, "bad_value", "run: holds a character"),
        ("ft_status", "{", "usage", "arguments: no JSON"),
        ("ft_status", "[" * 100_000, "usage", "arguments: no JSON"),
        ("ft_status", "[]", "usage", "arguments: an object is expected, not list"),
        ("ft_status", '"' + "x" * 300_000, "usage", "200000 at most"),
        ("ft_plan", {"settings": {"lerning_rate": 1}}, "unknown_setting", "did you mean learning_rate?"),
        ("ft_plan", {"settings": {"lora_rank": 0}}, "bad_value", "settings.lora_rank: 0 is less than"),
        ("ft_plan", {"settings": {"threads": 10**30}}, "bad_value", "settings: is not finite, or too large"),
        ("ft_plan", {"method": "dpo"}, "bad_value", "method: 'dpo' is not one of ['sft', 'grpo']"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_mend(
    call_tool: Caller, name: str, arguments: Any, code: str, text: str
) -> None:
    answer = call_tool(name, arguments)
    assert codes(answer)[0] == code
    assert text in answer["errors"][0]["cause"]
    assert tools.exit_code(answer) == 2


def test_deep_nesting_is_refused(call_tool: Caller) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert codes(call_tool("ft_plan", {"settings": {"data": deep}}))[0] == "bad_value"


def test_all_problems_of_a_call_are_told_at_once(call_tool: Caller) -> None:
    answer = call_tool("ft_plan", {"method": "dpo", "settings": {"lora_rank": 0, "nonsense": 1}, "what": 1})
    assert sorted(codes(answer)) == ["bad_value", "bad_value", "unknown_setting", "unknown_setting"]


def test_null_is_as_if_not_given_and_text_is_as_good_as_an_object(call_tool: Caller) -> None:
    expected = call_tool("ft_explain_error", what="no_rows")
    assert expected["ok"]
    assert call_tool("ft_explain_error", '{"what": "no_rows"}') == expected
    assert call_tool("ft_list_runs", "") == call_tool("ft_list_runs", {"offset": None})


def test_a_wait_that_ended_is_no_failure_and_everything_else_is() -> None:
    assert not tools.is_failure({"ok": True, "errors": []})
    assert not tools.is_failure({"ok": False, "errors": [{"code": "still_running"}]})
    assert tools.is_failure({"ok": False, "errors": [{"code": "run_missing"}]})


def test_the_answer_to_a_tool_call_is_a_message(roots: Roots) -> None:
    function = {"name": "ft_explain_error", "arguments": '{"what": "no_rows"}'}
    message = tools.message({"id": "call_1", "type": "function", "function": function}, roots)
    assert (message["role"], message["tool_call_id"]) == ("tool", "call_1")
    assert json.loads(message["content"])["data"]["hint_id"] == "no_rows"


# ---- the same JSON everywhere ----

CHANGING = {"free_disk_bytes", "free_memory_bytes", "age_s", "heartbeat", "created", "time", "free_bytes"}
FREE = r"([\d.]+ of )?[\d.]+ GiB free"


def steady(value: Any) -> Any:
    """Return an answer without what differs from one moment to the next."""
    if isinstance(value, dict):
        return {name: steady(item) for name, item in value.items() if name not in CHANGING}
    if isinstance(value, list):
        return [steady(item) for item in value]
    return re.sub(FREE, "some GiB free", value) if isinstance(value, str) else value


def by_mcp(roots: Roots, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    async def ask() -> Any:
        async with Client(make_server(roots)) as client:
            return await client.call_tool(name, arguments)

    result = anyio.run(ask)
    assert json.loads(result.content[-1].text) == result.structured_content
    return result.structured_content


PLAN = {"method": "sft", "settings": {"model": "builtin:tiny", "data": ["rows.jsonl"], "device": "cpu"}}


@pytest.mark.parametrize(
    ("argv", "tool", "arguments"),
    [
        (["status", "run"], "ft_status", {"run": "run"}),
        (["logs", "run", "--grep", "Error"], "ft_logs", {"run": "run", "grep": "Error"}),
        (["list"], "ft_list_runs", {}),
        (["explain-error", "run"], "ft_explain_error", {"what": "run"}),
        (["explain-error", "nothing known"], "ft_explain_error", {"what": "nothing known"}),
        (["plan", *TINY, "--data", "rows.jsonl"], "ft_plan", PLAN),
        (["plan", *TINY, "--data", "none.jsonl", "--lora-rank", "3"], "ft_plan", None),
        (["doctor", "--quick"], "ft_doctor", {}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_console_tool_and_mcp_give_the_same_json(
    argv: list[str],
    tool: str,
    arguments: dict[str, Any] | None,
    ended: Path,
    command: Callable[..., tuple[dict[str, Any], int]],
    call_tool: Caller,
    roots: Roots,
) -> None:
    if arguments is None:
        arguments = PLAN | {"settings": PLAN["settings"] | {"data": ["none.jsonl"], "lora_rank": 3}}  # type: ignore[operator]
    printed, code = command(*argv)
    called = call_tool(tool, arguments)
    assert steady(called) == steady(printed)
    assert tools.exit_code(called) == code
    assert steady(by_mcp(roots, tool, arguments)) == steady(printed)


def test_a_whole_number_with_a_point_is_an_integer_as_its_schema_says(call_tool: Caller, rows: Path) -> None:
    (rows.parent / "work" / "rows.jsonl").write_text(rows.read_text())
    settings = {"model": "builtin:tiny", "data": ["rows.jsonl"], "device": "cpu", "max_steps": 4.0}
    plan = call_tool("ft_plan", {"method": "sft", "settings": settings | {"learning_rate": 1.0}})
    assert plan["data"]["settings"]["max_steps"]["value"] == 4
    assert codes(call_tool("ft_logs", run="none", limit=20.0)) == ["run_missing"]
