"""Ranks as processes: fewer rows than ranks, another number of ranks on resume, what they listen on and measure."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from finetune.data.batches import Budget, rank_batches
from finetune.data.prepare import load_prepared
from finetune.model.builtin import load_model
from finetune.model.source import resolve_source
from finetune.rank import run_rank
from finetune.records import Example, StopFlag
from tests.train.runs import (
    TINY,
    adapter,
    finish,
    finish_on_ranks,
    make_run,
    metrics,
    ragged_examples,
    relative_difference,
    start,
)
from tests.train.test_kill import wait_for

SETTINGS: dict[str, Any] = {
    "global_batch_size": 5,
    "checkpoint_every": 3,
    "learning_rate": 1e-3,
    "max_steps": 8,
}


def run_of(folder: Path, rows: int, **settings: Any) -> Path:
    run = make_run(folder, ragged_examples(rows), **{**SETTINGS, **settings})
    outcome = finish(run)
    assert outcome["exit_code"] == 0, outcome
    return run


def test_one_row_on_two_ranks_weighs_once(tmp_path: Path) -> None:
    """DI-02."""
    one, two = (run_of(tmp_path / str(ranks), 1, num_gpus=ranks, max_steps=3) for ranks in (1, 2))
    assert [line["num_supervised"] for line in metrics(one)] == [
        line["num_supervised"] for line in metrics(two)
    ]
    assert relative_difference(adapter(one), adapter(two)) < 1e-5


def with_settings(run: Path, **settings: Any) -> None:
    plan = json.loads((run / "plan.json").read_text())
    for name, value in settings.items():
        plan["settings"][name]["value"] = value
    (run / "plan.json").write_text(json.dumps(plan))


def test_resume_on_other_ranks_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    straight = run_of(tmp_path / "straight", 7)
    run = run_of(tmp_path / "run", 7, max_steps=3, schedule="constant")
    constant = run_of(tmp_path / "constant", 7, schedule="constant")
    for ranks, kind, steps in ((2, "fsdp2", 6), (3, "ddp", 8)):
        with_settings(run, num_gpus=ranks, parallel=kind, max_steps=steps)
        outcome = finish(run)
        assert outcome["exit_code"] == 0, outcome
        assert outcome["result"]["facts"]["world_size"] == ranks
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))
    assert [line["rows"] for line in metrics(run)] == [line["rows"] for line in metrics(straight)]
    assert [line["loss"] for line in metrics(run)] == pytest.approx(
        [line["loss"] for line in metrics(constant)], abs=5e-6
    )
    assert relative_difference(adapter(constant), adapter(run)) < 1e-5


def test_ranks_of_one_node_listen_on_the_loopback_interface_only(tmp_path: Path) -> None:
    """SE-11, DI-07: no fixed port either; two runs at once do not meet."""
    runs = [
        make_run(tmp_path / name, ragged_examples(7), **{**SETTINGS, "num_gpus": 2, "max_steps": 40})
        for name in "ab"
    ]
    parents = [start(run) for run in runs]
    pids = [wait_for(run, rank, "training", 1) for run in runs for rank in (0, 1)]
    listening = [
        connection.laddr
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}
    assert len({address.port for address in listening}) == len(listening)
    assert [parent.wait(timeout=120) for parent in parents] == [0, 0]
    assert [len(metrics(run)) for run in runs] == [40, 40]


# Tokens of a forward at most -> forwards of one rank: rows of 8, 8 and 45 go one by one, two and one, all together.
FORWARDS = {8: 3, 20: 2, 4096: 1}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Runs of 5 rows, one a rank and step, by their number of ranks and by the tokens of a forward."""
    draw = torch.Generator().manual_seed(9)
    held_out = [
        Example(
            torch.randint(5, 300, (6 + length,), generator=draw).tolist(),
            [0.0] * 6 + [1.0] * length,
            row,
            "made.jsonl",
            row + 1,
        )
        for row, length in enumerate((2, 2, 39))
    ]
    folder = tmp_path_factory.mktemp("measured")
    runs = {
        (ranks, tokens): make_run(
            folder / f"{ranks}-{tokens}",
            ragged_examples(5),
            held_out,
            num_gpus=ranks,
            batch_size_per_gpu=1,
            micro_batch_tokens=tokens,
            schedule="linear",
            learning_rate=1e-3,
        )
        for ranks in (1, 2)
        for tokens in FORWARDS
    }
    torch.set_num_threads(1)
    for tokens in FORWARDS:
        run_rank(runs[1, tokens], 0, 1, None, StopFlag())
    finish_on_ranks([runs[2, tokens] for tokens in FORWARDS])
    return runs


def test_held_out_loss_is_one_number_on_any_ranks(measured: dict[tuple[int, int], Path]) -> None:
    """LM-05: 43 tokens in three forwards, two or one, on one rank or two, against the model itself, row by row."""
    model = load_model(resolve_source(TINY), torch.float32, "sdpa")
    held_out = load_prepared(measured[1, 8] / "prepared").eval
    for tokens, num_forwards in FORWARDS.items():
        assert len(rank_batches(range(3), held_out, Budget(tokens), 0, 1)[0]) == num_forwards
    losses = []
    with torch.no_grad():
        for example in held_out:
            ids = torch.tensor(example.input_ids)
            logps = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1)
            losses += (-logps.gather(1, ids[1:, None])[5:, 0]).tolist()
    assert len(losses) == 43
    results = {
        key: json.loads((run / "heartbeat" / "result.json").read_text()) for key, run in measured.items()
    }
    assert [one["facts"]["world_size"] for one in results.values()] == [1, 1, 1, 2, 2, 2]
    before = [one["eval_before"] for one in results.values()]
    assert [(one["num_rows"], one["num_tokens"]) for one in before] == [(3, 43)] * 6
    assert [one["loss"] for one in before] == pytest.approx([sum(losses) / 43] * 6, abs=1e-5)


def test_learning_rates_of_two_ranks_reach_the_end_with_the_last_step(
    measured: dict[tuple[int, int], Path],
) -> None:
    """LM-07: five rows are three steps of two ranks; the schedule knows steps, not processes."""
    for tokens in FORWARDS:
        lines = metrics(measured[2, tokens])
        assert [line["learning_rate"] for line in lines] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
        assert [len(line["rows"]) for line in lines] == [2, 2, 1]
