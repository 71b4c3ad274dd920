"""Files of every kind become rows as they stand, or an error that names file and line."""

import datetime
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from finetune.data.formats import Faults
from finetune.data.rows import arithmetic_rows, data_digest, eval_sources, read_rows
from finetune.errors import FinetuneError, Problems

ROWS = b'{"prompt":"a","completion":"b"}\n{"prompt":"c","completion":"d"}\n'


def values(path):
    return [row.values for row in read_rows([str(path)]).rows]


def refused(sources, *map_entries) -> FinetuneError:
    with pytest.raises((Problems, FinetuneError)) as caught:
        read_rows([str(source) for source in sources], map_entries)
    return caught.value.errors[0] if isinstance(caught.value, Problems) else caught.value


def test_df_01_a_byte_order_mark_changes_nothing(write):
    plain, marked = write(ROWS, name="plain.jsonl"), write(b"\xef\xbb\xbf" + ROWS, name="marked.jsonl")
    assert (
        values(marked)
        == values(plain)
        == [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    )
    assert read_rows([marked]).columns == ["prompt", "completion"]
    assert values(write("\ufeffprompt,completion\na,b\n", name="bom.csv")) == [
        {"prompt": "a", "completion": "b"}
    ]
    assert values(write('\ufeff[{"prompt": "a"}]', name="bom.json")) == [{"prompt": "a"}]


def test_windows_line_ends_and_blank_lines(write):
    rows = read_rows([write(ROWS.replace(b"\n", b"\r\n") + b"\r\n \n")])
    assert [row.values["completion"] for row in rows.rows] == ["b", "d"]
    assert rows.files[0].blank == 2
    table = read_rows([write(b"prompt,completion\r\na,b\r\n\r\nc,d\r\n", name="crlf.csv")])
    assert [(row.line, row.values["completion"]) for row in table.rows] == [(2, "b"), (4, "d")]


def test_a_last_line_without_line_feed_is_read(write):
    assert len(values(write(ROWS[:-1]))) == 2


def test_df_03_unicode_line_separators_stay_inside_a_row(write):
    text = '{"prompt":"left\u2028right","completion":"ok"}\n{"prompt":"x\u0085y","completion":"ok"}\n'
    assert [row["prompt"] for row in values(write(text))] == ["left\u2028right", "x\u0085y"]
    assert [row["prompt"] for row in values(write("prompt\nleft\u2028right\n", name="ls.csv"))] == [
        "left\u2028right"
    ]


def test_df_07_dates_stay_text(write):
    assert values(write({"completion": "2024-01-02"})) == [{"completion": "2024-01-02"}]


def test_df_09_table_cells_stay_text(write):
    assert [
        row["completion"] for row in values(write("prompt,completion\nzip?,00501\nz?,02139\n", name="z.csv"))
    ] == [
        "00501",
        "02139",
    ]
    assert [row["completion"] for row in values(write("prompt,completion\nn?,7\nm?,\n", name="i.csv"))] == [
        "7",
        "",
    ]


def test_tables_keep_quoted_line_feeds_and_name_the_first_line_of_a_row(write):
    rows = read_rows([write('prompt\tcompletion\n"two\nlines"\tb\nc\td\n', name="t.tsv")]).rows
    assert [(row.line, row.values["prompt"]) for row in rows] == [(2, "two\nlines"), (4, "c")]


def test_a_cell_longer_than_the_csv_module_allows_is_read(write):
    assert (
        len(values(write("prompt,completion\na," + "x" * 200_000 + "\n", name="huge.csv"))[0]["completion"])
        == 200_000
    )


@pytest.mark.parametrize(
    ("name", "text", "code", "line"),
    [
        ("a.jsonl", '{"a":1}\n{"a":\n', "bad_row", 2),
        ("a.jsonl", '{"a":1}\n["a"]\n', "bad_row", 2),
        ("a.jsonl", '{"a":NaN}\n', "bad_row", 1),
        ("a.jsonl", '{"a":"\\ud800"}\n', "bad_row", 1),
        ("a.jsonl", '{"a":' + "[" * 100_000 + "\n", "bad_row", 1),
        ("a.jsonl", '{"a":' + "9" * 5000 + "}\n", "bad_row", 1),
        ("a.jsonl", b'{"a":1}\n{"a":"\xe9"}\n', "bad_row", 2),
        ("a.jsonl", '{"a":1}\n'.encode("utf-16"), "bad_row", 1),
        ("a.json", '[\n{"a":1},\n{"a":}\n]', "bad_row", 3),
        ("a.json", '[{"a":1}\n{"a":2}]', "bad_row", 1),
        ("a.json", '[{"a":1}] x', "bad_row", 1),
        ("a.json", '[\n{"a":1},\n{"a":1,"a":2}]', "duplicate_key", 3),
        ("a.json", "3", "bad_row", 1),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "bad_row", 3),
        ("a.csv", 'a,b\n1,"2\n', "bad_row", 3),
        ("a.csv", "a,a\n1,2\n", "duplicate_key", 1),
        ("a.csv", b"a\n\xff\n", "bad_row", 2),
        ("a.parquet", "no parquet", "bad_row", 1),
    ],
)
def test_a_bad_row_names_its_file_and_line(write, name, text, code, line):
    path = write(text, name=name)
    error = refused([path])
    assert (error.code, error.evidence["file"], error.evidence["line"]) == (code, path, line)
    assert error.message.startswith(f"{path}:{line}: ")


def test_df_20_equal_keys_in_one_object_are_refused(write):
    error = refused([write('{"prompt":"2+2?","completion":"4","completion":"5"}\n')])
    assert (error.code, error.evidence["line"], error.evidence["key"]) == ("duplicate_key", 1, "completion")


def test_all_bad_rows_are_reported_at_once_and_the_list_is_capped(write):
    error = refused([write("x\n" * 50)])
    assert error.evidence["count"] == 50
    assert len(error.evidence["places"]) == 20
    faults = Faults()
    faults.add("bad_row", "f", 1, "one")
    faults.add("duplicate_key", "f", 2, "two", key="k")
    assert [found.code for found in faults.errors()] == ["bad_row", "duplicate_key"]


def test_df_10_and_df_11_parquet_gives_the_values_of_jsonl(tmp_path, write):
    tools = [
        {"function": {"name": name, "parameters": {"properties": {key: {"type": "string"}}}}}
        for name, key in ("ap", "bq")
    ]
    call = {"function": {"name": "find", "arguments": {"names": ["x", "y"]}}}
    rows = [
        {
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}],
            "tools": [tools[0]],
        }
    ]
    rows += [
        {
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "tools": [tools[1]],
        }
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert values(path) == values(write(*rows)) == rows


def test_parquet_dates_become_text(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"day": datetime.date(2024, 1, 2), "none": None}]), path
    )
    assert values(path) == [{"day": "2024-01-02", "none": None}]


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": 1}, {"a": 2}]',
        '{"data": [{"a": 1}, {"a": 2}]}',
        '{"a": 1}\n{"a": 2}\n',
        '[\n {"a": 1},\n {"a": 2}\n]\n',
    ],
)
def test_json_files_hold_a_list_or_lines(write, text):
    assert values(write(text, name="rows.json")) == [{"a": 1}, {"a": 2}]


def test_a_json_file_may_be_one_row(write):
    assert values(write('{"prompt": "a", "completion": "b"}', name="one.json")) == [
        {"prompt": "a", "completion": "b"}
    ]


def test_df_16_the_digest_is_of_the_content(write):
    first = read_rows([write(b'{"a":"one"}\n')]).files[0]
    second = read_rows([write(b'{"a":"two"}\n')]).files[0]
    assert (first.path, first.bytes) == (second.path, second.bytes)
    assert first.sha256 == hashlib.sha256(b'{"a":"one"}\n').hexdigest() != second.sha256


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("empty.jsonl", ""),
        ("head.csv", "prompt,completion\n"),
        ("blank.jsonl", "\n\n"),
        ("empty.json", "[]"),
        ("e.csv", ""),
    ],
)
def test_df_18_a_file_without_rows_is_named(write, name, text):
    path = write(text, name=name)
    error = refused([path])
    assert (error.code, error.evidence["file"]) == ("no_rows", path)
    assert path in error.message


def test_df_19_a_column_that_is_null_for_long_is_read(write):
    rows = [{"prompt": f"p{number}", "note": None} for number in range(60_000)] + [
        {"prompt": "last", "note": "late"}
    ]
    read = read_rows([write(*rows)])
    assert len(read.rows) == read.files[0].rows == 60_001
    assert read.rows[-1].values == {"prompt": "last", "note": "late"}


def test_df_21_columns_are_renamed_as_asked(write):
    path = write({"question": "2+2?", "answer": "4"})
    assert read_rows([path], ["prompt=question", "completion=answer"]).rows[0].values == {
        "prompt": "2+2?",
        "completion": "4",
    }
    error = refused([path], "prompt=asked")
    assert (error.code, error.evidence["columns_found"]) == ("unknown_columns", ["question", "answer"])
    assert refused([path], "answer=question").code == "unknown_columns"
    with pytest.raises(FinetuneError, match="NAME=COLUMN"):
        read_rows([path], ["prompt"])


def test_a_map_may_swap_two_columns(write):
    path = write({"prompt": "a", "completion": "b"})
    assert read_rows([path], ["prompt=completion", "completion=prompt"]).rows[0].values == {
        "completion": "a",
        "prompt": "b",
    }


def test_di_18_the_files_of_a_folder_are_sorted_by_name(tmp_path, write):
    for name in ("b.jsonl", "a.jsonl", "A.jsonl", "c.csv"):
        write("prompt\nx\n" if name == "c.csv" else {"prompt": name}, name=name)
    write("import os; os.abort()", name="data.py")
    (tmp_path / "inner").mkdir()
    read = read_rows([str(tmp_path) + "/"])
    assert [Path(file.path).name for file in read.files] == ["A.jsonl", "a.jsonl", "b.jsonl", "c.csv"]
    assert [row.values["prompt"] for row in read.rows] == ["A.jsonl", "a.jsonl", "b.jsonl", "x"]
    assert refused([tmp_path / "inner"]).code == "file_missing"


def test_ca_13_paths_become_absolute(tmp_path, monkeypatch, write):
    folder = tmp_path / "d ä 1"
    folder.mkdir()
    (folder / "a b.jsonl").write_bytes(ROWS)
    (tmp_path / "link.jsonl").symlink_to(folder / "a b.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(folder))
    for source in ("./d ä 1/a b.jsonl", "d ä 1/", "~/a b.jsonl", "link.jsonl"):
        read = read_rows([source])
        assert len(read.rows) == 2
        assert Path(read.files[0].path).is_absolute()


def test_missing_and_foreign_files(tmp_path, write):
    error = refused([tmp_path / "no.jsonl", "builtin:poetry", write("x", name="a.docx")])
    assert (error.code, error.evidence["file"]) == ("file_missing", str(tmp_path / "no.jsonl"))
    with pytest.raises(Problems) as caught:
        read_rows([str(tmp_path / "no.jsonl"), "builtin:poetry", write("x", name="a.docx")])
    assert [error.code for error in caught.value.errors] == ["file_missing", "bad_value", "bad_value"]


def test_a_hub_id_without_network_is_offline():
    with pytest.raises(FinetuneError) as caught:
        read_rows(["nobody/no-such-rows-here"])
    assert caught.value.code == "offline"


def test_weights_take_a_share_that_does_not_depend_on_the_place_of_the_file(tmp_path, write):
    rows = [{"n": number} for number in range(10)]
    first, second = write(*rows, name="first.jsonl"), write(*rows, name="second.jsonl")
    share = read_rows([f"{first}:0.7"])
    assert (len(share.rows), len(share.left_out), share.files[0].rows) == (7, 3, 10)
    assert [row.values for row in share.rows] == [row.values for row in read_rows([f"{second}:0.7"]).rows]
    assert [row.line for row in share.rows] == sorted(row.line for row in share.rows)
    assert len(read_rows([f"{first}:2.5"]).rows) == 25
    assert refused([f"{first}:0"]).code == "bad_value"
    odd = write(*rows, name="odd.jsonl:2")
    with pytest.raises(Problems):
        read_rows([odd])  # the file exists under its whole name, whose ending says nothing


def test_quick_digest_counts_without_building_rows(write):
    paths = [write(b"\n" + ROWS), write("a\n1\n\n2\n", name="t.csv"), write("a,b\n1\n", name="bad.csv")]
    digests = data_digest([paths[0] + ":0.5", paths[1], paths[2], "builtin:arithmetic", "owner/name"])
    assert [digest["rows"] for digest in digests] == [2, 2, None, 1600, None]
    assert digests[0] == {
        "path": paths[0],
        "sha256": hashlib.sha256(b"\n" + ROWS).hexdigest(),
        "bytes": len(ROWS) + 1,
        "rows": 2,
        "weight": 0.5,
    }


def test_builtin_arithmetic_has_two_sides_without_a_common_question():
    train, held_out = (read_rows([name]) for name in ("builtin:arithmetic", "builtin:arithmetic:eval"))
    assert (len(train.rows), len(held_out.rows)) == (1600, 500)
    questions = [row.values["prompt"] for row in train.rows + held_out.rows]
    assert len(set(questions)) == 2100
    row = arithmetic_rows("builtin:arithmetic")[0]
    a, sign, b = row["prompt"].removeprefix("What is ").removesuffix("? Answer with just the number.").split()
    assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
    assert train.files[0].sha256 == read_rows(["builtin:arithmetic"]).files[0].sha256
    assert eval_sources(["builtin:arithmetic:0.5"]) == ["builtin:arithmetic:eval"]
    assert eval_sources(["builtin:arithmetic", "a.jsonl"]) == []


def test_reading_rows_needs_no_heavy_library(write):
    program = (
        "import sys; from finetune.data.rows import read_rows, data_digest; "
        f"data_digest([{write(ROWS)!r}]); read_rows([{write(ROWS)!r}]); "
        "print({'torch', 'transformers', 'datasets', 'tokenizers'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"


def test_se_05_ids_in_rows_name_no_files(tmp_path, write):
    """SE-05: an id of a row is a value like any other; nothing is named after it."""
    names = [f"../../..{tmp_path}/evil", f"{tmp_path}/evil2", "a/b", "CON", "x" * 300, "A", "a", "nul\0"]
    rows = read_rows([write(*[{"id": name, "prompt": "p"} for name in names])]).rows
    assert [row.values["id"] for row in rows] == names
    assert [row.line for row in rows] == list(range(1, 9))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert json.dumps(rows[-1].values)
