"""Requests: sources of values, files that bring settings, paths."""

import json
from pathlib import Path

import pytest

from agent.request import absolute, again, understand, where
from finetune.errors import FinetuneError

BASE = {"method": "sft", "model": "builtin:tiny", "data": ["builtin:arithmetic"]}


def test_sources_give_way_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "method: sft\nmodel: builtin:tiny\ndata: builtin:arithmetic\nlearning-rate: 1e-3\nseed: 3\n"
    )
    request = understand({"config": "c.yaml", "seed": "7"}, tmp_path)
    assert request.config is not None
    assert not request.problems
    assert (request.config.seed, request.config.learning_rate, request.config.data) == (
        7,
        1e-3,
        ["builtin:arithmetic"],
    )
    assert (request.sources["seed"], request.sources["learning_rate"]) == ("user", "file")
    assert "epochs" not in request.sources


def test_other_held_out_rows_take_the_place_of_a_share(tmp_path: Path) -> None:
    """A run that held out a share of its rows can be evaluated on a file, although the two exclude each other."""
    chosen = understand(BASE | {"eval_fraction": "0.2", "split_seed": "3", "out": "a"}, tmp_path)
    settings = {
        name: {"value": value, "source": chosen.sources.get(name, "default")}
        for name, value in vars(chosen.config).items()
    }
    (tmp_path / "rows.jsonl").write_text("{}\n")
    request = again({"method": "sft", "settings": settings}, {"eval_data": ["rows.jsonl"]}, tmp_path)
    assert request.problems == []
    assert "eval_fraction" not in request.sources


def test_a_plan_gives_what_its_user_chose(tmp_path: Path) -> None:
    settings = {
        "model": {"value": "builtin:tiny", "source": "user"},
        "data": {"value": ["builtin:arithmetic"], "source": "file"},
        "device": {"value": "cuda", "source": "plan"},
        "seed": {"value": 5, "source": "default"},
    }
    (tmp_path / "plan.json").write_text(json.dumps({"plan_id": "x", "method": "sft", "settings": settings}))
    request = understand({"config": str(tmp_path / "plan.json")}, tmp_path)
    assert request.config is not None
    assert (request.config.device, request.config.seed, request.config.model) == ("auto", 0, "builtin:tiny")


def test_every_bad_setting_is_told_at_once(tmp_path: Path) -> None:
    flags = BASE | {"learning_rate": "fast", "num_gpus": "0", "seed": "1.5", "profile": "missing.yaml"}
    request = understand(flags, tmp_path)
    assert {error.evidence["setting"] for error in request.problems} == {
        "learning_rate",
        "num_gpus",
        "seed",
        "profile",
    }
    assert request.config is not None  # what can be checked besides is


@pytest.mark.parametrize(
    ("text", "code"), [("[1, 2]", "bad_value"), ("a: [", "bad_value"), (None, "file_missing")]
)
def test_a_config_file_that_cannot_be_read(tmp_path: Path, text: str | None, code: str) -> None:
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    assert [error.code for error in understand(BASE | {"config": "c.yaml"}, tmp_path).problems] == [code]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.yaml", "seed: 1\nepochs: 2\nseed: 2\n", "seed stands there twice, again in line 3"),
        ("c.yaml", "learning-rate: 1e-3\nlearning_rate: 1e-4\n", "learning_rate stands there twice"),
        ("c.json", '{"seed": 1, "seed": 1}', "seed stands there twice"),
    ],
)
def test_a_setting_that_a_config_file_gives_twice_is_refused(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    problems = understand(BASE | {"config": name}, tmp_path).problems
    assert [(error.code, error.evidence["setting"]) for error in problems] == [("duplicate_key", "config")]
    assert words in problems[0].message


def test_a_config_file_may_use_all_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: &rows [builtin:arithmetic]\neval_data: *rows\nmap: []\n")
    request = understand({"method": "sft", "model": "builtin:tiny", "config": "c.yaml"}, tmp_path)
    assert not request.problems
    assert request.config is not None
    assert request.config.eval_data == request.config.data == ["builtin:arithmetic"]


def test_a_method_is_needed_and_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="--method"):
        understand({"model": "builtin:tiny"}, tmp_path)
    with pytest.raises(FinetuneError, match="there are: sft, grpo"):
        understand({"method": "ppo"}, tmp_path)


def profile(folder: Path, text: str) -> str:
    (folder / "p.yaml").write_text(text)
    return "p.yaml"


def test_a_profile_brings_ranks_and_the_way_they_share(tmp_path: Path) -> None:
    path = profile(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n")
    request = understand(BASE | {"profile": path}, tmp_path)
    assert request.config is not None
    assert not request.problems
    assert (request.config.num_gpus, request.config.parallel, request.config.dtype) == (2, "ddp", "bf16")
    assert request.sources["num_gpus"] == request.sources["parallel"] == request.sources["dtype"] == "profile"


@pytest.mark.parametrize(("name", "value"), [("num_gpus", "3"), ("dtype", "fp32")])
def test_a_profile_and_a_flag_that_differ_are_a_conflict(tmp_path: Path, name: str, value: str) -> None:
    path = profile(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n")
    problems = understand(BASE | {"profile": path, name: value}, tmp_path).problems
    assert [(error.code, error.evidence["setting"]) for error in problems] == [("settings_conflict", name)]


def test_a_profile_with_unknown_keys_is_refused_with_each_of_them(tmp_path: Path) -> None:
    path = profile(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 2\nfoo: 1\nbar: 2\n")
    problems = understand(BASE | {"profile": path}, tmp_path).problems
    assert [error.code for error in problems] == ["bad_profile", "bad_profile"]


def test_an_adapter_brings_its_own_shape(tmp_path: Path) -> None:
    facts = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    (tmp_path / "a").mkdir()
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(facts))
    request = understand(BASE | {"init_adapter": "a"}, tmp_path)
    assert request.config is not None
    assert not request.problems
    assert (request.config.lora_rank, request.config.lora_alpha, request.config.lora_targets) == (
        4,
        8.0,
        "q_proj,v_proj",
    )
    assert request.sources["lora_rank"] == "checkpoint"
    (tmp_path / "a/adapter_config.json").write_text("{}")
    assert [error.code for error in understand(BASE | {"init_adapter": "a"}, tmp_path).problems] == [
        "bad_adapter"
    ]
    assert [error.code for error in understand(BASE | {"init_adapter": "b"}, tmp_path).problems] == [
        "file_missing"
    ]


def test_paths_become_absolute_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "d ä 1").mkdir()
    (tmp_path / "odd:2").mkdir()
    assert where("d ä 1", tmp_path) == f"{tmp_path}/d ä 1"
    assert where("./x/../a b.jsonl:0.5", tmp_path) == f"{tmp_path}/a b.jsonl:0.5"
    assert where("~/rows.csv", tmp_path) == "/home/me/rows.csv"
    assert where("odd:2", tmp_path) == f"{tmp_path}/odd:2"
    for name in ("builtin:arithmetic:eval", "org/name", "org/name:0.5", "auto", "chatml"):
        assert where(name, tmp_path) == name
    assert absolute("o ü/", tmp_path) == f"{tmp_path}/o ü"
