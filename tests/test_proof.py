"""The long rows judge what they measure rightly: limits, tensors that differ, JSON cut in half."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench.__main__ import row_of
from bench.measure import measure
from proof import claims
from proof.__main__ import main
from proof.claims import Claim
from proof.kills import has_whole_json
from proof.product import relative_difference, sft_command


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


def test_a_command_is_timed_by_its_step_lines_and_weighed_with_its_children(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys, time
for step in range(3):
    time.sleep(0.3)
    print(step, file=open({str(tmp_path / "metrics.jsonl")!r}, "a"))
subprocess.run([sys.executable, "-c", "block = b'x' * 300_000_000; import time; time.sleep(0.5)"])
"""
    found = measure([sys.executable, "-c", script], tmp_path / "metrics.jsonl", tmp_path / "log")
    assert found.steps == 3
    assert 0.4 < found.seconds < 5
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
