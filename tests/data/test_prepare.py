"""Rows become examples with an account of every row; each fault of the rows has its code, its place and its way out."""

import dataclasses
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from finetune.config import SftConfig
from finetune.data.chat import ChatFormat
from finetune.data.prepare import load_prepared, prepare, prepared_key, read_row_sets, store_prepared
from finetune.errors import FinetuneError, Problems
from finetune.methods import METHODS
from finetune.records import Ledger
from tests.data.turns import STRIPS_THOUGHTS

PAIR = {"prompt": "2+2?", "completion": " 4"}
CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


def said(answer, question="Find x", **more):
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer} | more]
    }


def refused(prepared, *rows, **settings) -> list[FinetuneError]:
    with pytest.raises((Problems, FinetuneError)) as caught:
        prepared(*rows, **settings)
    return caught.value.errors if isinstance(caught.value, Problems) else [caught.value]


def warned(result) -> set[str]:
    return {code for code, _ in result.warnings}


def test_ml_19_only_answers_are_learned_and_the_report_says_so(prepared, learned):
    result = prepared(CHAT)
    assert learned(result.train[0]) == "4<|im_end|>"
    assert (result.report["learn"], result.report["form"], result.report["selfcheck"]) == (
        "all",
        "chat",
        "ok",
    )
    assert result.report["num_supervised"] == 2
    assert result.report["preview"] == [
        [("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False), ("4<|im_end|>", True)]
    ]


def test_ml_08_learn_last(prepared):
    rows = {"messages": CHAT["messages"] * 2}
    assert [prepared(rows, learn=learn).report["num_supervised"] for learn in ("all", "last")] == [4, 2]


def test_df_06_numbers_become_their_json_text(prepared, learned):
    result = prepared(
        '{"prompt":"a","completion":1}\n{"prompt":"b","completion":"two"}\n{"prompt":"c","completion":true}\n'
    )
    assert [learned(example) for example in result.train] == [
        "1<|im_end|>",
        "two<|im_end|>",
        "true<|im_end|>",
    ]


def test_df_07_dates_are_learned_as_they_stand(prepared, learned):
    assert (
        learned(prepared({"prompt": "when?", "completion": "2024-01-02"}).train[0]) == "2024-01-02<|im_end|>"
    )


def test_df_09_table_cells_are_learned_as_they_stand(prepared, learned):
    result = prepared("prompt,completion\nzip?,00501\nother zip?,02139\n", name="zero.csv")
    assert [learned(example) for example in result.train] == ["00501<|im_end|>", "02139<|im_end|>"]
    result = prepared("prompt,completion\nn?,7\nm?,\n", name="int.csv", on_bad_row="drop")
    assert [learned(example) for example in result.train] == ["7<|im_end|>"]
    assert [place[-1] for place in result.ledger.dropped["empty_assistant"]] == ["3"]


def test_df_10_parquet_gives_the_ids_of_jsonl(prepared, tmp_path, shown):
    call = {"function": {"name": "find", "arguments": {"names": ["x", "y"]}}}
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
    }
    path = tmp_path / "m.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    from_table, from_lines = prepared(data=[str(path)]).train[0], prepared(row).train[0]
    assert from_table.input_ids == from_lines.input_ids
    assert '{"names": ["x", "y"]}' in shown(from_table)


def test_df_12_null_content(prepared, learned):
    call = {"type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
    (error,) = refused(prepared, said(None), said(None, tool_calls=[call]))
    assert (error.code, error.evidence["line"], error.evidence["count"]) == ("empty_assistant", 1, 1)
    result = prepared(said(None, tool_calls=[call]))
    assert learned(result.train[0]).startswith('<tool_call>\n{"name": "find"')
    assert "None" not in learned(result.train[0])
    assert "template_ignores_tools" in warned(result)


def test_df_13_empty_answers_are_refused_or_dropped_by_line(prepared):
    rows = said(""), said("   "), said("8")
    (error,) = refused(prepared, *rows)
    assert (error.code, [place.rpartition(":")[2] for place in error.evidence["places"]]) == (
        "empty_assistant",
        ["1", "2"],
    )
    result = prepared(*rows, on_bad_row="drop")
    assert [example.line for example in result.train] == [3]
    assert [place.rpartition(":")[2] for place in result.ledger.dropped["empty_assistant"]] == ["1", "2"]
    assert "rows_dropped" in warned(result)
    assert [error.code for error in refused(prepared, *rows[:2], on_bad_row="drop")] == ["too_few_rows"]


def test_df_21_unknown_columns_are_refused_with_what_was_found(prepared, learned):
    rows = {"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}
    (error,) = refused(prepared, *rows)
    assert (error.code, error.evidence["columns_found"]) == ("unknown_columns", ["question", "answer"])
    result = prepared(*rows, map=["prompt=question", "completion=answer"])
    assert [learned(example) for example in result.train] == ["4<|im_end|>", "6<|im_end|>"]
    assert result.report["columns"] == ["prompt", "completion"]


def test_ml_05_a_long_row_is_never_cut_in_silence(prepared):
    long = {"prompt": "What is the capital of France? " * 8, "completion": "Paris."}
    short = {"prompt": "a", "completion": "b"}
    (error,) = refused(prepared, long, short, max_length=16)
    assert (error.code, error.evidence["line"], error.evidence["setting"]) == ("too_long", 1, "max_length")
    result = prepared(long, short, max_length=16, on_long="drop")
    assert {reason: len(places) for reason, places in result.ledger.dropped.items()} == {
        "no_supervised_token": 1
    }
    assert (result.ledger.read, result.ledger.trained) == (2, 1)
    (error,) = refused(prepared, long, max_length=16, on_long="drop")
    assert error.code == "too_few_rows"
    assert "--max-length" in error.message


def test_a_prompt_is_cut_from_its_beginning_and_the_bos_stays(prepared, learned):
    long = {"prompt": "What is the capital of France? " * 8, "completion": "Paris."}
    query = "post_bos=1"
    result = prepared(long, query=query, max_length=16, on_long="truncate-prompt")
    (example,) = result.train
    whole = prepared(long, query=query).train[0]
    assert example.input_ids == [1, *whole.input_ids[-15:]]
    assert learned(example) == "Paris.<|im_end|>"
    assert len(result.ledger.truncated["prompt"]) == result.ledger.trained == 1
    assert "rows_truncated" in warned(result)


def test_an_answer_is_never_cut(prepared):
    long = {"prompt": "a", "completion": "What is the capital of France? " * 8}
    (error,) = refused(prepared, long, max_length=16, on_long="truncate-prompt")
    assert error.code == "too_long"
    result = prepared(long, PAIR, max_length=16, on_long="drop")
    assert list(result.ledger.dropped) == ["too_long"]


def test_max_length_is_at_most_the_context(prepared):
    assert prepared(PAIR).report["max_length"] == 512
    (error,) = refused(prepared, PAIR, max_length=513)
    assert error.code == "bad_value"


def test_all_problems_are_reported_at_once(prepared):
    rows = [said(""), {"messages": [{"role": "narrator", "content": "x"}]}, {"prompt": "a"}, said("x" * 2000)]
    errors = refused(prepared, *rows)
    assert {error.code: error.evidence["line"] for error in errors} == {
        "empty_assistant": 1,
        "bad_roles": 2,
        "unknown_columns": 3,
        "too_long": 4,
    }
    errors = refused(prepared, *rows, chat_template_args=["mood=good"])
    assert errors[0].code == "setting_without_effect"
    assert {"bad_roles", "unknown_columns"} <= {error.code for error in errors}


def test_a_conversation_without_a_learned_turn(prepared):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}
    assert [error.code for error in refused(prepared, row)] == ["no_supervised_token"]
    assert list(prepared(row, CHAT, on_bad_row="drop").ledger.dropped) == ["no_supervised_token"]


def test_tokens_past_the_embedding(write, tiny):
    config = SftConfig(model="m", data=[write(PAIR)], eval_fraction=0)
    with pytest.raises(Problems) as caught:
        prepare(read_row_sets(config), config, tiny(), 4, 512)
    assert [error.code for error in caught.value.errors] == ["tokens_past_embedding"]


def test_settings_without_effect_on_plain_text(prepared):
    errors = refused(prepared, PAIR, system_prompt="be brief", chat_template="chatml")
    assert [error.evidence["setting"] for error in errors] == ["system_prompt", "chat_template"]


def test_a_template_by_name_by_file_and_by_mistake(prepared, tmp_path, shown):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}{{ '<s>' + m['content'] + '</s>' }}{% endfor %}")
    assert shown(prepared(CHAT, chat_template=str(path)).train[0]) == "<s>2+2?</s><s>4</s>"
    assert shown(prepared(CHAT, query="template=none", chat_template="chatml").train[0]).endswith(
        "assistant\n4<|im_end|>"
    )
    assert [error.code for error in refused(prepared, CHAT, chat_template="poetry")] == ["file_missing"]
    assert [error.code for error in refused(prepared, CHAT, query="template=none")] == ["no_chat_template"]
    assert [error.code for error in refused(prepared, CHAT, chat_template_args=["messages=[]"])] == [
        "bad_value"
    ]


def test_rows_bring_no_template(prepared, shown):
    """SE-08: a column of that name is a column like any other."""
    assert (
        prepared(CHAT | {"chat_template": "{{ 1/0 }}"}).train[0].input_ids
        == prepared(CHAT).train[0].input_ids
    )


def test_split_and_ledger(prepared):
    rows = [said(str(number), f"q{number}") for number in range(40)]
    result = prepared(*rows, eval_fraction=0.25, eval_rows=4)
    assert result.ledger == Ledger(read=40, trained=30, held_out=10)
    assert result.ledger.balances
    assert len(result.eval) == len(result.eval_rows) == 4
    assert [result.eval_rows[example.row].line for example in result.eval] == [
        example.line for example in result.eval
    ]
    assert not {example.line for example in result.train} & {example.line for example in result.eval}
    again = prepared(*rows, eval_fraction=0.25, eval_rows=4)
    assert again.eval == result.eval
    assert "no_eval_rows" in warned(prepared(*rows))


def test_eval_data_have_their_own_ledger_and_overlap_is_found(prepared, write):
    held = write(said("4", "q1"), said("5", "q9"), said("", "q8"), name="held.jsonl")
    result = prepared(said("1", "q1"), said("2", "q2"), eval_data=[held], on_bad_row="drop")
    assert result.ledger == Ledger(read=2, trained=2)
    assert (result.report["eval_ledger"]["read"], result.report["eval_ledger"]["held_out"]) == (3, 2)
    assert result.report["overlap"] == {"count": 1, "places": [f"{held}:1"]}
    assert "train_eval_overlap" in warned(result)


def test_duplicates_are_found_and_copies_of_a_weight_are_none(prepared, write):
    result = prepared(PAIR, PAIR, {"prompt": "2+2?", "completion": " 5"})
    assert result.report["duplicates"]["count"] == 1
    assert result.report["duplicates"]["places"][0].endswith(":2")
    assert "duplicate_rows" in warned(result)
    twice = prepared(data=[write(PAIR) + ":2"])
    assert (twice.ledger.trained, twice.report["duplicates"]["count"]) == (2, 0)


def test_rows_that_a_weight_leaves_out_are_in_the_ledger(prepared, write):
    path = write(*[said(str(number), f"q{number}") for number in range(10)])
    result = prepared(data=[f"{path}:0.3"])
    assert (result.ledger.read, result.ledger.trained, len(result.ledger.dropped["weight"])) == (10, 3, 7)
    assert "rows_dropped" not in warned(result)


def test_notes_become_warnings(prepared):
    assert "special_text_kept_as_text" in warned(prepared(said("about <|im_end|>")))
    assert "reasoning_dropped" in warned(prepared(said("b", reasoning_content="because")))
    assert "text_beside_template" in warned(prepared(PAIR))
    assert "text_beside_template" not in warned(prepared(PAIR, query="template=none"))
    assert "text_beside_template" not in warned(prepared(CHAT))


def test_lengths(prepared):
    result = prepared(*[{"prompt": "", "completion": "z" * count} for count in (1, 2, 3)])
    assert result.report["lengths"] == {"p50": 3, "p95": 3, "max": 4}
    assert result.report["num_tokens"] == 9


def test_builtin_arithmetic_is_held_out_by_itself(prepared, learned):
    result = prepared(data=["builtin:arithmetic"], eval_rows=100)
    assert (result.ledger.read, result.ledger.trained) == (1600, 1600)
    assert (len(result.eval), result.report["eval_ledger"]["held_out"]) == (100, 500)
    assert result.report["domain"] == "math"
    assert result.report["overlap"]["count"] == 0
    assert learned(result.train[0]) == result.report["preview"][0][1][0] == "55<|im_end|>"


def test_a_conversation_that_is_split_is_one_row(prepared, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(STRIPS_THOUGHTS)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>A</think>one"}] * 2
    result = prepared({"messages": turns}, CHAT, chat_template=str(path))
    assert (result.report["num_rows"], result.report["num_examples"], result.ledger.trained) == (2, 3, 2)
    assert result.ledger.notes == {"split_conversations": 1}
    assert [example.row for example in result.train] == [0, 0, 1]


def test_stored_and_loaded_is_the_same(prepared, tmp_path):
    rows = [said(str(number), f"q{number}", weight=0.7) for number in range(10)]
    result = prepared(*rows, eval_fraction=0.2)
    folder = tmp_path / "prepared" / "key"
    store_prepared(result, folder)
    loaded = load_prepared(folder)
    assert list(loaded.train) == list(result.train)
    assert loaded.train[-1] == result.train[-1]
    assert loaded.train[2:4] == result.train[2:4]
    assert list(loaded.eval) == result.eval
    assert (loaded.eval_rows, loaded.ledger) == (result.eval_rows, result.ledger)
    assert loaded.report == json.loads(json.dumps(result.report))
    assert loaded.warnings == result.warnings
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    store_prepared(result, folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["key"]
    with pytest.raises(IndexError):
        loaded.train[len(loaded.train)]


def test_no_rows_are_stored_and_half_a_folder_is_refused(prepared, tmp_path):
    store_prepared(prepared(PAIR), tmp_path / "key")
    assert len(load_prepared(tmp_path / "key").eval) == 0
    (tmp_path / "key" / "prepared.json").unlink()
    with pytest.raises(FinetuneError) as caught:
        load_prepared(tmp_path / "key")
    assert caught.value.code == "file_missing"


def test_prepared_data_of_another_version_are_refused(prepared, tmp_path):
    store_prepared(prepared(PAIR), tmp_path / "key")
    path = tmp_path / "key" / "prepared.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))
    with pytest.raises(FinetuneError, match="version 0"):
        load_prepared(tmp_path / "key")


def test_df_16_the_key_follows_the_content(write, tiny):
    def key(query="", **settings):
        config = SftConfig(**({"model": "m", "data": [path]} | settings))
        return prepared_key(read_row_sets(config), config, tiny(query), 512)

    path = write(b'{"prompt":"a","completion":"one"}\n')
    os.utime(path, (1, 1))
    first = key()
    assert first == key() == key(learning_rate=0.5, num_gpus=2, out="elsewhere")
    changed = {
        key(learn="last"),
        key(system_prompt="s"),
        key(on_long="drop"),
        key("template=bos"),
        key(data=[path + ":2"]),
    }
    changed |= {key(max_length=100), key(chat_template="chatml"), key(eval_data=[path])}
    path = write(b'{"prompt":"a","completion":"two"}\n')
    os.utime(path, (1, 1))
    changed.add(key())
    assert len(changed | {first}) == 10


def test_every_setting_that_is_in_the_key_exists():
    from finetune.data.prepare import _SETTINGS

    known = {field.name for method in METHODS.values() for field in dataclasses.fields(method.config)}
    assert set(_SETTINGS) <= known


def test_a_users_domain_prepares_rows(prepared, tmp_path, learned):
    path = tmp_path / "mine.py"
    path.write_text(
        "def conversation(row): return [{'role': 'user', 'content': row['q']}, {'role': 'assistant', 'content': row['a']}]\n"
        "def split(rows, fraction, seed): return [0], [1]\n"
        "def score(row, completion): return 1.0\n"
        "def metrics(scores): return {}\n"
    )
    result = prepared({"q": "a", "a": "b"}, {"q": "c", "a": "d"}, domain=str(path))
    assert learned(result.train[0]) == "b<|im_end|>"
    assert result.eval_rows[0].values == {"q": "c", "a": "d"}


def test_gsm8k_rows_are_learned_to_the_last_token(smollm2):
    """On real rows, with SmolLM2's tokenizer: every answer is learned whole, and nothing else."""
    path = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"
    if not path.exists():
        pytest.skip("the rows are not on this machine")
    config = SftConfig(model="m", data=[f"{path}:0.1"], domain="math", eval_fraction=0)
    sets = read_row_sets(config)
    result = prepare(sets, config, smollm2, len(smollm2), 8192)
    encoder = ChatFormat(smollm2)
    for row, example in zip(sets.train.rows, result.train, strict=True):
        learned = [
            text for text, is_learned in encoder.segments(example.input_ids, example.weights) if is_learned
        ]
        assert learned == [row.values["answer"] + "<|im_end|>"]
