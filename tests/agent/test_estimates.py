"""What a plan says a run will cost, on numbers worked out by hand: time, tokens, disk, memory on each device."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.estimates import Scene, memory_estimate
from agent.preflight import Findings, check_memory
from agent.request import understand
from agent.speed import Work, by_operations, device_speed
from agent.system import Machine
from finetune.config import RunConfig
from tests.agent.calls import CPU, CUDA, GPUS

GIB = 2**30
Maker = Callable[..., tuple[dict[str, Any], Findings]]


def config_of(tmp_path: Path, method: str = "sft", **flags: Any) -> RunConfig:
    given = {"method": method, "model": "builtin:tiny", "data": ["builtin:arithmetic"], "dtype": "bf16"}
    config = understand(given | flags, tmp_path).config
    assert config is not None
    return config


def earlier(home: Path, run_id: str, **changes: Any) -> None:
    """Leave a finished run in the index: four steps, of which the first is slow."""
    folder = home / run_id
    folder.mkdir(parents=True)
    settings = {"dtype": "bf16", "tuning": "lora", "gradient_checkpointing": False, "global_batch_size": 16}
    manifest = {
        "run_id": run_id,
        "status": "succeeded",
        "host": "here",
        "method": "sft",
        "model": {"id": "builtin:tiny"},
        "parallel": {"device": "cpu", "num_gpus": 1},
        "settings": {name: {"value": value} for name, value in settings.items()},
        "data": {"files": []},
        "attempts": [{}],
        "duration_s": 30.0,
    } | changes
    (folder / "run.json").write_text(json.dumps(manifest))
    lines = [{"num_tokens": 100, "step_s": 10.0}] + 3 * [{"num_tokens": 400, "step_s": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (home / "runs").mkdir(exist_ok=True)
    (home / "runs" / f"{run_id}.json").write_text(json.dumps({"run_id": run_id, "run_dir": str(folder)}))


@pytest.fixture
def remembering(tmp_path: Path) -> Machine:
    return replace(CPU, environ={"FINETUNE_HOME": str(tmp_path / "home")})


def test_an_earlier_run_on_the_same_rows_tells_the_time(
    planned: Maker,
    remembering: Machine,
    tmp_path: Path,
) -> None:
    sha256 = planned(remembering)[0]["data"]["files"][0]["sha256"]
    earlier(tmp_path / "home", "sft-1", data={"files": [{"sha256": sha256}]})
    costs = planned(remembering)[0]["estimates"]
    # 1,200 tokens in 6 s after the first step, 25 in each of 48 rows; 30 s in all, of which 16 s were steps.
    assert costs["tokens"] == 31 * 25
    assert costs["seconds"] == round(31 * 25 * 0.005 + 14, 1)
    assert costs["hours"] == round((31 * 25 * 0.005 + 14) / 3600, 4)
    assert "as sft-1 went here" in costs["seconds_method"]
    assert costs["generated_tokens"] is None


def test_of_a_long_earlier_run_the_unread_steps_count_as_steps(
    planned: Maker, remembering: Machine, tmp_path: Path
) -> None:
    # 16 s of steps were read, 1,000 more took 2 s each: of 2,030 s in all 14 s went into the rest.
    earlier(tmp_path / "home", "sft-1", duration_s=2030.0, result={"steps": 1004})
    costs = planned(remembering)[0]["estimates"]
    assert costs["seconds"] == pytest.approx(costs["tokens"] * 0.005 + 14, abs=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "elsewhere"},
        {"status": "failed"},
        {"method": "grpo"},
        {"model": {"id": "other"}},
        {"attempts": [{}, {}]},
        {"parallel": {"device": "cpu", "num_gpus": 2}},
        {"settings": {}},
        {"data": None},
        {"duration_s": "long"},
    ],
)
def test_a_run_that_was_not_alike_or_is_damaged_tells_nothing(
    planned: Maker,
    remembering: Machine,
    tmp_path: Path,
    changes: Any,
) -> None:
    earlier(tmp_path / "home", "sft-1", **changes)
    (tmp_path / "home" / "runs" / "bad.json").write_text("x")
    method = planned(remembering)[0]["estimates"]["seconds_method"]
    assert "operations" in method
    assert "within about 3 times" in method


def test_operations_over_the_speed_of_the_cores(tmp_path: Path) -> None:
    model = {"body": 1e8, "head": 3e7}
    config = replace(config_of(tmp_path), device="cpu", threads=2, gradient_checkpointing=False)
    frozen = by_operations(Work(1e6, 5e5), model, config, [], cores=8)
    # 4 for each weight and token, of the head for learned tokens alone; two cores.
    assert frozen.seconds == pytest.approx((4e14 + 6e13) / (2 * 8.5e10) + 15)
    whole = by_operations(Work(1e6, 5e5), model, replace(config, tuning="full"), [], cores=8)
    assert whole.seconds - 15 == pytest.approx(1.5 * (frozen.seconds - 15))
    again = by_operations(Work(1e6, 5e5), model, replace(config, gradient_checkpointing=True), [], cores=8)
    assert again.seconds - frozen.seconds == pytest.approx(2e14 / (2 * 8.5e10))


def test_devices_are_found_in_the_table_or_guessed_aloud(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path), device="cuda")
    known, source = device_speed(config, ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"], cores=8)
    assert (known, source) == (pytest.approx((9.9e14 + 3.1e14) * 0.3), "30% of data sheet")
    assert "a guess" in device_speed(config, ["Oddity 9000"], cores=8)[1]
    slow, _ = device_speed(replace(config, dtype="fp32"), ["NVIDIA H200"], cores=8)
    assert slow < 0.2 * known


def test_rows_that_nobody_read_are_counted_by_the_size_of_their_file(planned: Maker, rows: Path) -> None:
    costs = planned()[0]["estimates"]
    of_row = rows.stat().st_size / 32 / 4 + 20
    assert costs["tokens"] == round(31 * of_row)
    assert "bytes a token" in costs["tokens_method"]
    longer = planned(max_steps="10")[0]["estimates"]
    assert longer["tokens"] == round(160 * of_row)


def test_grpo_samples_at_most_its_limits(grpo: Maker) -> None:
    costs = grpo()[0]["estimates"]
    # 31 prompts, 8 a batch: 4 batches of 64 rollouts; one held-out row, greedy and sampled, before and after.
    assert costs["generated_tokens"] == (4 * 64 + 2 * 1 * 2) * 256
    assert costs["disk_parts"]["rollouts"] == 4 * 64 * 256 * 60
    assert grpo(replay=".")[0]["estimates"]["generated_tokens"] == 0
    often = grpo(eval_every="2", resample_zero_variance="1")[0]["estimates"]
    assert often["generated_tokens"] == (2 * 4 * 64 + 4 * 1 * 2) * 256


def test_what_is_not_known_is_null(planned: Maker) -> None:
    plan, found = planned(data=["someone/rows"], max_steps="3", eval_fraction="0")
    assert not found.problems
    costs = plan["estimates"]
    assert (costs["seconds"], costs["hours"], costs["tokens"]) == (None, None, None)
    assert "--checks full" in costs["seconds_method"]
    assert costs["disk_bytes"] > 0


def judged(plan: dict[str, Any], tmp_path: Path, machine: Machine, **settings: Any) -> list[tuple[Any, ...]]:
    config = replace(config_of(tmp_path, "grpo"), **{"device": "cuda", "num_gpus": plan["num"]} | settings)
    scene = Scene(config, machine, list(machine.devices[: plan["num"]]), tmp_path)
    parallel = {"engines": [{"url": None, "devices": names} for names in plan["engines"]]}
    found = memory_estimate({"parallel": parallel}, scene, {"a": 30 * GIB}, {"b": 5 * GIB}, 30 * GIB)
    return [(one["device"], one["needed_bytes"] / GIB, one["fits"]) for one in found["verdicts"]]


def test_ranks_and_engines_on_the_cpu_share_one_memory(tmp_path: Path) -> None:
    two = {"num": 2, "engines": [[]]}
    assert judged(two, tmp_path, CPU, device="cpu") == [("cpu", 65.0, False)]
    large = replace(CPU, free_memory_bytes=65 * GIB)
    assert judged(two, tmp_path, large, device="cpu") == [("cpu", 65.0, True)]


def test_a_device_holds_its_rank_and_the_share_of_its_engine(tmp_path: Path) -> None:
    apart = judged({"num": 1, "engines": [["1"]]}, tmp_path, CUDA)
    assert apart == [("cuda:0", 30.0, True), ("cuda:1", 72.0, True)]  # nine tenths of 80
    shared = judged({"num": 1, "engines": [["0"]]}, tmp_path, CUDA)
    assert shared == [("cuda:0", 54.0, True)]  # three tenths of 80 besides
    crowded = judged({"num": 1, "engines": [["0"]]}, tmp_path, CUDA, vllm_memory_fraction=0.7)
    assert crowded == [("cuda:0", 86.0, False)]
    taken = replace(CUDA, devices=(replace(GPUS[0], free_bytes=20 * GIB), *GPUS[1:]))
    assert judged({"num": 1, "engines": []}, tmp_path, taken) == [("cuda:0", 30.0, False)]


def test_a_guess_of_the_memory_warns_and_a_forecast_refuses() -> None:
    verdict = {"device": "cpu", "needed_bytes": 9 * GIB, "free_bytes": 8 * GIB, "fits": False}
    guess, forecast, near = Findings(), Findings(), Findings()
    check_memory([verdict], False, guess)
    check_memory([verdict], True, forecast)
    check_memory([verdict | {"needed_bytes": 7 * GIB}], True, near)
    assert ([code for code, _ in guess.warnings], guess.problems) == (["low_memory"], [])
    assert [error.code for error in forecast.problems] == ["not_enough_memory"]
    assert [code for code, _ in near.warnings] == ["low_memory"]


def test_a_quick_plan_forecasts_full_forwards(planned: Maker) -> None:
    costs = planned()[0]["estimates"]
    assert costs["memory_bytes_per_rank"] == sum(costs["memory_parts"].values())
    assert costs["memory_parts"].keys() >= {"weights", "activations", "logits_chunk", "libraries"}
    assert costs["verdicts"] == [
        {
            "device": "cpu",
            "needed_bytes": costs["memory_bytes_per_rank"],
            "free_bytes": 16 * GIB,
            "fits": True,
        }
    ]
    assert costs["engine_memory_bytes"] is None
    assert planned(replace(CPU, free_memory_bytes=1000))[1].warnings[-1][0] == "low_memory"


def test_an_engine_on_the_cpu_takes_programs_weights_and_a_cache(grpo: Maker) -> None:
    parts = grpo()[0]["estimates"]["engine_memory_parts"]
    assert parts.keys() == {"programs", "weights", "cache"}
    assert parts["cache"] == GIB  # of the tiny model the least that a server takes
    assert grpo(engine="local")[0]["estimates"]["engine_memory_bytes"] is None
