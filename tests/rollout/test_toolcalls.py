"""Calls are read as the model wrote them and as the tools declare their values; what is no whole call stays text."""

import json

import pytest

from finetune.rollout.toolcalls import (
    ParsedText,
    ToolCall,
    parse_tool_calls,
    render_tool_calls,
    schema_kinds,
    typed_value,
)

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer"},
        "share": {"type": "number"},
        "force": {"type": "boolean"},
        "options": {"type": "object"},
        "names": {"type": "array", "items": {"type": "string"}},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "label": {"type": ["string", "null"]},
        "mode": {"enum": [1, 2]},
        "size": {"$ref": "#/$defs/Size"},
    },
    "$defs": {"Size": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "edit", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "list"}},
]
ALL = {
    "path": "a b.txt",
    "line": 7,
    "share": 0.25,
    "force": True,
    "options": {"deep": [1, {"x": None}]},
    "names": ["é", "<b>"],
    "limit": None,
    "label": None,
    "mode": 2,
    "size": 3,
}


def parsed(text: str) -> ParsedText:
    return parse_tool_calls(text, TOOLS)


def test_a_hermes_call_is_read_with_the_text_around_it() -> None:
    text = 'I look.\n<tool_call>\n{"name": "edit", "arguments": {"path": "x", "line": 3}}\n</tool_call>\n'
    assert parsed(text) == ParsedText("I look.", [ToolCall("edit", {"path": "x", "line": 3})])


def test_an_xml_call_is_read_with_declared_types() -> None:
    text = (
        "<tool_call>\n<function=edit>\n<parameter=path>\n 7 \n</parameter>\n<parameter=line>\n7\n</parameter>\n"
        '<parameter=share>1</parameter><parameter=force>True</parameter>\n<parameter=options>{"a": 1}</parameter>'
        '<parameter=names>["x", "y"]</parameter><parameter=limit>null</parameter></function>\n</tool_call>'
    )
    arguments = {
        "path": " 7 ",
        "line": 7,
        "share": 1,
        "force": True,
        "options": {"a": 1},
        "names": ["x", "y"],
        "limit": None,
    }
    assert parsed(text) == ParsedText("", [ToolCall("edit", arguments)])


def test_the_end_of_reasoning_in_an_argument_ends_no_reasoning() -> None:
    write = '<tool_call>{"name": "edit", "arguments": {"path": "</think> <tool_call>"}}</tool_call>'
    xml = "<function=edit><parameter=path></think></parameter></function>"
    look = '<tool_call>{"name": "list", "arguments": {}}</tool_call>'
    edit = ToolCall("edit", {"path": "</think> <tool_call>"})
    assert parsed(write) == ParsedText("", [edit])
    assert parsed(look + write) == ParsedText("", [ToolCall("list", {}), edit])
    assert parsed(f"I could {write}</think>{look}").calls == [ToolCall("list", {})]
    assert parsed(f"I could {look}</think>{write}").calls == [edit]
    assert parsed(xml).calls == [ToolCall("edit", {"path": "</think>"})]
    begun = "<function=edit><parameter=path>"
    assert parsed(f"{begun} or so</think>{begun}x</parameter></function>").calls == [
        ToolCall("edit", {"path": "x"})
    ]


def test_a_text_of_json_stays_text_where_text_is_allowed() -> None:
    text = '{"name": "edit", "arguments": {"label": "null", "limit": "null", "odd": "null", "line": "7"}}'
    arguments = {"label": "null", "limit": None, "odd": "null", "line": 7}
    assert parsed(f"<tool_call>{text}</tool_call>").calls == [ToolCall("edit", arguments)]


@pytest.mark.parametrize("form", ["hermes", "xml"])
def test_what_is_written_is_read_back_the_same(form) -> None:
    calls = [
        ToolCall("edit", ALL),
        ToolCall("list", {}),
        ToolCall("edit", {"path": 'two\nlines </parameter> "q"'}),
    ]
    text = render_tool_calls(calls, form, "Before.")
    assert parsed(text) == ParsedText("Before.", calls)
    assert render_tool_calls(parsed(text).calls, form, "Before.") == text


def test_several_calls_stand_in_their_order_and_both_forms_may_mix() -> None:
    text = (
        '<tool_call>{"name": "list"}</tool_call> and <function=edit><parameter=line>1</parameter></function>'
    )
    assert parsed(text) == ParsedText("and", [ToolCall("list", {}), ToolCall("edit", {"line": 1})])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "edit", "arguments": {"path": "x"}}',  # not closed
        '<tool_call>{"name": "edit", "arguments": {"path": "x"}</tool_call>',
        '<tool_call>{"name": "edit", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "edit", "arguments": "no json"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": " ", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "edit", "arguments": {"share": NaN}}</tool_call>',
        '<tool_call>{"name": "edit", "arguments": {"share": 1e999}}</tool_call>',
        '<tool_call>{"name": "edit", "arguments": {"path": "\\ud800"}}</tool_call>',
        "<tool_call>edit(path)</tool_call>",
        "<tool_call></tool_call>",
        "<function=edit><parameter=line>1</function>",
        "<function=edit><parameter=line>1</parameter>",
        "<tool_call><function=edit></function>",  # the wrapper is not closed
        "</tool_call> <tool_call>",
        "[" * 100_000,
        "<tool_call>" + '{"name": ' * 20_000,
    ],
)
def test_malformed_text_stays_text(text: str) -> None:
    assert parsed(text) == ParsedText(text)


def test_a_malformed_call_beside_a_good_one_stays_in_the_text() -> None:
    text = '<tool_call>{broken}</tool_call>\n<tool_call>{"name": "list", "arguments": {}}</tool_call>'
    assert parsed(text) == ParsedText("<tool_call>{broken}</tool_call>", [ToolCall("list", {})])


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "list", "arguments": {}}</tool_call>'
    assert parse_tool_calls(text, None) == ParsedText(text)
    assert parse_tool_calls(text, []) == ParsedText(text)


def test_a_tool_that_is_not_declared_is_still_a_call_so_that_the_agent_says_so() -> None:
    assert parsed('<tool_call>{"name": "fly", "arguments": {"a": "1"}}</tool_call>').calls == [
        ToolCall("fly", {"a": "1"})
    ]


def test_what_is_thought_is_not_called() -> None:
    call = '<tool_call>{"name": "list", "arguments": {}}</tool_call>'
    found = parsed(f"<think>maybe {call}</think>{call}")
    assert found == ParsedText(f"<think>maybe {call}</think>", [ToolCall("list", {})])


def test_the_end_tag_may_stand_inside_a_json_text() -> None:
    text = '<tool_call>{"name": "edit", "arguments": {"path": "</tool_call>"}}</tool_call>'
    assert parsed(text).calls == [ToolCall("edit", {"path": "</tool_call>"})]


def test_arguments_as_a_text_of_json_become_an_object_and_texts_take_their_declared_types() -> None:
    inner = json.dumps({"line": "12", "path": "12", "force": "false"})
    text = f'<tool_call>{{"name": "edit", "arguments": {json.dumps(inner)}}}</tool_call>'
    assert parsed(text).calls == [ToolCall("edit", {"line": 12, "path": "12", "force": False})]


def test_of_equal_parameters_the_last_counts() -> None:
    text = "<function=edit><parameter=line>1</parameter><parameter=line>2</parameter></function>"
    assert parsed(text).calls == [ToolCall("edit", {"line": 2})]
    text = '<tool_call>{"name": "edit", "arguments": {"line": 1, "line": 2}}</tool_call>'
    assert parsed(text).calls == [ToolCall("edit", {"line": 2})]


@pytest.mark.parametrize(
    ("written", "declared", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("five", {"type": "integer"}, "five"),
        ("5", {"type": "number"}, 5),
        ("1e3", {"type": "number"}, 1000.0),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"),
        ("null", {"type": "null"}, None),
        ("null", {"type": ["integer", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("5", {"type": ["string", "integer"]}, "5"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ("5", {"const": 5}, 5),
        ("5", {}, "5"),
        ("5", None, "5"),
        ("5", {"type": "strange"}, "5"),
    ],
)
def test_a_text_takes_the_declared_type_or_stays(written, declared, value) -> None:
    found = typed_value(written, declared)
    assert (found, type(found)) == (value, type(value))


def test_a_reference_that_leads_nowhere_or_in_a_circle_allows_all() -> None:
    circle = {"properties": {"a": {"$ref": "#/properties/a"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": circle}}]
    call = "<function=f><parameter=a>1</parameter></function>"
    assert parse_tool_calls(call, tools).calls == [ToolCall("f", {"a": "1"})]
    assert schema_kinds({"anyOf": [{"type": "integer"}, {"type": "null"}]}) == {"integer", "null"}


def test_xml_refuses_a_value_that_ends_its_own_parameter() -> None:
    with pytest.raises(ValueError, match="path"):
        render_tool_calls([ToolCall("edit", {"path": "a</parameter></function>"})], "xml")
