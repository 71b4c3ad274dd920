"""The long rows judge what they measure rightly: limits, tensors that differ, JSON cut in half."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench.__main__ import main as bench_main
from bench.grpo import later_syncs, least_seconds, ours_command, peak_gb
from bench.measure import Measured, measure
from bench.report import lone_row, replace_rows, row_of, written
from proof import claims, measured
from proof.__main__ import main
from proof.claims import Claim
from proof.kills import has_whole_json
from proof.product import relative_difference, run_command, sft_command
from proof.replaying import differences


def test_a_row_passes_when_every_claim_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LEDGER", tmp_path / "proof.jsonl")
    monkeypatch.setattr(claims, "commit", lambda: "abc")
    good, bad, unknown = (
        Claim("gain", 0.25, ">=", 0.25),
        Claim("seconds", 480.0, "<", 480),
        Claim("loss", None, "<", 1),
    )
    assert claims.append("one", [good], 3.2)
    assert not claims.append("two", [good, bad], 3.2)
    assert not claims.append("three", [unknown], 3.2)
    assert not claims.append("nothing-measured", [], 3.2)
    lines = [json.loads(line) for line in (tmp_path / "proof.jsonl").read_text().splitlines()]
    assert [line["passed"] for line in lines] == [True, False, False, False]
    assert lines[1] == {
        "row": "two",
        "figure": {"gain": 0.25, "seconds": 480.0},
        "limit": {"gain": ">= 0.25", "seconds": "< 480"},
        "passed": False,
        "commit": "abc",
        "seconds": 3,
        "command": "make proof ROW=two",
    }


def test_an_unknown_row_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-row"]) == 2
    assert "arithmetic-lift" in capsys.readouterr().err


def test_relative_difference_is_over_all_tensors_that_begin_so(tmp_path: Path) -> None:
    save_file({"m/a": np.array([3.0, 4.0]), "v/a": np.array([1.0])}, tmp_path / "one")
    save_file({"m/a": np.array([3.0, 4.5]), "v/a": np.array([9.0])}, tmp_path / "other")
    assert relative_difference(tmp_path / "one", tmp_path / "other", "m/") == pytest.approx(0.1)
    save_file({"m/b": np.array([3.0, 4.5])}, tmp_path / "renamed")
    with pytest.raises(RuntimeError, match="do not hold the same tensors"):
        relative_difference(tmp_path / "one", tmp_path / "renamed", "m/")


def test_json_cut_in_half_is_seen_under_its_final_name_only(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / ".state.json").write_text('{"state": "runn')
    assert has_whole_json(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "manifest.json").write_text('{"step": ')
    assert not has_whole_json(tmp_path)


def test_settings_become_flags() -> None:
    assert sft_command(Path("a"), learning_rate=5e-4)[-4:] == ["--out", "a", "--learning-rate", "0.0005"]
    several = run_command("grpo", Path("a"), verifier=["x", "y"])
    assert several[-7:] == ["--method", "grpo", "--out", "a", "--verifier", "x", "y"]


def test_a_command_is_timed_by_its_step_lines_and_weighed_with_its_children(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys, time
for step in range(3):
    time.sleep(0.5)
    print(step, file=open({str(tmp_path / "metrics.jsonl")!r}, "a"))
subprocess.run([sys.executable, "-c", "block = b'x' * 300_000_000; import time; time.sleep(1)"])
"""
    found = measure([sys.executable, "-c", script], tmp_path / "metrics.jsonl", tmp_path / "log")
    assert found.steps == 3
    assert 0.3 < found.seconds < 60  # a second, seen by a watcher that may be late
    assert found.peak_bytes > 300_000_000
    failing = "import sys; print('why', flush=True); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"left with 3:\nwhy"):
        measure([sys.executable, "-c", failing], tmp_path / "none", tmp_path / "log")


def test_bench_rows_are_medians_of_pairs() -> None:
    row = row_of("speed", "tokens/s", [400.0, 420.0, 380.0], [200.0, 200.0, 100.0], limit=900.0)
    assert row == {
        "row": "speed",
        "unit": "tokens/s",
        "ours": 400.0,
        "peer": 200.0,
        "ratio": 2.1,
        "spread": 0.8571,
        "limit": 900.0,
    }


def test_a_steady_step_is_the_median_after_the_first() -> None:
    run = Measured([10.0, 13.0, 15.0, 16.0, 20.0], 1)
    assert (run.steps, run.seconds, run.steady_step_s) == (5, 10.0, 2.5)


def test_a_row_without_peer_says_so() -> None:
    row = lone_row("sync", "s", [0.2, 0.3, 0.1])
    assert row == {
        "row": "sync",
        "unit": "s",
        "ours": 0.2,
        "peer": None,
        "ratio": None,
        "spread": 1.0,
        "limit": None,
    }
    assert written(row) == "sync: ours 0.2 s (spread 1.00)"
    assert written(row_of("step", "s", [6.0], [24.0])).startswith("step: ours 6, peer 24 s, ratio 0.25")


def test_rows_of_parts_that_were_not_measured_stay(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    replace_rows(path, [{"row": "a", "ours": 1}, {"row": "b", "ours": 2}])
    replace_rows(path, [{"row": "b", "ours": 3}, {"row": "c", "ours": 4}])
    assert [(row["row"], row["ours"]) for row in json.loads(path.read_text())] == [
        ("a", 1),
        ("b", 3),
        ("c", 4),
    ]


def test_an_unknown_part_and_too_few_steps_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["no-such-part"], "there are: sft, grpo-step"),
        (["grpo-step", "--grpo-steps", "2"], "3 at least"),
    ):
        with pytest.raises(SystemExit) as left:
            bench_main(arguments)
        assert left.value.code == 2
        assert told in capsys.readouterr().err


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_syncs_of_adapters_after_the_first_count(tmp_path: Path) -> None:
    kinds = [(0, "base"), (1, "probe"), (1, "unchanged"), (2, "direct"), (3, "digest"), (3, "unchanged")]
    syncs = [{"kind": "sync", "version": version, "sync_method": method} for version, method in kinds]
    write_lines(tmp_path / "events.jsonl", [{"kind": "started"}, *syncs])
    assert [line["version"] for line in later_syncs(tmp_path)] == [2, 3]
    write_lines(tmp_path / "events.jsonl", syncs[:3])
    with pytest.raises(RuntimeError, match="1 adapters were delivered"):
        later_syncs(tmp_path)


def test_memory_of_steps_that_trained_nothing_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.grpo.run_ours", lambda out, **settings: None)
    write_lines(
        tmp_path / "metrics.jsonl", [{"step": 1, "num_supervised": 9}, {"step": 2, "num_supervised": 8}]
    )
    (tmp_path / "run.json").write_text('{"peak_memory_bytes_per_rank": [3000000000, 2000000000]}')
    assert peak_gb(tmp_path, 8) == 3.0
    write_lines(
        tmp_path / "metrics.jsonl", [{"step": 1, "num_supervised": 9}, {"step": 2, "num_supervised": 0}]
    )
    with pytest.raises(RuntimeError, match=r"nothing was trained in steps \[2\]"):
        peak_gb(tmp_path, 8)


def test_the_least_seconds_of_a_step_count_each_prompt_once_when_sampling(tmp_path: Path) -> None:
    """Two prompts of 10 tokens, twice each, 5 tokens sampled: read 20 + 20, trained 40 + 20, body 3 and head 2."""
    rollouts = [{"group": group, "prompt_ids": [1] * 10, "completion_ids": [2] * 5} for group in (0, 0, 1, 1)]
    write_lines(tmp_path / "rollouts" / "step-000001.jsonl", [{"kind": "step"}, *rollouts])
    operations = 2 * 3 * 40 + 4 * 3 * 60 + 6 * 2 * 20
    assert least_seconds(tmp_path, {"body": 3, "head": 2, "matrix_rate": 100.0}) == operations / 100


def test_settings_of_a_measurement_replace_the_common_ones() -> None:
    command = ours_command(Path("a"), global_batch_size=512, sync="adapter")
    assert [command[place + 1] for place, word in enumerate(command) if word == "--global-batch-size"] == [
        "512"
    ]
    assert command[-2:] == ["--sync", "adapter"]


def test_the_claims_on_grpo_have_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {
        "grpo-step-s": {"ours": 7.0, "peer": 20.0, "ratio": 0.35},
        "grpo-tokens": {"ratio": 0.8},
        "grpo-adapter-sync-s": {"ours": 0.29},
        "grpo-adapter-proved-s": {"ours": 1.29},
        "grpo-peak-memory": {"ratio": 1.15},
    }

    def failed(rows: dict[str, dict[str, Any]]) -> int:
        monkeypatch.setattr(measured, "measured_rows", lambda part: rows)
        proofs = (measured.grpo_step, measured.grpo_sync, measured.grpo_memory)
        return sum(not claim.holds for proof in proofs for claim in proof(Path()))

    assert failed(good) == 0
    for row, key, value in (
        ("grpo-step-s", "ratio", 0.36),
        ("grpo-tokens", "ratio", 0.79),
        ("grpo-adapter-sync-s", "ours", 0.3),
        ("grpo-adapter-proved-s", "ours", 1.3),
        ("grpo-peak-memory", "ratio", 1.16),
    ):
        assert failed(good | {row: good[row] | {key: value}}) == 1, row


def test_replays_are_compared_step_by_step() -> None:
    one = [{"step": 1, "loss": 0.5, "grad_norm": 2.0}, {"step": 2, "loss": 0.25, "grad_norm": 4.0}]
    other = [{"step": 1, "loss": 0.5, "grad_norm": 1.0}, {"step": 2, "loss": 0.75, "grad_norm": 4.0}]
    assert differences(one, other) == (0.5, 0.5)
    assert differences(one, one[:1]) == differences([], []) == (float("inf"), float("inf"))
    broken = [one[0], one[1] | {"loss": float("nan")}]
    assert differences(one, broken) == (float("inf"), 0.0)


def test_commit_marks_a_tree_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    with pytest.raises(claims.NotHere):
        claims.commit()
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        assert os.spawnvp(os.P_WAIT, "git", ["git", "-C", str(tmp_path), *identity, *arguments]) == 0
    clean = claims.commit()
    (tmp_path / "proof.jsonl").write_text("{}\n")
    assert claims.commit() == clean
    (tmp_path / "code.py").write_text("1\n")
    assert claims.commit() == clean + "+"
