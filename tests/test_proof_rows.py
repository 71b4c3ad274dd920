"""What rows claim can fail: a sync without proof, a restart, a retry, a test that is skipped, a row that is passed over."""

import json
from pathlib import Path
from typing import Any

import pytest

from proof import __main__ as program
from proof import claims, measured
from proof.agents import retries
from proof.claims import Claim, Fact, Figure, NotHere
from proof.grpo import restart_claims, sync_claims
from proof.long_tests import long_tests
from proof.product import Run


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(claims, "LEDGER", tmp_path / "proof.jsonl")
    monkeypatch.setattr(claims, "commit", lambda: "abc")
    return tmp_path / "proof.jsonl"


def failing(figures: list[Any]) -> list[str]:
    return [figure.name for figure in figures if isinstance(figure, Claim) and not figure.holds]


def test_facts_stand_beside_the_claims_and_pass_no_row(ledger: Path) -> None:
    fact = Fact("device", "cpu")
    assert claims.append("one", [fact, Claim("failed", 0, "==", 0)], 1.0)
    assert not claims.append("two", [fact], 1.0)
    line = json.loads(ledger.read_text().splitlines()[0])
    assert (line["figure"], line["limit"]) == ({"device": "cpu", "failed": 0}, {"failed": "== 0"})


def test_a_row_that_is_passed_over_is_named_at_the_end_and_fails_where_it_was_asked_for(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(folder: Path) -> list[Figure]:
        raise NotHere("PROGRAM names nothing that is there")

    def holds(folder: Path) -> list[Figure]:
        return [Fact("device", "cpu"), Claim("gain", 1, ">", 0)]

    def breaks(folder: Path) -> list[Figure]:
        return [Claim("gain", {}["rollouts_failed"], ">", 0)]

    monkeypatch.setattr(program, "ROWS", {"lacks": lacks, "holds": holds})
    assert program.main([]) == 0
    told = capsys.readouterr()
    assert told.err == "lacks: NOT MEASURED, passed over: PROGRAM names nothing that is there\n"
    assert told.out == "holds: device cpu\nholds: gain 1 > 0: holds\n"
    assert program.main(["lacks", "holds"]) == program.main(["lacks"]) == 1
    assert "NOT MEASURED" in capsys.readouterr().err
    assert [json.loads(line)["row"] for line in ledger.read_text().splitlines()] == ["holds", "holds"]
    monkeypatch.setattr(program, "ROWS", {"breaks": breaks, "holds": holds})
    assert program.main([]) == 1
    assert "breaks: KeyError: 'rollouts_failed'" in (err := capsys.readouterr().err)
    assert err.endswith("rows that did not pass: breaks\n")
    assert [json.loads(line)["passed"] for line in ledger.read_text().splitlines()[2:]] == [False, True]


def test_a_row_of_an_agent_program_fails_where_the_program_is_not_there(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FINETUNE_OPENCODE", raising=False)
    assert program.main(["agent-opencode"]) == 1
    assert "agent-opencode: NOT MEASURED" in (err := capsys.readouterr().err)
    assert "FINETUNE_OPENCODE" in err
    assert not ledger.exists()


SYNCS = [
    {"kind": "sync", "sync_method": method, "sync_version": version}
    for method, version in (("base", "base"), ("direct", "step-000001"), ("digest", "step-000002"))
]


def test_every_sync_must_be_proved_and_trained_versions_be_among_them() -> None:
    assert failing(sync_claims([{"kind": "started"}, *SYNCS])) == []
    assert failing(sync_claims(SYNCS[:2])) == ["trained_versions"]
    assert failing(sync_claims([*SYNCS[:2], SYNCS[1]])) == ["trained_versions"]
    assert failing(sync_claims([])) == ["trained_versions"]
    for method in ("copied", "unchanged", "", None):
        assert failing(sync_claims([*SYNCS, SYNCS[2] | {"sync_method": method}])) == ["unproved_syncs"]
    assert failing(sync_claims([*SYNCS, {"kind": "sync"}])) == ["unproved_syncs"]


def test_a_restarted_engine_must_hold_what_was_delivered_last_and_be_proved_to() -> None:
    again = {"kind": "engine_restarted", "engine": 0, "sync_method": "digest", "sync_version": "step-000002"}
    near = {"to_new": 0.01, "to_old": 0.05, "factor": 1.0, "ratio": 5.0}
    assert failing(restart_claims([*SYNCS, again])) == []
    assert failing(restart_claims([*SYNCS, again | {"sync_method": "direct", "sync_margin": near}])) == []
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sync_version": "step-000001"}, "resynced"),
        ({"sync_version": None}, "resynced"),
        ({"sync_method": "base"}, "reproved"),
        ({"sync_method": None}, "reproved"),
        ({"sync_method": "direct"}, "reproved"),
        ({"sync_method": "direct", "sync_margin": near | {"ratio": 2.0}}, "reproved"),
    ]
    for change, name in wrong:
        assert failing(restart_claims([*SYNCS, again | change])) == [name], change
    assert failing(restart_claims([*SYNCS])) == ["restarts", "resynced", "reproved"]
    assert failing(restart_claims([*SYNCS, {"kind": "engine_restarted", "engine": 0}])) == [
        "resynced",
        "reproved",
    ]


def test_agents_that_were_sent_again_are_counted_also_where_it_went_well_then(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step, tries in ((1, (1, 3)), (2, (2, 1))):
        lines = [{"kind": "step"}, *({"status": "scored", "agent": {"tries": count}} for count in tries)]
        (folder / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert retries(Run(tmp_path)) == 3
    (folder / "step-000003.jsonl").write_text('{"kind": "step"}\n{"status": "scored", "agent": {}}\n')
    with pytest.raises(KeyError):
        retries(Run(tmp_path))
    with pytest.raises(RuntimeError, match="no rollouts"):
        retries(Run(tmp_path / "elsewhere"))


GOOD = """import pytest
@pytest.mark.proof
@pytest.mark.parametrize("x", "ab")
def test_a(x): pass
def test_without_the_mark(): assert 0
"""
BAD = """
@pytest.mark.proof
@pytest.mark.skipif(True, reason="no GPU here")
def test_b(): pass
@pytest.mark.proof
def test_c(): assert 0
"""


def test_long_tests_pass_where_all_that_are_marked_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # faster
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = proof: long\n")
    for number, (text, figures, wrong) in enumerate(
        (
            (GOOD, [0, 2, 2, 0, 0], []),
            (GOOD + BAD, [1, 4, 2, 1, 1], ["exit_code", "passed", "skipped", "failed"]),
        )
    ):
        (tmp_path / "test_it.py").write_text(text)
        found = long_tests(tmp_path / f"work{number}", tmp_path)
        assert [one.figure for one in found] == figures
        assert failing(list(found)) == wrong
        assert ("test_b: no GPU here" in capsys.readouterr().out) == bool(wrong)
    (tmp_path / "test_it.py").write_text("def test_without_the_mark(): pass\n")
    with pytest.raises(RuntimeError, match="cannot be collected"):
        long_tests(tmp_path / "none", tmp_path)


def test_the_check_of_the_device_is_a_row_with_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The script is a stand-in; scripts/gpu_check.py itself takes minutes."""
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "gpu_check.py"
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    said = {"ok": True, "device": "cpu", "figures": {"peak_bytes": 7}, "failed": []}
    script.write_text(f"print({json.dumps(json.dumps(said))})")
    found = measured.gpu_check(tmp_path)
    assert failing(list(found)) == []
    assert {one.name: one.figure for one in found if isinstance(one, Fact)} == {
        "device": "cpu",
        "peak_bytes": 7,
    }
    assert next(one for one in found if one.name == "seconds").limit == 360  # type: ignore[union-attr]
    script.write_text(
        f"print({json.dumps(json.dumps(said | {'failed': ['peak_bytes 7 is not > 8']}))}); exit(1)"
    )
    assert failing(list(measured.gpu_check(tmp_path))) == ["exit_code", "failed"]
    script.write_text("exit(3)")
    with pytest.raises(RuntimeError, match="left with 3"):
        measured.gpu_check(tmp_path)


def test_make_test_is_a_row_of_its_exit_code_and_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    monkeypatch.setenv("MAKEFLAGS", "-n")  # with it make would only say what it does
    for body, wrong in (("true", []), ("false", ["exit_code"])):
        (tmp_path / "Makefile").write_text(f"test:\n\t{body}\n")
        assert failing(measured.make_test(tmp_path)) == wrong
    (tmp_path / "Makefile").write_text("test:\n\tsleep 0.1\n")
    monkeypatch.setattr(measured, "TEST_S", 0.1)
    assert failing(measured.make_test(tmp_path)) == ["seconds"]
