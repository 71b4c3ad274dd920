"""Plans: what is decided, what makes two plans equal, what is refused before anything starts."""

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.plan import differences, launch_environment, read_plan
from agent.preflight import Findings
from agent.request import understand
from tests.agent.calls import CPU, CUDA, GPUS

Maker = Callable[..., tuple[dict[str, Any], Findings]]


def value(plan: dict[str, Any], name: str) -> Any:
    return plan["settings"][name]["value"]


def codes(found: Findings) -> list[str]:
    return [error.code for error in found.problems]


def test_every_auto_is_decided_and_says_so(planned: Maker) -> None:
    plan, found = planned()
    assert not found.problems
    decided = {name: item["value"] for name, item in plan["settings"].items() if item["source"] == "plan"}
    assert decided == {
        "device": "cpu",
        "dtype": "bf16",
        "attention": "short_rows",
        "micro_batch_tokens": 1024,
        "gradient_checkpointing": False,
        "parallel": "ddp",
        "max_length": 512,
        "global_batch_size": 16,
        "threads": 8,
    }
    assert "auto" not in [
        item["value"] for name, item in plan["settings"].items() if name not in ("domain", "data_format")
    ]


def test_the_cpu_computes_in_what_it_is_fast_in(planned: Maker) -> None:
    assert value(planned(replace(CPU, cpu_bf16=False))[0], "dtype") == "fp32"
    old = replace(CPU, devices=(replace(GPUS[0], has_bf16=False),))
    assert value(planned(old)[0], "dtype") == "fp32"
    assert value(planned(CUDA)[0], "dtype") == "bf16"


def test_threads_are_shared_by_ranks_and_the_users_number_is_kept(planned: Maker) -> None:
    assert value(planned(num_gpus="4")[0], "threads") == 2
    assert value(planned(replace(CPU, environ={"OMP_NUM_THREADS": "3"}), num_gpus="4")[0], "threads") == 3


def test_a_run_folder_left_to_us_is_named_after_the_run(planned: Maker, tmp_path: Path) -> None:
    plan, _ = planned(out="auto")
    assert value(plan, "out") == f"{tmp_path}/runs/{{run_id}}"
    assert plan["launch"]["argv"][1:] == ["-m", "finetune.launch", f"{tmp_path}/runs/{{run_id}}"]


def test_arithmetic_counts_rows_and_steps(planned: Maker) -> None:
    plan, found = planned(epochs="3", eval_fraction="0.25", batch_size_per_gpu="2", num_gpus="2")
    expected = {
        "rows_trained": 24,
        "rows_held_out": 8,
        "global_batch_size": 4,
        "rows_per_rank": 2,
        "rows_per_forward": 2,
        "steps": 18,
    }
    assert plan["arithmetic"] == expected
    assert not found.problems
    assert ("few_steps", "the run takes 2 optimizer steps") in planned()[1].warnings
    assert "no_eval_rows" in [code for code, _ in planned(eval_fraction="0")[1].warnings]


@pytest.mark.parametrize(
    "flags",
    [
        {"out": "elsewhere"},
        {"num_gpus": "2"},
        {"parallel": "fsdp2", "num_gpus": "2"},
        {"micro_batch_tokens": "64"},
        {"checkpoint_every": "7"},
        {"report_to": "tensorboard"},
        {"distributed_timeout": "60", "num_gpus": "2"},
        {"batch_size_per_gpu": "8", "num_gpus": "2"},  # the same global batch of 16
        {"global_batch_size": "16"},
        {"packing": "true"},
    ],
)
def test_what_changes_no_result_changes_no_plan_id(planned: Maker, flags: dict[str, str]) -> None:
    assert planned(**flags)[0]["plan_id"] == planned()[0]["plan_id"]


@pytest.mark.parametrize(
    "flags",
    [
        {"learning_rate": "1e-3"},
        {"seed": "1"},
        {"global_batch_size": "8"},
        {"model": "builtin:tiny?seed=1"},
        {"max_steps": "2"},
    ],
)
def test_what_changes_the_result_changes_the_plan_id(planned: Maker, flags: dict[str, str]) -> None:
    assert planned(**flags)[0]["plan_id"] != planned()[0]["plan_id"]


def test_the_plan_id_goes_by_content_not_by_path(planned: Maker, rows: Path, tmp_path: Path) -> None:
    first = planned()[0]
    (tmp_path / "copy.jsonl").write_bytes(rows.read_bytes())
    assert planned(data=["copy.jsonl"])[0]["plan_id"] == first["plan_id"]
    stat = rows.stat()
    rows.write_bytes(rows.read_bytes().replace(b"31", b"13"))
    os.utime(rows, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size and time as before
    changed = planned()[0]
    assert changed["plan_id"] != first["plan_id"]
    assert [item["field"] for item in differences(first["identity"], changed["identity"])] == ["data"]


def test_a_profiles_meaning_counts_and_where_it_lies_does_not(planned: Maker, tmp_path: Path) -> None:
    text = "distributed_type: MULTI_CPU\nnum_processes: 2\n"
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text(text + "machine_rank: 0\n")
    first, second = planned(profile="a.yaml")[0], planned(profile="b.yaml")[0]
    assert first["plan_id"] == second["plan_id"]
    assert first["parallel"]["profile"] == second["parallel"]["profile"] is not None


def test_ranks_get_the_first_visible_devices(planned: Maker) -> None:
    plan, found = planned(CUDA, num_gpus="2")
    assert not found.problems
    assert [item["id"] for item in plan["parallel"]["devices"]] == ["0", "1"]
    assert plan["launch"]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert value(plan, "gradient_checkpointing") is True


def test_more_ranks_than_devices_are_refused(planned: Maker) -> None:
    _, found = planned(replace(CUDA, devices=GPUS[:1]), num_gpus="2")
    assert codes(found) == ["not_enough_devices"]
    assert found.problems[0].evidence == {"setting": "num_gpus", "asked": 2, "visible": 1}
    assert found.problems[0].exit_code == 3


@pytest.mark.parametrize(
    ("missing", "device", "code", "words"),
    [
        ("hidden", "auto", "device_hidden", "hidden from this process"),
        ("broken", "auto", "no_device", "mend the driver"),
        ("no_torch_build", "auto", "no_device", "CPU build"),
        (None, "cuda", "no_device", "no accelerator is here"),
    ],
)
def test_a_missing_device_says_why(
    planned: Maker, missing: str | None, device: str, code: str, words: str
) -> None:
    _, found = planned(replace(CPU, missing=missing, signs=("/dev/nvidia0",)), device=device)
    assert codes(found) == [code]
    assert words in found.problems[0].message
    assert found.problems[0].exit_code == 4


def test_the_cpu_is_a_choice_or_a_warning(planned: Maker) -> None:
    assert "cpu_training" in [code for code, _ in planned()[1].warnings]
    assert "cpu_training" not in [code for code, _ in planned(device="cpu")[1].warnings]
    assert not planned(replace(CPU, missing="hidden"), device="cpu")[1].problems


def test_more_ranks_than_cores_are_a_warning(planned: Maker) -> None:
    assert "oversubscribed" in [code for code, _ in planned(num_gpus="9")[1].warnings]
    assert "oversubscribed" not in [code for code, _ in planned(num_gpus="8")[1].warnings]
    assert not planned(num_gpus="9")[1].problems


def test_weights_that_crowd_a_rank_are_sharded(planned: Maker) -> None:
    small = replace(CPU, devices=tuple(replace(item, memory_bytes=2 << 20) for item in GPUS))
    assert value(planned(small, num_gpus="2")[0], "parallel") == "fsdp2"
    assert value(planned(CUDA, num_gpus="2")[0], "parallel") == "ddp"
    assert planned(CUDA)[0]["parallel"]["kind"] == "single"


def test_all_problems_are_told_at_once(planned: Maker) -> None:
    flags = {
        "data": ["gone.jsonl"],
        "model": "/gone",
        "max_steps": "3",
        "epochs": "2",
        "chat_template": "gone.jinja",
        "lora_rank": "0",
    }
    assert sorted(codes(planned(**flags)[1])) == [
        "bad_value",
        "file_missing",
        "file_missing",
        "model_missing",
        "setting_without_effect",
    ]


def test_a_length_past_the_context_is_refused(planned: Maker) -> None:
    assert codes(planned(max_length="513")[1]) == ["bad_value"]


@pytest.mark.parametrize("size", ["1", "0"])
def test_a_group_of_one_is_refused_by_name_and_value(grpo: Maker, size: str) -> None:
    """GM-02."""
    found = grpo(group_size=size)[1]
    assert codes(found) == ["bad_value"]
    assert re.match(rf"group.size: {size}\b.* 2", found.problems[0].message), found.problems[0].message
    assert codes(grpo(group_size="2")[1]) == []


def test_a_report_that_could_not_be_written_is_refused(
    planned: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CA-11: what is not installed shows before the run."""
    assert codes(planned(report_to="tensorboard")[1]) == []
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    found = planned(report_to="tensorboard")[1]
    assert codes(found) == ["missing_package"]
    assert found.problems[0].evidence == {"setting": "report_to", "package": "tensorboard"}
    assert codes(planned()[1]) == []


def test_settings_hold_no_secrets(planned: Maker) -> None:
    machine = replace(CPU, environ={"OPENAI_API_KEY": "sk-TEST"})
    _, found = planned(machine, system_prompt="my key is sk-TEST")
    assert codes(found) == ["bad_value"]
    assert "sk-TEST" not in found.problems[0].message


def test_a_setting_without_effect_at_one_rank_is_a_warning(planned: Maker) -> None:
    _, found = planned(parallel="fsdp2")
    assert not found.problems
    assert [code for code, _ in found.warnings if code == "idle_setting"] == ["idle_setting"]


def test_the_disk_must_hold_the_checkpoints(
    planned: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two kept, the best and one on its way: weight and two moments in fp32; the final weights; the logs.
    needed = 4 * 12 * 155_648 + 4 * 155_648 + 5_000_000
    monkeypatch.setattr("agent.preflight.free_disk", lambda path: needed - 1)
    assert codes(planned()[1]) == ["not_enough_disk"]
    monkeypatch.setattr("agent.preflight.free_disk", lambda path: needed)
    assert "low_disk" in [code for code, _ in planned()[1].warnings]
    # What a run that goes on has written is there already.
    monkeypatch.setattr("agent.preflight.free_disk", lambda path: needed - 1000)
    (tmp_path / "o" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "o" / "checkpoints" / "step-1" / "optimizer").write_bytes(bytes(999))
    assert codes(planned()[1]) == ["not_enough_disk"]
    (tmp_path / "o" / "checkpoints" / "step-1" / "optimizer").write_bytes(bytes(1000))
    assert not planned()[1].problems


def test_a_place_that_cannot_be_written_is_refused(planned: Maker, rows: Path) -> None:
    assert codes(planned(out=str(rows / "inside"))[1]) == ["bad_value"]


def test_no_other_launchers_variables_reach_the_ranks(planned: Maker) -> None:
    machine = replace(CPU, environ={"RANK": "1", "WORLD_SIZE": "4", "PYTHONPATH": "/mine", "PATH": "/bin"})
    names = planned(machine)[0]["launch"]["environment_names"]
    assert not {"RANK", "WORLD_SIZE"} & set(names)
    plan = planned(machine)[0]
    assert plan["launch"]["environment"]["PYTHONPATH"].endswith(":/mine")


def test_devices_are_named_in_the_variable_that_the_user_uses(planned: Maker, tmp_path: Path) -> None:
    config = understand(
        {"method": "sft", "model": "builtin:tiny", "data": ["builtin:arithmetic"], "device": "cuda"}, tmp_path
    ).config
    assert config is not None
    assert (
        launch_environment(config, list(GPUS[1:3]), {"HIP_VISIBLE_DEVICES": "1,2"})["HIP_VISIBLE_DEVICES"]
        == "1,2"
    )
    assert (
        launch_environment(replace(config, deterministic=True), [GPUS[0]], {})["CUBLAS_WORKSPACE_CONFIG"]
        == ":4096:8"
    )


def test_a_plan_of_an_older_version_means_one_process(planned: Maker, tmp_path: Path) -> None:
    plan, _ = planned()
    older = {name: plan[name] for name in ("schema_version", "plan_id", "method", "settings", "identity")}
    (tmp_path / "plan.json").write_text(json.dumps(older))
    read = read_plan(tmp_path / "plan.json")
    assert read is not None
    assert read["parallel"] == {
        "kind": "single",
        "num_gpus": 1,
        "device": "cpu",
        "devices": [],
        "profile": None,
    }


def test_differences_from_the_recommended_values_are_told(planned: Maker) -> None:
    plan, _ = planned(
        device="cpu", lora_rank="16", epochs="2", micro_batch_tokens="512", global_batch_size="16"
    )
    assert plan["differs_from_default"] == [
        {"name": "epochs", "value": 2.0, "default": 1.0},
        {"name": "micro_batch_tokens", "value": 512, "default": 1024},  # what none becomes on this machine
    ]
    assert planned()[0]["differs_from_default"] == []


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_plan_fits_into_an_answer_with_all_its_sections(
    command: Callable[..., Any], tmp_path: Path, method: str
) -> None:
    """Long paths, and as many settings of the user as a careful one gives."""
    folder = tmp_path / "a-rather-long-name-of-a-folder"
    folder.mkdir()
    names = [str(folder / f"rows-{place}.jsonl") for place in range(2)]
    for name in names:
        Path(name).write_text('{"prompt": "What is 1 + 1?", "answer": "2", "completion": "2"}\n' * 40)
    flags = ["--lora-rank", "8", "--lora-alpha", "16", "--seed", "3", "--epochs", "2", "--eval-rows", "9"]
    flags += ["--learning-rate", "1e-4", "--max-length", "256", "--checkpoint-every", "9", "--threads", "1"]
    if method == "grpo":
        flags += ["--engine", "local", "--group-size", "4", "--max-completion-tokens", "16"]
    answer, code = command(
        "plan",
        "--method",
        method,
        "--model",
        "builtin:tiny",
        "--data",
        *names,
        "--out",
        str(folder / "o"),
        *flags,
    )
    assert code == 0, answer["errors"]
    assert not answer["truncated"]
    sections = {"settings", "differs_from_default", "arithmetic", "estimates", "checks", "launch", "parallel"}
    assert answer["data"].keys() >= sections
    names_of_environment = answer["data"]["launch"]["environment_names"]
    assert names_of_environment == sorted(names_of_environment)
