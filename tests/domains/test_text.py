"""The forms of rows, each with its ways of being written, and the refusal of what is none of them."""

import json

import pytest

from finetune.data.conversation import Conversation
from finetune.domains.text import form_of, text_domain
from finetune.errors import FinetuneError
from finetune.records import Row

ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def conversation(values, data_format="auto") -> Conversation:
    return text_domain(data_format).conversation(Row(values, "rows.jsonl", 1))


def refused(values, data_format="auto") -> FinetuneError:
    with pytest.raises(FinetuneError) as caught:
        conversation(values, data_format)
    return caught.value


@pytest.mark.parametrize(
    "values",
    [
        {"messages": ASKED},
        {"messages": json.dumps(ASKED)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, ASKED[1]]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": ASKED},
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "input": " ", "output": "b", "system": "", "history": []},
        {"prompt": ASKED[:1], "completion": ASKED[1:]},
        {"prompt": ASKED[:1], "completion": "b"},
        {"prompt": "a", "completion": ASKED[1:]},
        {"messages": ASKED, "id": 7, "note": None, "tools": None},
        {"messages": ASKED, "prompt": None},
    ],
)
def test_ways_to_write_one_conversation(values):
    assert conversation(values) == Conversation(ASKED)


def test_pairs_and_texts():
    assert conversation({"prompt": "a", "completion": 1}) == Conversation(prompt="a", completion="1")
    assert conversation({"text": "a"}) == Conversation(text="a")
    assert [conversation(values).form for values in ({"text": "a"}, {"prompt": "a", "completion": "b"})] == [
        "text",
        "pair",
    ]
    assert refused({"text": " "}).code == "no_supervised_token"


def test_of_a_completion_only_its_own_turns_are_learned():
    turns = conversation({"prompt": [*ASKED, ASKED[0]], "completion": ASKED[1:]}).messages
    assert [turn.get("weight") for turn in turns] == [None, 0, None, None]


def test_alpaca_with_input_history_and_system():
    row = {"instruction": "a", "input": "i", "output": "b", "system": "s", "history": [["c", "d"]]}
    assert [(turn["role"], turn["content"]) for turn in conversation(row).messages] == [
        ("system", "s"),
        ("user", "c"),
        ("assistant", "d"),
        ("user", "a\n\ni"),
        ("assistant", "b"),
    ]
    assert refused(row | {"history": ["c"]}).code == "bad_row"


def test_sharegpt_with_tools_and_system():
    call = '{"name": "f", "arguments": {"x": 1}}'
    said = [("human", "a"), ("function_call", call), ("observation", "r"), ("gpt", "b")]
    row = {
        "conversations": [{"from": name, "value": text} for name, text in said],
        "system": "s",
        "tools": '[{"name": "f"}]',
    }
    result = conversation(row)
    assert [turn["role"] for turn in result.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert result.messages[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert result.tools == [{"type": "function", "function": {"name": "f"}}]
    assert result.uses_tools


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"function": {"name": "f", "arguments": '{"x": 1}'}},
        {"name": "f", "arguments": {"x": 1}},
        {"name": "f", "arguments": '{"x": 1}'},
    ],
)
def test_ml_13_tool_arguments_may_be_objects_or_json(call):
    turns = [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert conversation({"messages": turns}).messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL],
    }


def test_older_spellings_of_calls_and_roles():
    turns = [
        {"role": "developer", "content": "s"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
        {"role": "function", "name": "f", "content": 3},
    ]
    system, call, result = conversation({"messages": turns}).messages
    assert system["role"] == "system"
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert result == {"role": "tool", "name": "f", "content": "3"}


@pytest.mark.parametrize(
    ("turn", "code"),
    [
        ({"role": "narrator", "content": "a"}, "bad_roles"),
        ({"content": "a"}, "bad_roles"),
        ({"role": None, "content": "a"}, "bad_roles"),
        ({"role": ["user"], "content": "a"}, "bad_roles"),
        ("a", "bad_row"),
        ({"role": "user", "content": {"a": 1}}, "bad_row"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "bad_row"),
        ({"role": "user", "content": "a", "weight": 1}, "bad_row"),
        ({"role": "assistant", "content": "a", "weight": -1}, "bad_row"),
        ({"role": "assistant", "content": "a", "weight": True}, "bad_row"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "bad_row"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1"}]}, "bad_row"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "bad_row"),
        ({"role": "assistant", "tool_calls": ["f"]}, "bad_row"),
        ({"role": "assistant", "tool_calls": 3}, "bad_row"),
    ],
)
def test_bad_turns(turn, code):
    error = refused({"messages": [ASKED[0], turn]})
    assert error.code == code
    assert "messages[1]" in error.message


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"messages": "no json"}, "bad_row"),
        ({"messages": {"role": "user"}}, "bad_row"),
        ({"prompt": ["a"], "completion": "b"}, "bad_row"),
        ({"prompt": "a", "completion": {"b": 1}}, "bad_row"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "bad_roles"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "bad_roles"),
        ({"conversations": ["a"]}, "bad_row"),
        ({"messages": ASKED, "tools": [{"parameters": {}}]}, "bad_row"),
        ({"messages": ASKED, "tools": "nothing"}, "bad_row"),
        ({"messages": ASKED, "tools": 3}, "bad_row"),
    ],
)
def test_bad_rows(values, code):
    assert refused(values).code == code


@pytest.mark.parametrize(
    "values",
    [
        {"question": "2+2?", "answer": "4"},
        {"prompt": "a"},
        {"text": "a", "prompt": "b"},
        {"messages": ASKED, "prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": None},
        {},
    ],
)
def test_df_21_columns_that_fit_no_form_or_two_are_refused(values):
    error = refused(values)
    assert error.code == "unknown_columns"
    assert error.evidence["columns_found"] == list(values)
    assert "prompt+completion" in error.message


def test_a_named_form_is_taken_among_several():
    row = {"instruction": "a", "output": "b", "text": "below is"}
    assert form_of(row, "alpaca") == "alpaca"
    assert conversation(row, "text") == Conversation(text="below is")
    assert refused(row, "messages").code == "unknown_columns"


def test_the_text_domain_has_no_verifier():
    assert not text_domain().has_verifier
    assert text_domain().digest != text_domain("alpaca").digest


def test_rows_split_by_prompt():
    rows = [Row({"prompt": f"q{number % 5}", "completion": str(number)}, "f", number) for number in range(20)]
    train, held = text_domain().split(rows, 0.25, 0)
    assert len(held) == 4
    assert not {rows[place].values["prompt"] for place in train} & {
        rows[place].values["prompt"] for place in held
    }
