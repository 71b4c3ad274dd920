"""Chat templates: their tools, their end of turn, their sandbox, and what is refused."""

import copy
import json

import jinja2
import pytest

from finetune.data.chat import ChatFormat
from finetune.data.conversation import Conversation
from finetune.data.template import chatml_template
from finetune.errors import FinetuneError
from tests.data.turns import CALL, LLAMA2, STRIPS_THOUGHTS, TOOLS, TWO_TURNS, answered


def test_ml_12_and_df_11_each_row_shows_its_own_tools(tiny, shown):
    other = json.loads(json.dumps(TOOLS).replace('"a"', '"b"').replace('"p"', '"q"'))
    encoder = ChatFormat(tiny(), tools=True)
    assert [code for code, _ in encoder.warnings] == ["template_ignores_tools"]
    rows = [Conversation(answered("x", "y"), tools) for tools in (TOOLS, other)]
    first, second = (shown(outcome[0]) for outcome in encoder.encode(rows))
    assert '"name": "a"' in first
    assert '"p"' in first
    assert '"q"' not in first
    assert '"name": "b"' in second
    assert '"q"' in second
    assert '"p"' not in second
    assert "null" not in first + second
    assert "None" not in first + second
    assert shown(encoder.encode(rows[1:])[0][0]) == second


def test_tools_change_nothing_of_conversations_without_tools(tiny):
    for query in ("", "template=bos", "template=gen"):
        plain, with_tools = ChatFormat(tiny(query)), ChatFormat(tiny(query), tools=True)
        assert plain.conversation(TWO_TURNS) == with_tools.conversation(TWO_TURNS)
        assert plain.conversation(TWO_TURNS[1:]) == with_tools.conversation(TWO_TURNS[1:])


def test_df_12_a_tool_call_is_learned_without_content(tiny, learned):
    turns = [
        {"role": "user", "content": "Find x"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    (example,) = ChatFormat(tiny(), tools=True).conversation(turns)
    assert (
        learned(example) == '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call><|im_end|>'
    )


def test_tool_results_are_context(tiny, learned, shown):
    turns = [
        {"role": "user", "content": "Find x"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "r1"},
        {"role": "tool", "content": "r2"},
        {"role": "assistant", "content": "Done."},
    ]
    (example,) = ChatFormat(tiny(), tools=True).conversation(turns, TOOLS)
    call = '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>'
    assert learned(example) == f"Wait.\n{call}\n{call}<|im_end|>Done.<|im_end|>"
    result = "<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>"
    assert f"<|im_start|>user\n{result}<|im_end|>\n" in shown(example)


def test_a_template_that_loses_tools_and_is_no_chatml_is_refused(tiny):
    encoder = ChatFormat(tiny("eos=</s>"), LLAMA2, tools=True)
    assert [problem.code for problem in encoder.problems()] == ["bad_template"]
    assert "chatml" in encoder.problems()[0].message


def test_ml_11_a_template_that_refuses_system_turns_names_the_reason(tiny):
    encoder = ChatFormat(tiny("template=sys_reject"), system_prompt="be brief")
    outcome = encoder.encode([Conversation(answered("a", "b"))])[0]
    assert isinstance(outcome, FinetuneError)
    assert outcome.code == "bad_roles"
    assert "System role not supported" in outcome.message


def test_ml_18_the_known_row_is_checked(tiny):
    assert ChatFormat(tiny()).problems() == []
    tokenizer = copy.deepcopy(tiny())
    tokenizer.apply_chat_template = lambda *arguments, **options: {
        "input_ids": [1, 2],
        "attention_mask": [1, 1],
    }
    assert [problem.code for problem in ChatFormat(tokenizer).problems()] == ["bad_template"]
    drops_users = (
        "{% for m in messages if m['role'] == 'assistant' %}{{ '<s>' + m['content'] + '</s>' }}{% endfor %}"
    )
    assert [problem.code for problem in ChatFormat(tiny(), drops_users).problems()] == ["bad_template"]


def test_unread_template_arguments_are_refused(tiny):
    thinks = STRIPS_THOUGHTS + "{% if enable_thinking %}{% endif %}"
    assert ChatFormat(tiny(), thinks, {"enable_thinking": False}).problems() == []
    assert [problem.code for problem in ChatFormat(tiny(), None, {"enable_thinking": 1}).problems()] == [
        "setting_without_effect"
    ]


def test_se_08_a_template_runs_in_a_sandbox(tiny):
    encoder = ChatFormat(tiny(), '{{ "".__class__.__mro__[1].__subclasses__() }}')
    assert [problem.code for problem in encoder.problems()] == ["bad_template"]
    endless = "{% for i in range(10**9) %}x{% endfor %}"
    assert [problem.code for problem in ChatFormat(tiny(), endless).problems()] == ["bad_template"]


def test_se_08_a_template_that_does_not_end_is_stopped(tiny, monkeypatch):
    monkeypatch.setattr("finetune.data.template.RENDER_SECONDS", 0.3)
    slow = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
    (problem,) = ChatFormat(tiny(), slow).problems()
    assert problem.code == "bad_template"
    assert "not done after 0.3 seconds" in problem.message


def test_a_template_with_a_syntax_error(tiny):
    with pytest.raises(jinja2.TemplateSyntaxError):
        jinja2.Environment().parse("{% if %}")
    assert [problem.code for problem in ChatFormat(tiny(), "{% if %}").problems()] == ["bad_template"]


def test_smollm2_gets_a_template_that_writes_tools(smollm2, learned, shown):
    encoder = ChatFormat(smollm2, tools=True)
    assert encoder.template_text != smollm2.chat_template
    for turns in (TWO_TURNS, TWO_TURNS[1:]):
        assert encoder.conversation(turns) == ChatFormat(smollm2).conversation(turns)
    turns = [
        {"role": "user", "content": "Find x"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    (example,) = encoder.conversation(turns, TOOLS)
    assert shown(example, smollm2).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    assert '"name": "a"' in shown(example, smollm2)
    assert learned(example, smollm2).startswith("<tool_call>")


def test_the_chatml_template_takes_its_texts_literally(tiny):
    system = "quotes \"'\n{{ braces }} ümlaut \U0001f600"
    encoder = ChatFormat(tiny(), chatml_template("<s>", system))
    text = encoder.tokens.decoded(encoder.prompt([{"role": "user", "content": "a"}]))
    assert (
        text
        == f"<s><|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
