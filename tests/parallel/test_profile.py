"""Accelerate profiles: what accelerate itself reads in them, what is refused, and a fingerprint of the meaning."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.errors import FinetuneError, Problems
from finetune.parallel.profile import Profile, read_profile

DDP = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "mixed_precision": "bf16",
    "num_processes": 2,
}
FSDP = {
    **DDP,
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": False,
    },
}
# As `accelerate config` writes them around the answers that matter.
AROUND = {
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}


def write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (DDP, "ddp"),
        (FSDP, "fsdp2"),
        ({**DDP, "distributed_type": "NO", "num_processes": 1}, "none"),
        ({**DDP, "distributed_type": "MULTI_CPU"}, "ddp"),
    ],
)
def test_reads_what_accelerate_reads(values: dict[str, Any], kind: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    around = {
        name: value
        for name, value in AROUND.items()
        if not (name == "use_cpu" and values["distributed_type"] == "MULTI_CPU")
    }
    path = write(tmp_path, {**around, **values})
    profile, theirs = read_profile(path), load_config_from_file(str(path))
    assert profile.kind == kind
    assert profile.num_processes == theirs.num_processes
    assert profile.mixed_precision == theirs.mixed_precision
    assert theirs.distributed_type == values["distributed_type"]


def test_bare_no_of_yaml_is_the_word(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("distributed_type: NO\nnum_processes: 1\nmixed_precision: no\n")
    assert read_profile(path) == Profile("none", 1, "no")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"distributed_type": "DEEPSPEED"}, "fsdp_version 2"),
        ({"distributed_type": "XLA"}, "distributed_type"),
        ({"mixed_precision": "fp16"}, "mixed_precision"),
        ({"num_processes": 0}, "num_processes"),
        ({"num_machines": 2}, "num_machines"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config"),
        ({"surprise": 1}, "surprise"),
        ({"fsdp_config": {"fsdp_version": 2}}, "fsdp_config"),
    ],
)
def test_what_would_not_be_kept_is_refused_by_name(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(Problems, match=word) as caught:
        read_profile(write(tmp_path, {**DDP, **change}))
    assert caught.value.errors[0].code == "bad_profile"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fsdp_version": 1}, "fsdp_version"),
        ({"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, "FULL_STATE_DICT"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy"),
        ({"fsdp_offload_params": "yes please"}, "fsdp_offload_params"),
        ({"fsdp_surprise": True}, "fsdp_surprise"),
    ],
)
def test_fsdp_keys_that_would_not_be_kept_are_refused(
    change: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises(Problems, match=word):
        read_profile(write(tmp_path, {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], **change}}))


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(Problems) as caught:
        read_profile(write(tmp_path, {**DDP, "mixed_precision": "fp16", "surprise": 1, "num_machines": 3}))
    assert len(caught.value.errors) == 3


def test_fingerprint_is_of_the_meaning(tmp_path: Path) -> None:
    def fingerprint(**change: Any) -> str:
        return read_profile(write(tmp_path, {**FSDP, **change})).fingerprint

    same = fingerprint()
    assert fingerprint(machine_rank=0, main_process_port=29501, debug=False) == same
    assert fingerprint(num_processes=4) == same  # how many there are is deployment
    assert fingerprint(mixed_precision="no") != same
    assert fingerprint(fsdp_config={**FSDP["fsdp_config"], "fsdp_offload_params": True}) != same


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError) as caught:
        read_profile(tmp_path / "none.yaml")
    assert caught.value.code == "file_missing"
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(FinetuneError) as caught:
        read_profile(tmp_path / "bad.yaml")
    assert caught.value.code == "bad_profile"
