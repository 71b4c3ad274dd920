"""Verifiers in their processes: values, faults of user code, time, environment, and what the settings mean."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from finetune.domains.math import math_domain
from finetune.domains.registry import domain_from_file
from finetune.domains.text import text_domain
from finetune.domains.verifiers import Answer, open_verifiers
from finetune.errors import FinetuneError

CODE = """
import asyncio, os, subprocess, sys, time

def number(completion):
    return float(completion)

def faulty(completion):
    if completion == "loop":
        while True: pass
    if completion == "power":
        9 ** 9 ** 9
    if completion == "die":
        os._exit(3)
    if completion == "leave":
        sys.exit(0)
    if completion == "raise":
        print("said before")
        raise KeyError("lost")
    return 1.0

def value(completion):
    return eval(completion, {"torch": None, "numpy": __import__("numpy")})

def named(row, completion, answer, prompt, stopped, absent=7):
    return float(row["answer"] == answer and completion == "c" and prompt == "p" and stopped and absent == 7)

def anything(completion, **columns):
    return float(columns["answer"] == "5" and columns["prompt"] == "p")

def lacking(completion, column_that_is_not_there):
    return 1.0

def batched(completions, rows, prompts, answer):
    assert len(completions) == len(rows) == len(prompts) == len(answer)
    return [float(one) for one in completions]

def relative(completions):
    return [len(completions)] * len(completions)

def batched_faulty(completions):
    for one in completions:
        faulty(one)
    return [1.0] * len(completions)

def short(completions): return [1.0]
def bare(completions): return 1.0
def texts(completions): return ["1.0"] * len(completions)
def booleans(completions): return [True] * len(completions)
def array(completions): return __import__("numpy").ones(len(completions))

async def later(completion):
    await asyncio.sleep(60 if completion == "loop" else 0.05)
    if completion == "block":
        time.sleep(60)
    return {"length": len(completion), "said": completion == "a"}

async def all_later(completions):
    await asyncio.sleep(0.01)
    return [0.5] * len(completions)

def alarmed(completion):
    import signal
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(30)
    return 1.0

def environment(completion):
    return {name: float(name in os.environ) for name in completion.split()}

def noisy(completion):
    os.system("yes | head -c 50000000; printf '\\\\377\\\\376'; FINETUNE_TEST=noisy sleep 1000 & setsid sleep 1000 &")
    return 1.0
"""
ROW = {"answer": "5"}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifiers") / "mine.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def rewards(file):
    """Return what one function of the file gives to completions."""

    def rewards(function, *completions, timeout_s=10.0, workers=1):
        with open_verifiers([f"{file}:{function}"], [], text_domain(), timeout_s, workers) as verifiers:
            return verifiers.score([Answer(ROW, text, "p", True, f"rows:{text}") for text in completions])

    return rewards


def values(rewards):
    return [reward.value for reward in rewards]


def test_rewards_come_back_in_the_order_of_the_answers(rewards):
    numbers = [float(number) for number in range(40)]
    assert values(rewards("number", *map(str, numbers))) == numbers


@pytest.mark.parametrize("fault", ["loop", "power"])
def test_an_answer_on_which_a_verifier_hangs_costs_itself_alone(rewards, fault):
    began = time.monotonic()
    got = rewards("faulty", "fine", fault, "good", timeout_s=1.0)
    assert time.monotonic() - began < 1.0 + 5 + 10  # and the start of the processes
    assert [(reward.value, reward.status) for reward in got] == [
        (1.0, "scored"),
        (None, "timeout"),
        (1.0, "scored"),
    ]
    assert got[1].error.startswith("verifier_timeout: mine:faulty, rows:")
    assert got[1].parts == {"mine:faulty": None}


def test_a_process_that_dies_and_an_exception_are_errors_and_not_zero(rewards):
    got = rewards("faulty", "fine", "die", "raise", "leave", "good")
    assert [reward.status for reward in got] == ["scored", "error", "error", "error", "scored"]
    assert values(got) == [1.0, None, None, None, 1.0]
    assert got[1].error.startswith("verifier_died: mine:faulty, rows:die")
    assert got[2].error.startswith("mine:faulty, rows:raise: KeyError: 'lost'\nTraceback")
    assert got[2].error.endswith("printed: said before\n")
    assert "SystemExit" in got[3].error


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("None", None, "unscorable"),
        ("float('nan')", None, "invalid"),
        ("float('inf')", None, "invalid"),
        ("10 ** 3", 1000.0, "scored"),
        ("True", 1.0, "scored"),
        ("numpy.float32(0.5)", 0.5, "scored"),
        ("numpy.array([0.25])", 0.25, "scored"),
        ("{'a': 1, 'b': 0.5}", 1.5, "scored"),
        ("{'a': 1, 'b': None}", None, "unscorable"),
        ("{'a': float('inf'), 'b': 1}", None, "invalid"),
    ],
)
def test_what_a_function_may_return(rewards, text, value, status):
    (got,) = rewards("value", text)
    assert (got.value, got.status) == (value, status)


def test_parts_are_named_and_none_where_there_is_no_number(rewards):
    assert rewards("value", "{'a': float('inf'), 'b': 1}")[0].parts == {
        "mine:value.a": None,
        "mine:value.b": 1.0,
    }


@pytest.mark.parametrize(
    ("function", "completion", "told"),
    [
        ("value", "'1.0'", "str"),
        ("value", "[1.0]", "list"),
        ("value", "numpy.ones(2)", "ndarray"),
        ("value", "{}", "names"),
        ("short", "a", "expected 8 rewards, got 1"),
        ("bare", "a", "expected a list of 8 rewards, got float"),
        ("texts", "a", "str"),
    ],
)
def test_what_no_answer_excuses_stops_all(rewards, function, completion, told):
    with pytest.raises(FinetuneError) as caught:
        rewards(function, *[completion] * 8)
    assert caught.value.code == "bad_verifier"
    assert told in caught.value.message
    assert f"mine:{function}" in caught.value.message


def test_a_function_of_all_answers_is_called_once_with_all(rewards):
    assert values(rewards("batched", "3", "1", "2")) == [3.0, 1.0, 2.0]
    assert values(rewards("relative", *"abcde")) == [5.0] * 5
    assert values(rewards("booleans", *"ab")) == [1.0, 1.0]
    assert values(rewards("array", *"ab")) == [1.0, 1.0]
    assert values(rewards("all_later", *"ab")) == [0.5, 0.5]


@pytest.mark.parametrize(("fault", "status"), [("loop", "timeout"), ("die", "error"), ("raise", "error")])
def test_a_call_of_all_that_fails_is_made_again_with_each_alone(rewards, fault, status):
    got = rewards("batched_faulty", "a", fault, "b", timeout_s=1.0)
    assert values(got) == [1.0, None, 1.0]
    assert got[1].status == status


def test_coroutines_wait_together_and_time_out_alone(rewards):
    got = rewards("later", "a", "bb", "loop", "ccc", timeout_s=1.5)
    assert values(got) == [2.0, 2.0, None, 3.0]
    assert got[2].status == "timeout"
    assert got[1].parts == {"mine:later.length": 2.0, "mine:later.said": 0.0}


def test_a_coroutine_that_blocks_the_others_costs_itself_alone(rewards):
    got = rewards("later", "a", "block", "bb", timeout_s=1.0)
    assert values(got) == [2.0, None, 2.0]
    assert got[1].status == "timeout"


def test_parameters_are_given_by_name(rewards):
    assert values(rewards("named", "c")) == [1.0]
    assert values(rewards("anything", "c")) == [1.0]
    (lacking,) = rewards("lacking", "c")
    assert "parameter 'column_that_is_not_there' is neither" in lacking.error


@pytest.mark.parametrize("workers", [1, 8])
def test_signals_work_because_each_verifier_has_a_main_thread(rewards, workers):
    assert values(rewards("alarmed", *"abcd", workers=workers)) == [1.0] * 4


def test_the_environment_is_an_allow_list(file, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "HF_TOKEN", "API_KEY"):
        monkeypatch.setenv(name, "1")
    asked = Answer(ROW, "RANK WORLD_SIZE MASTER_ADDR HF_TOKEN API_KEY PATH HOME")
    with open_verifiers([f"{file}:environment"], ["env=API_KEY,NOT_SET"], text_domain()) as verifiers:
        (reward,) = verifiers.score([asked])
    found = {name.rpartition(".")[2] for name, value in reward.parts.items() if value}
    assert found == {"API_KEY", "PATH", "HOME"}


def test_output_is_drained_and_what_is_left_running_is_ended(file):
    with open_verifiers([f"{file}:noisy"], [], text_domain(), 60.0, 1) as verifiers:
        markers = [worker.marker for worker in verifiers.pool._workers]
        assert values(verifiers.score([Answer(ROW, "a")])) == [1.0]
        end = time.monotonic() + 20
        while len(processes(markers[0])) > 1 and time.monotonic() < end:
            time.sleep(0.02)
        assert len(processes(markers[0])) == 1  # the verifier process itself
    assert processes(markers[0]) == []


def processes(marker):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_scores_may_be_asked_for_from_several_threads_that_end(file):
    got = {}
    with open_verifiers([f"{file}:number"], [], text_domain()) as verifiers:

        def ask(number):
            got[number] = values(verifiers.score([Answer(ROW, str(number))] * 5))

        for _ in range(2):
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert got == {number: [float(number)] * 5 for number in range(4)}


def test_several_verifiers_are_summed_by_weight_and_all_must_have_a_value(file):
    specs = ["numeric:0.8", f"{file}:value:-0.5"]
    with open_verifiers(specs, [], math_domain()) as verifiers:
        both, none, huge = verifiers.score([Answer(ROW, text) for text in ("5", "None # 5", "1e999 # 5")])
    assert verifiers.weights == {"numeric": 0.8, "mine:value": -0.5}
    assert both.value == pytest.approx(0.8 * 1 - 0.5 * 5)
    assert list(both.parts) == ["numeric", "mine:value"]
    assert (none.value, none.parts, none.status) == (None, {"numeric": 1.0, "mine:value": None}, "unscorable")
    assert huge.status == "invalid"


def test_the_domains_own_score_stands_for_auto(tmp_path):
    with open_verifiers(["auto"], [], math_domain()) as verifiers:
        assert verifiers.names == ["numeric"]
        assert values(verifiers.score([Answer(ROW, "it is 5."), Answer(ROW, "6")])) == [1.0, 0.0]
    path = tmp_path / "own.py"
    path.write_text(
        "def conversation(row): return []\ndef split(rows, fraction, seed): return [], []\n"
        "def metrics(scores): return {}\ndef score(values, text): return text == values['c']\n"
    )
    with open_verifiers(["auto:2"], [], domain_from_file(path)) as verifiers:
        assert values(verifiers.score([Answer({"c": "x"}, "x"), Answer({"c": "x"}, "y")])) == [2.0, 0.0]


def test_no_answers_have_no_rewards(file):
    with open_verifiers([f"{file}:batched"], [], text_domain()) as verifiers:
        assert verifiers.score([]) == []


def test_after_closing_no_process_is_left_and_nothing_is_scored(file):
    verifiers = open_verifiers([f"{file}:number"], [], text_domain())
    pids = [worker.process.pid for worker in verifiers.pool._workers]
    verifiers.close()
    assert pids
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    with pytest.raises(FinetuneError):
        verifiers.score([Answer(ROW, "1")])


def test_the_processes_die_with_ours(file):
    code = (
        "import sys\nfrom finetune.domains.text import text_domain\n"
        "from finetune.domains.verifiers import Answer, open_verifiers\n"
        f"verifiers = open_verifiers(['{file}:faulty'], [], text_domain(), 60.0, 1)\n"
        "print(verifiers.pool._workers[0].marker, flush=True)\n"
        "verifiers.score([Answer({}, 'loop')])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        marker = parent.stdout.readline().strip()
        assert len(processes(marker)) == 1
        parent.kill()
    end = time.monotonic() + 20
    while processes(marker) and time.monotonic() < end:
        time.sleep(0.02)
    assert processes(marker) == []
