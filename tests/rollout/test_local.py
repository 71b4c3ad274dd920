"""Completions equal those of the library one prompt at a time, whatever shares their batch."""

import contextlib
import math

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from finetune.errors import FinetuneError
from finetune.model.builtin import load_model
from finetune.model.source import resolve_source
from finetune.rollout import local
from finetune.rollout.engine import Call, Sampling
from finetune.rollout.local import LocalEngine, _shared_prefix, attends_to_all, choose, generate

SYSTEM = list(range(40, 60))
PROMPTS = [
    SYSTEM + tail for tail in ([70], [71, 72, 73], [80, 81], [90, 91, 92, 93, 94, 95], [70], [99, 98, 97])
]
APART = [[100, 101, 102], [5], [200, 201, 202, 203, 204, 205, 206]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A random model whose head is steep, so that sampled tokens differ and some rows meet the stop tokens early."""
    tiny = load_model(resolve_source("builtin:tiny?seed=2"), torch.float32)
    tiny.get_output_embeddings().weight.data *= 20
    return tiny


def library_greedy(model: PreTrainedModel, prompt: list[int], new: int, stop_ids: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=stop_ids,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def common_stops(model: PreTrainedModel) -> list[int]:
    """Return tokens that end some completions early, at different steps, and others never."""
    free = [library_greedy(model, prompt, 12, []) for prompt in (*PROMPTS, *APART)]
    return [free[0][3], free[3][6]]


@pytest.mark.parametrize("prompts", [PROMPTS, APART, PROMPTS + APART, [PROMPTS[0]]])
@pytest.mark.parametrize("batch_tokens", [1, 100, 8192])
def test_greedy_completions_are_those_of_the_library(
    model: PreTrainedModel, prompts: list[list[int]], batch_tokens: int
) -> None:
    stops = common_stops(model)
    completions = generate(model, prompts, Sampling(12, stops), batch_tokens=batch_tokens)
    expected = [library_greedy(model, prompt, 12, stops) for prompt in prompts]
    assert [completion.ids for completion in completions] == expected
    assert [completion.stopped for completion in completions] == [ids[-1] in stops for ids in expected]
    if prompts is PROMPTS:
        assert len({len(ids) for ids in expected}) > 1, (
            "rows must end at different steps for this to prove anything"
        )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_those_of_the_whole_sequence(model: PreTrainedModel, temperature: float) -> None:
    completions = generate(model, PROMPTS, Sampling(8, [], temperature))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1]
        logps = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        expected = logps.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(model: PreTrainedModel) -> None:
    def sampled(first: int, batch_tokens: int) -> list[list[int]]:
        seeds = range(first, first + len(PROMPTS))
        found = generate(model, PROMPTS, Sampling(8, [], 1.5), seeds, batch_tokens)
        return [completion.ids for completion in found]

    assert sampled(1, 8192) == sampled(1, 1)
    assert sampled(1, 8192) != sampled(100, 8192)
    assert sampled(1, 8192)[0] != sampled(1, 8192)[4], "equal prompts with other seeds are sampled apart"


def test_completion_i_of_a_call_is_drawn_with_its_seed_plus_i(model: PreTrainedModel) -> None:
    sampling = Sampling(8, [], 1.5)
    engine = LocalEngine(model, "step-7")
    (group,), ((single,),) = (
        engine.sample([Call(APART[0], seed=20, count=3)], sampling),
        engine.sample([Call(APART[0], seed=22)], sampling),
    )
    assert group[2].ids == single.ids
    assert group[0].ids != group[1].ids
    assert {completion.version for completion in group} == {"step-7"}


def test_tokens_are_drawn_by_their_probability() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws = 20_000
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens, logprobs = choose(probabilities.log().expand(draws, 4), 1.0, uniforms)
    assert torch.bincount(tokens, minlength=4).div(draws).tolist() == pytest.approx(
        [0.5, 0.0, 0.3, 0.2], abs=1e-3
    )
    assert float(logprobs[0]) == pytest.approx(math.log(0.5))


def test_the_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    _, logprobs = choose(logits, 2.0, torch.zeros(1, dtype=torch.float64))
    assert float(logprobs[0]) == pytest.approx(-math.log(1 + math.exp(-1.0)), abs=1e-6)
    tokens, _ = choose(logits, 0.0, torch.ones(1, dtype=torch.float64))
    assert tokens.tolist() == [0]


def test_settings_of_the_models_folder_are_not_inherited(model: PreTrainedModel) -> None:
    plain = [completion.ids for completion in generate(model, PROMPTS, Sampling(8, []))]
    model.generation_config.eos_token_id = plain[0][0]
    model.generation_config.repetition_penalty = 5.0
    assert [completion.ids for completion in generate(model, PROMPTS, Sampling(8, []))] == plain


def test_the_model_is_left_in_the_mode_it_was_in(model: PreTrainedModel) -> None:
    generate(model.train(), PROMPTS, Sampling(1, []))
    assert model.training
    generate(model.eval(), PROMPTS, Sampling(1, []))
    assert not model.training


@pytest.mark.parametrize("prompts", [[[]], [[5] * 505], [[5], [5] * 600]])
def test_a_prompt_without_room_is_refused(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    with pytest.raises(FinetuneError) as caught:
        generate(model, prompts, Sampling(8, []))
    assert (caught.value.code, caught.value.evidence["index"]) == ("too_long", len(prompts) - 1)


def test_no_prompts_have_no_completions(model: PreTrainedModel) -> None:
    assert generate(model, [], Sampling(8, [])) == []


def test_the_shared_prefix_leaves_every_prompt_a_token() -> None:
    assert _shared_prefix([[1, 2, 3], [1, 2, 4]]) == [1, 2]
    assert _shared_prefix([[1, 2], [1, 2, 3]]) == [1]
    assert _shared_prefix([[1, 2], [1, 2]]) == [1]
    assert _shared_prefix([[7]]) == []


def test_models_with_windows_take_the_plain_way(model: PreTrainedModel) -> None:
    """Their caches forget, so nothing is shared or cut; the completions are right all the same."""
    sizes = {name: getattr(model.config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    torch.manual_seed(0)
    windowed = MistralForCausalLM(
        MistralConfig(
            **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=6
        )
    )
    windowed.get_output_embeddings().weight.data *= 20
    assert attends_to_all(model)
    assert not attends_to_all(windowed)
    free = library_greedy(windowed, PROMPTS[0], 12, [])
    completions = generate(windowed, PROMPTS, Sampling(12, [free[3]]))
    assert [completion.ids for completion in completions] == [
        library_greedy(windowed, prompt, 12, [free[3]]) for prompt in PROMPTS
    ]
    assert len({len(completion.ids) for completion in completions}) > 1


def test_the_head_gets_contiguous_input_so_that_it_is_not_repeated_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = load_model(resolve_source("builtin:tiny"), torch.bfloat16, "sdpa").requires_grad_(False)
    seen: list[bool] = []
    frozen.get_output_embeddings().register_forward_hook(
        lambda _, inputs, out: seen.append(inputs[0].is_contiguous())
    )
    generate(frozen, APART, Sampling(2, []))
    assert seen
    assert all(seen)
    monkeypatch.setattr(local, "_contiguous_head", lambda model: contextlib.nullcontext())
    generate(frozen, APART, Sampling(2, []))
    assert not all(seen)  # without the guard the first forward hands over a slice
