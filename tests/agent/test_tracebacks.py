"""Finding the errors in any log, whatever stands around them."""

import traceback
from pathlib import Path

from agent.tracebacks import first_traceback, lines_of, read_lines, tracebacks_of

FRAMES = 'Traceback (most recent call last):\n  File "/x/y.py", line 3, in f\n    g()\n'


def errors(text: str) -> list[tuple[int, str]]:
    return [(found.line, found.error) for found in tracebacks_of(lines_of(text))]


def test_an_error_ends_where_the_log_goes_on() -> None:
    text = f"step 1\n{FRAMES}ValueError: two\nlines of it\n\nINFO shutting down\nKeyError: no error\n"
    (found,) = tracebacks_of(lines_of(text))
    assert (found.line, found.error) == (2, "ValueError: two")
    assert found.text.splitlines()[-1] == "lines of it"
    assert found.last_frame == 'File "/x/y.py", line 3, in f'


def test_what_followed_from_an_error_belongs_to_it() -> None:
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    because = "\nThe above exception was the direct cause of the following exception:\n\n"
    text = f"{FRAMES}KeyError: 'a'\n{during}{FRAMES}OSError: b\n{because}{FRAMES}RuntimeError: c\n\n{FRAMES}TypeError: d\n"
    first, second = tracebacks_of(lines_of(text))
    assert first.errors == ["KeyError: 'a'", "OSError: b", "RuntimeError: c"]
    assert (first.error, second.errors) == ("KeyError: 'a'", ["TypeError: d"])


def test_a_launchers_summary_and_what_python_ignored_are_no_errors() -> None:
    summaries = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL\n",
        "subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' returned non-zero exit status 1.\n",
        "RuntimeError: Engine core initialization failed. See root cause above.\n",
    )
    for summary in summaries:
        assert errors(FRAMES + summary) == [], summary
    assert errors(f"Exception ignored in: <function x>\n{FRAMES}AttributeError: late\n") == []


def test_the_error_behind_a_launchers_summary_is_found() -> None:
    text = f"{FRAMES}ProcessRaisedException:\n\n-- Process 1 terminated with the following error:\n{FRAMES}KeyError: 'a'\n"
    assert errors(text) == [(7, "KeyError: 'a'")]


def test_processes_that_write_into_each_other_are_told_apart() -> None:
    ranks = {0: FRAMES + "ValueError: zero", 1: FRAMES + "ValueError: one"}
    pairs = zip(*(text.splitlines() for text in ranks.values()), strict=True)
    text = "\n".join(f"[rank{rank}]: {line}" for pair in pairs for rank, line in enumerate(pair))
    assert errors(text) == [(1, "ValueError: zero"), (2, "ValueError: one")]
    engine = "\n".join(
        f"(EngineCore pid=7) ERROR 11-29 21:09:13 [core.py:1] {line}" for line in ranks[0].splitlines()
    )
    (found,) = tracebacks_of(lines_of(engine))
    assert (found.error, found.last_frame) == ("ValueError: zero", 'File "/x/y.py", line 3, in f')


def test_the_exceptions_in_a_group_are_found() -> None:
    try:
        raise ExceptionGroup("unhandled errors", [raised(KeyError("a")), raised(OSError("b"))])
    except ExceptionGroup as group:
        text = "".join(traceback.format_exception(group))
    assert [error for _, error in errors(text)] == ["KeyError: 'a'", "OSError: b"]


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_times_before_each_line_and_colours_are_left_out() -> None:
    text = "".join(
        f"2026-01-01T10:00:0{n}.5Z {line}\n" for n, line in enumerate(f"{FRAMES}KeyError: 1".splitlines())
    )
    (found,) = tracebacks_of(lines_of(text.replace("KeyError", "\x1b[31mKeyError\x1b[0m")))
    assert (found.error, found.time) == ("KeyError: 1", "2026-01-01 10:00:00.5")


def test_progress_bars_do_not_hide_an_error(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_bytes(
        b"10%|#\r20%|##\r" + f"{FRAMES}OSError: x\n".encode().replace(b"\n", b"\r\n")
    )
    found = first_traceback(tmp_path / "rank0.log")
    assert found is not None
    assert (found.error, found.line) == ("OSError: x", 3)


def test_an_error_at_the_end_of_a_long_log_is_found_with_its_line(tmp_path: Path) -> None:
    lines = 110_000
    (tmp_path / "long.log").write_text(
        "x" * 49 + "\n" + ("y" * 49 + "\n") * (lines - 1) + f"{FRAMES}OSError: end\n"
    )
    assert (tmp_path / "long.log").stat().st_size > 2 * 2_000_000
    found = first_traceback(tmp_path / "long.log")
    assert found is not None
    assert (found.error, found.line) == ("OSError: end", lines + 1)
    assert read_lines(tmp_path / "long.log")[0].text == "x" * 49


def test_an_error_of_ours_names_its_code() -> None:
    inner = (
        f"{FRAMES}KeyError: 'a'\n\nThe above exception was the direct cause of the following exception:\n\n"
    )
    text = f"{inner}{FRAMES}finetune.errors.FinetuneError: rows.jsonl:3: a key\nerror code: bad_row\n"
    (found,) = tracebacks_of(lines_of(text))
    assert found.ours == ("bad_row", "rows.jsonl:3: a key")
    assert tracebacks_of(lines_of(f"{FRAMES}KeyError: 'a'\n"))[0].ours is None
