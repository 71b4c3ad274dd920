"""A real vLLM server in fp32: what it serves equals what transformers computes, also through adapters and after a kill."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.model.builtin import load_model, load_tokenizer
from finetune.model.source import resolve_source
from finetune.rollout.engine import Call, Completion, Sampling
from finetune.rollout.server import ManagedServer, ServerSettings
from finetune.rollout.vllm import VllmEngine

pytestmark = pytest.mark.slow
MODEL = "builtin:tiny?seed=3"
VOCAB = 328
EXACT = 1e-4  # nats: fp32 against fp32
PROMPTS = [[5, 6, 7, 8 + index] + [9] * (index % 3) for index in range(8)]
CALLS = [Call(prompt, seed=100 * index, count=8) for index, prompt in enumerate(PROMPTS)]
SAMPLING = Sampling(max_new_tokens=12, stop_ids=list(range(40, 60)), temperature=1.0)


def write_model(name: str, folder: Path) -> Path:
    """Write a model in fp32 whose generation_config.json would make every completion greedy, penalised and short."""
    source = resolve_source(name)
    load_model(source, torch.float32).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    file = folder / "generation_config.json"
    poison = {"top_k": 1, "top_p": 0.5, "temperature": 0.1, "repetition_penalty": 1.5, "max_new_tokens": 2}
    poison |= {"do_sample": True, "eos_token_id": list(range(4, 40))}
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | poison))
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServerSettings:
    folder = tmp_path_factory.mktemp("real")
    model = write_model(MODEL, folder / "model")
    return ServerSettings(
        model, folder / "log", 128, 32, dtype="float32", lora_rank=8, extension=None, start_timeout_s=240
    )


@pytest.fixture(scope="module")
def server(settings: ServerSettings) -> Iterator[ManagedServer]:
    server = ManagedServer(settings)
    server.start()
    try:
        print(f"start-up {server.wait_ready():.1f} s")
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def engine(server: ManagedServer) -> Iterator[VllmEngine]:
    engine = VllmEngine([server], vocab_size=VOCAB, timeout_s=120, concurrency=32)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load_model(resolve_source(MODEL), torch.float32)


def next_logps(model: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> Tensor:
    """Return log-probs [T-1, V]: row t is the distribution of ids[t + 1]."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def worst(model: torch.nn.Module, completions: list[tuple[Call, Completion]], temperature: float) -> float:
    """Return the largest difference between a served and a recomputed log-prob."""
    found = 0.0
    for call, completion in completions:
        start = len(call.prompt_ids) - 1
        logps = next_logps(model, call.prompt_ids + completion.ids, temperature)[start:]
        own = logps.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        found = max(found, (own - torch.tensor(completion.logprobs)).abs().max().item())
    return found


def sampled(engine: VllmEngine, sampling: Sampling) -> list[tuple[Call, Completion]]:
    pairs = [
        (call, outcome)
        for call, group in zip(CALLS, engine.sample(CALLS, sampling), strict=True)
        for outcome in group
    ]
    assert all(isinstance(outcome, Completion) for _, outcome in pairs), pairs
    return pairs  # type: ignore[return-value]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_served_logprobs_are_those_of_the_model_whatever_its_folder_says(
    engine: VllmEngine, model: torch.nn.Module, temperature: float
) -> None:
    pairs = sampled(engine, replace(SAMPLING, temperature=temperature))
    assert len(pairs) == 64
    assert worst(model, pairs, temperature) < EXACT
    assert len({tuple(completion.ids) for _, completion in pairs}) > 60  # not the one token of top_k 1
    for _, completion in pairs:
        stops = [token for token in completion.ids if token in SAMPLING.stop_ids]
        assert stops == ([completion.ids[-1]] if completion.stopped else [])
        assert completion.stopped or len(completion.ids) == SAMPLING.max_new_tokens
    assert {completion.stopped for _, completion in pairs} == {True, False}
    assert any(token < 40 for _, completion in pairs for token in completion.ids[:-1])  # its eos ends nothing


def test_greedy_takes_the_most_likely_token_and_tells_its_logprob_at_temperature_one(
    engine: VllmEngine, model: torch.nn.Module
) -> None:
    pairs = sampled(engine, replace(SAMPLING, temperature=0.0))
    assert worst(model, pairs, 1.0) < EXACT
    for call, completion in pairs[::8]:
        logps = next_logps(model, call.prompt_ids + completion.ids)[len(call.prompt_ids) - 1 :]
        assert logps.argmax(dim=-1).tolist() == completion.ids


def test_a_completion_depends_on_its_seed_not_on_its_company(engine: VllmEngine) -> None:
    together = engine.sample(CALLS, SAMPLING)
    assert engine.sample(CALLS, SAMPLING) == together
    alone = [Call(call.prompt_ids, call.seed + index) for call in CALLS[:2] for index in range(8)]
    one_by_one = [outcome for (outcome,) in engine.sample(alone, SAMPLING)]
    as_group = [outcome for group in together[:2] for outcome in group]
    assert [outcome.ids for outcome in one_by_one] == [outcome.ids for outcome in as_group]  # type: ignore[union-attr]
    others = engine.sample([replace(call, seed=call.seed + 50) for call in CALLS], SAMPLING)
    assert others != together
    (many,) = engine.sample([Call(PROMPTS[0], seed=0, count=40)], SAMPLING)  # more than the server's 32
    assert [each.ids for each in many[:8]] == [each.ids for each in together[0]]  # type: ignore[union-attr]
    assert len(many) == 40


def test_scores_are_the_models(engine: VllmEngine, model: torch.nn.Module) -> None:
    sequences = [[3, *prompt, 11, 12] for prompt in PROMPTS]
    for ids, scores in zip(sequences, engine.score(0, sequences, "base"), strict=True):
        own = next_logps(model, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert (own - torch.tensor(scores)).abs().max().item() < EXACT


def test_an_adapter_is_served_under_its_name_and_the_base_stays_what_it_was(
    engine: VllmEngine, tmp_path: Path, model: torch.nn.Module
) -> None:
    before = engine.sample(CALLS, SAMPLING)
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(load_model(resolve_source(MODEL), torch.float32), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "v1")
    engine.load_adapter(0, "step-000001", tmp_path / "v1")
    assert "step-000001" in engine.list_models(0)
    with pytest.raises(FinetuneError, match="already"):
        engine.load_adapter(0, "step-000001", tmp_path / "v1")
    with pytest.raises(FinetuneError, match="answered 404"):
        engine.load_adapter(0, "step-000002", tmp_path / "nothing")
    try:
        engine.activate("step-000001")
        for temperature in (0.7, 1.0):
            pairs = sampled(engine, replace(SAMPLING, temperature=temperature))
            assert worst(adapted, pairs, temperature) < EXACT
            assert worst(model, pairs, temperature) > 0.05
            assert {completion.version for _, completion in pairs} == {"step-000001"}
    finally:
        engine.activate("base")
        engine.unload_adapter(0, "step-000001")
    assert engine.list_models(0)[0] == "base"
    assert engine.sample(CALLS, SAMPLING) == before


def test_weights_are_reloaded_in_place_and_bear_their_stamp(
    engine: VllmEngine, settings: ServerSettings, tmp_path: Path
) -> None:
    before = engine.sample(CALLS, SAMPLING)
    other = write_model("builtin:tiny?seed=4", tmp_path / "other")
    try:
        engine.reload_weights(0, other)
        engine.reset_prefix_cache(0)
        with pytest.raises(FinetuneError, match="does not hold version step-000007"):
            engine.activate("step-000007", "base")
        engine.stamp_version(0, "step-000007")
        engine.activate("step-000007", "base")
        pairs = sampled(engine, SAMPLING)
        assert worst(load_model(resolve_source("builtin:tiny?seed=4"), torch.float32), pairs, 1.0) < EXACT
        assert {completion.version for _, completion in pairs} == {"step-000007"}
    finally:
        engine.reload_weights(0, settings.model)
        engine.reset_prefix_cache(0)
        engine.stamp_version(0, "base")
        engine.activate("base")
    assert engine.sample(CALLS, SAMPLING) == before


def test_a_running_server_is_judged_by_what_it_does(server: ManagedServer) -> None:
    assert server.url is not None
    VllmEngine([server.url], vocab_size=VOCAB, sync="adapter", lora_rank=8).close()
    VllmEngine([server.url], vocab_size=VOCAB, sync="merged").close()
    with pytest.raises(FinetuneError, match="up to rank 8, this run trains rank 16"):
        VllmEngine([server.url], vocab_size=VOCAB, sync="adapter", lora_rank=16)
    assert server.is_alive


@pytest.mark.proof
def test_a_server_killed_while_it_samples_is_restarted_and_the_completions_come(
    engine: VllmEngine, server: ManagedServer, model: torch.nn.Module
) -> None:
    long = Sampling(100, [], 1.0)
    calls = [replace(call, prompt_ids=call.prompt_ids[:4]) for call in CALLS]
    restarts: list[int] = []
    engine.on_restart = restarts.append
    assert server.pid is not None
    processes = psutil.Process(server.pid).children(recursive=True)

    def kill() -> None:
        time.sleep(0.3)
        processes[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    found = engine.sample(calls, long)
    killer.join()
    assert restarts == [0]
    assert not [process for process in processes if process.is_running()]
    pairs = [(call, outcome) for call, group in zip(calls, found, strict=True) for outcome in group]
    assert all(isinstance(outcome, Completion) for _, outcome in pairs)
    assert worst(model, pairs, 1.0) < EXACT  # type: ignore[arg-type]


@pytest.mark.proof
def test_a_model_that_vllm_does_not_know_is_named(settings: ServerSettings, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in settings.model.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text()) | {"architectures": ["UnheardOfLM"]}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    cases = {
        "engine_model": (replace(settings, model=model, log=tmp_path / "a"), "UnheardOfLM"),
        "bad_value": (replace(settings, more=("unheard-of=3",), log=tmp_path / "c"), "unheard-of"),
    }
    for code, (changed, words) in cases.items():
        server = ManagedServer(changed)
        server.start()
        with pytest.raises(FinetuneError, match=words) as caught:
            server.wait_ready()
        assert caught.value.code == code
        assert not server.is_alive
