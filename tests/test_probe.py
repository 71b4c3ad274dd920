"""The child that does what needs the model: full checks, evaluation, answers, exports; all problems in one answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.config import GrpoConfig, SftConfig
from finetune.data.prepare import load_prepared
from finetune.knobs import build
from finetune.model.footprint import Answering, Workload, cache_bytes_per_token, engine_forecast, forecast
from finetune.model.source import resolve_source
from finetune.parallel.world import World
from finetune.probe import answer
from finetune.rank import read_job
from finetune.records import Journal, StopFlag
from finetune.train import sft
from tests.train.runs import make_run, ragged_examples

SETTINGS = {
    "model": "builtin:tiny",
    "data": ["builtin:arithmetic"],
    "dtype": "fp32",
    "device": "cpu",
    "attention": "sdpa",
    "parallel": "ddp",
}


def asked(task: str, settings: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return answer(
        {
            "task": task,
            "method": "sft",
            "settings": {**SETTINGS, "gradient_checkpointing": False, **(settings or {})},
            **fields,
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of builtin:tiny, trained for a few steps on arithmetic rows."""
    prepared = asked("prepare", {"eval_rows": 10}, store=True)["data"]["prepared"]
    run = make_run(tmp_path_factory.mktemp("run"), ragged_examples(2), max_steps=3, learning_rate=1e-2)
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps(plan | {"prepared": prepared}))
    sft.train(read_job(run)[0], World.single(), Journal(run), StopFlag())
    return run


def test_full_checks_prepare_the_rows_and_forecast_the_memory() -> None:
    found = asked("prepare", store=True)
    assert found["ok"], found["errors"]
    data = found["data"]
    assert (data["num_rows"], data["num_eval_rows"], data["steps"]) == (1600, 200, 100)
    assert len(load_prepared(Path(data["prepared"])).train) == 1600
    assert data["memory"]["forecast_bytes_per_rank"] == sum(data["memory"]["parts"].values())
    again = asked("prepare", store=True)
    assert again["data"]["reused"]
    assert "prepared_reused" in {warning["code"] for warning in again["warnings"]}


def test_nothing_is_left_where_nothing_is_to_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    assert asked("check-data", store=False)["data"]["prepared"] is None
    assert not (tmp_path / "cache").exists()


def test_problems_of_model_and_rows_come_together(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}\n'
    )
    found = asked("prepare", {"data": [str(rows)], "lora_targets": "q_proj,nowhere"}, store=False)
    assert not found["ok"]
    assert {"bad_value", "empty_assistant"} <= {error["code"] for error in found["errors"]}


def test_evaluation_of_the_base_and_of_an_adapter_differ(trained: Path) -> None:
    settings = {"eval_rows": 10}
    base = asked("evaluate", settings)["data"]
    tuned = asked("evaluate", settings, adapter=str(trained / "adapter"))["data"]
    assert base["num_rows"] == tuned["num_rows"] == 10
    assert tuned["loss"] < base["loss"]
    assert base["accuracy"] is not None


def test_evaluation_without_held_out_rows_says_so(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    found = asked("evaluate", {"data": [str(rows)]})
    assert [error["code"] for error in found["errors"]] == ["too_few_rows"]


def test_answers_follow_the_weights_and_the_seed(trained: Path) -> None:
    wanted = {
        "prompts": ["What is 2 + 3?", [{"role": "user", "content": "hi"}]],
        "max_new_tokens": 6,
        "temperature": 0,
    }
    base, tuned = (
        asked("generate", **wanted, adapter=adapter) for adapter in (None, str(trained / "adapter"))
    )
    assert len(base["data"]["completions"]) == 2
    assert base["data"] != tuned["data"]
    assert tuned["data"] == asked("generate", **wanted, adapter=str(trained / "adapter"))["data"]


def test_exports_load_elsewhere_and_agree(trained: Path, tmp_path: Path) -> None:
    merged = asked(
        "export", adapter=str(trained / "adapter"), out=str(tmp_path / "merged"), kind="merged", dtype="fp32"
    )
    adapter = asked("export", adapter=str(trained / "adapter"), out=str(tmp_path / "adapter"), kind="adapter")
    assert merged["ok"], merged["errors"]
    assert adapter["ok"], adapter["errors"]
    base = asked("export", adapter=None, out=str(tmp_path / "none"), kind="merged")
    assert [error["code"] for error in base["errors"]] == ["bad_export"]
    from finetune.model.builtin import load_model

    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
        beside = PeftModel.from_pretrained(
            load_model(resolve_source("builtin:tiny"), torch.float32, "sdpa"), str(tmp_path / "adapter")
        )
        torch.testing.assert_close(whole, beside(ids).logits, rtol=0, atol=1e-3)


def test_unknown_setting_is_an_answer_and_no_crash() -> None:
    found = asked("prepare", {"learning_rat": 1}, store=False)
    assert [error["code"] for error in found["errors"]] == ["unknown_setting"]


def test_forecast_follows_ranks_and_tokens() -> None:
    source = resolve_source("builtin:tiny")
    config = build(SftConfig, SETTINGS)
    one = forecast(source, config, Workload(1000, 100, 1, False, 77824))
    shared = forecast(source, config, Workload(1000, 100, 2, True, 77824))
    wider = forecast(source, config, Workload(2000, 100, 1, False, 77824))
    assert shared["weights"] == one["weights"] // 2
    assert wider["activations"] == 2 * one["activations"]
    assert one["trained_weights_gradients_optimizer"] == 77824 * 16  # value, gradient and two moments in fp32


def test_answering_takes_its_cache_and_the_choice_of_tokens_where_training_takes_less() -> None:
    source = resolve_source("builtin:tiny")
    config = build(SftConfig, SETTINGS | {"dtype": "bf16"})
    assert (
        cache_bytes_per_token(source.config, 2) == 2 * 4 * 2 * 32 * 2
    )  # keys and values, layers, heads, width, bf16
    plain = forecast(source, config, Workload(10, 10, 1, False, 0))
    asked = Answering(rows=100, prompt=20, new=30)
    answering = forecast(source, config, Workload(10, 10, 1, False, 0, asked))
    cache = 100 * 50 * 1024 * 5 // 4  # that of one layer of four twice
    working = max(100 * 20 * 4 * (128 + 384) * 2, int(100 * source.config["vocab_size"] * 4 * 3.5))
    free = plain["activations"] + plain["logits_chunk"]
    assert answering.pop("answering_beyond_training") == cache + working - free
    assert answering == plain
    busy = forecast(source, config, Workload(100_000, 10, 1, False, 0, asked))
    assert busy["answering_beyond_training"] == 0
    copied = forecast(source, config, Workload(10, 10, 2, True, 0, asked))["answering_beyond_training"]
    assert copied == cache + working - free + plain["weights"]


def test_an_engine_is_foreseen_by_its_programs_weights_and_cache() -> None:
    source = resolve_source("builtin:tiny")
    settings = SETTINGS | {"dtype": "bf16", "max_length": 500, "concurrency": 4096}
    config = build(GrpoConfig, settings | {"max_completion_tokens": 10})
    parts = engine_forecast(source, config, 1 << 40)
    assert parts["cache"] == 2 << 30  # 4,096 completions of 500 tokens of 1 KiB are 1.95 GiB
    assert parts["weights"] == forecast(source, config, Workload(1, 1, 1, False, 0))["weights"]
    assert engine_forecast(source, config, 1 << 32)["cache"] == 1 << 30  # a quarter of the memory at most


def test_the_full_checks_find_the_batch_that_is_answered() -> None:
    """builtin:arithmetic is scored by its answers; 200 held-out rows are answered 8,192 tokens at a time."""
    parts = asked("prepare", {"micro_batch_tokens": 8}, store=False)["data"]["memory"]["parts"]
    assert parts["answering_beyond_training"] > 0
