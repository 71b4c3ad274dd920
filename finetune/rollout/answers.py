"""What a vLLM server is asked, and what of its answer can be trained on: /inference/v1/generate, token ids in and out.

Rule: every parameter is sent, none is left to a server; and a completion counts only if each of its tokens, log-probs,
its end and the version of its weights are what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.rollout.engine import Call, Completion, Sampling

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0  # vLLM raises lower ones to 0.01 and refuses higher ones
_FLOOR = -9999.0  # what the server writes for minus infinity and for NaN
_SLACK = 1e-6  # by which rounding may lift a log-prob over 0


class _Bad(Exception):
    """Why a completion cannot be trained on."""


@dataclass(frozen=True)
class Expected:
    """What a completion must agree with.

    model: the name that is asked; stamps: names that the weights may bear, None among them where a server names none.
    """

    sampling: Sampling
    vocab_size: int
    model: str
    version: str
    stamps: frozenset[str | None]


def generation_request(call: Call, expected: Expected) -> dict[str, Any]:
    """Return the body that asks for `count` completions of a call; the i-th is drawn with the seed `seed` + i."""
    assert call.seed >= 0, "vLLM takes seed -1 for none"
    sampling = expected.sampling
    return _body(
        call.prompt_ids,
        expected.model,
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=sorted(set(sampling.stop_ids)),
        seed=call.seed,
        n=call.count,
    )


def scoring_request(ids: Sequence[int], model: str) -> dict[str, Any]:
    """Return the body that asks for the log-prob of each of the given tokens but the first, at temperature 1."""
    return _body(list(ids), model, max_tokens=1, prompt_logprobs=0)


def trial_request(ids: Sequence[int], model: str, temperature: float, candidates: int) -> dict[str, Any]:
    """Return the body that asks for one token and the most likely `candidates` beside it."""
    return _body(list(ids), model, max_tokens=1, temperature=temperature, logprobs=candidates)


def _body(ids: list[int], model: str, **parameters: Any) -> dict[str, Any]:
    neutral = {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "stop": [],
        "stop_token_ids": [],
        "bad_words": [],
        "logit_bias": None,
        "allowed_token_ids": None,
        # The stop tokens of the plan alone end a completion, none that the model's own files name.
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
        "prompt_logprobs": None,
        "detokenize": False,
    }
    return {
        "token_ids": ids,
        "model": model,
        "stream": False,
        "return_token_ids": True,
        "sampling_params": neutral | parameters,
    }


def read_completions(answer: Any, call: Call, expected: Expected) -> list[Completion | str]:
    """Return what can be trained of an answer: for each index below `count` its completion, or why there is none."""
    try:
        choices = _choices(answer, call, expected)
    except _Bad as bad:
        return [str(bad)] * call.count
    outcomes: list[Completion | str] = []
    for index in range(call.count):
        named = [choice for choice in choices if isinstance(choice, dict) and choice.get("index") == index]
        try:
            if len(named) != 1:
                raise _Bad(f"{len(named)} choices with index {index} among {len(choices)}")
            outcomes.append(_completion(named[0], expected))
        except _Bad as bad:
            outcomes.append(str(bad))
    return outcomes


def _choices(answer: Any, call: Call, expected: Expected) -> list[Any]:
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise _Bad("an answer without choices")
    _check_origin(answer, call.prompt_ids, expected.model)
    return answer["choices"]


def _check_origin(answer: dict[str, Any], ids: list[int], model: str) -> None:
    if answer.get("model") != model:
        raise _Bad(f"asked model {model}, but {answer.get('model')} answered")
    if answer.get("prompt_token_ids") not in (None, ids):
        raise _Bad("the prompt of the answer is not the one that was sent")


def _completion(choice: dict[str, Any], expected: Expected) -> Completion:
    ids, content = _ids(choice.get("token_ids"), expected), _content(choice.get("logprobs"))
    _check_spans(choice.get("weight_versions"), len(ids), expected.stamps)
    stop_ids, finish, sampling = (
        set(expected.sampling.stop_ids),
        choice.get("finish_reason"),
        expected.sampling,
    )
    if finish == "stop" and not (ids and ids[-1] in stop_ids):
        ids = [*ids, _dropped_stop(choice.get("stop_reason"), len(ids), content, stop_ids)]
    if finish not in ("stop", "length"):
        raise _Bad(f"it ended by {finish!r}, neither by a stop token nor by the limit")
    if any(token in stop_ids for token in (ids[:-1] if finish == "stop" else ids)):
        raise _Bad("it goes on after a stop token")
    if finish == "length" and len(ids) != sampling.max_new_tokens:
        raise _Bad(f"cut after {len(ids)} tokens where the limit is {sampling.max_new_tokens}")
    if len(ids) > sampling.max_new_tokens:
        raise _Bad(f"{len(ids)} tokens where the limit is {sampling.max_new_tokens}")
    if len(content) != len(ids):
        raise _Bad(f"{len(content)} log-probs for {len(ids)} tokens")
    logprobs = [_logprob_of(token, entry) for token, entry in zip(ids, content, strict=True)]
    return Completion(ids, logprobs, finish == "stop", expected.version)


def _ids(ids: Any, expected: Expected) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise _Bad("no token ids")
    past = [token for token in ids if not 0 <= token < expected.vocab_size]
    if past:
        raise _Bad(f"token id {past[0]} is none of the {expected.vocab_size} of the vocabulary")
    return ids


def _content(logprobs: Any) -> list[dict[str, Any]]:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise _Bad("no log-probs")
    return content


def _check_spans(spans: Any, length: int, stamps: frozenset[str | None]) -> None:
    """Refuse tokens that were sampled from weights of another name, or that no span covers."""
    if spans is None and None in stamps:
        return
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise _Bad("no versions of the weights")
    place = 0
    for span in spans:
        if span.get("version") not in stamps:
            names = " or ".join(sorted(map(str, stamps)))
            raise _Bad(f"sampled from weights {span.get('version')}, not from {names}")
        if span.get("start") != place or type(span.get("end")) is not int:
            raise _Bad("the versions of the weights leave tokens out")
        place = span["end"]
    if place < length:
        raise _Bad("the versions of the weights leave tokens out")


def _dropped_stop(reason: Any, length: int, content: list[dict[str, Any]], stop_ids: set[int]) -> int:
    """Return the stop token that a server named and scored but left out of the ids."""
    is_scored = len(content) == length + 1 and content[-1].get("token_id") == reason
    if type(reason) is int and reason in stop_ids and is_scored:
        return reason
    raise _Bad("it ended by a stop token that is not among its ids")


def _logprob_of(token: int, entry: dict[str, Any]) -> float:
    """Return the log-prob of the sampled token, whichever candidate stands first."""
    candidates = entry.get("top_logprobs")
    named = [entry, *(candidates if isinstance(candidates, list) else [])]
    for candidate in named:
        if isinstance(candidate, dict) and candidate.get("token_id") == token:
            return _checked(candidate.get("logprob"), token)
    raise _Bad(f"no log-prob of the sampled token {token}")


def _checked(value: Any, token: int) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not _FLOOR < value <= _SLACK:
        raise _Bad(f"log-prob {value!r} of token {token}")
    return float(value)


def read_scores(answer: Any, ids: Sequence[int], model: str) -> list[float] | str:
    """Return the log-probs of ids[1:] from an answer, or why it has none."""
    try:
        if not isinstance(answer, dict):
            raise _Bad("no answer")
        _check_origin(answer, list(ids), model)
        entries = answer.get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise _Bad("no log-probs of the prompt's tokens")
        return [_score(entry, token) for entry, token in zip(entries[1:], ids[1:], strict=True)]
    except _Bad as bad:
        return str(bad)


def _score(entry: Any, token: int) -> float:
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    if not isinstance(found, dict):
        raise _Bad(f"no log-prob of token {token}")
    return _checked(found.get("logprob"), token)


def read_candidates(answer: Any) -> dict[int, float] | None:
    """Return token -> log-prob of the answer to a trial request; None where it has none."""
    try:
        entry = _content(answer["choices"][0]["logprobs"])[0]
        return {int(each["token_id"]): float(each["logprob"]) for each in [entry, *entry["top_logprobs"]]}
    except (_Bad, KeyError, IndexError, TypeError, ValueError):
        return None


def read_stamp(answer: Any) -> str | None:
    """Return the version of the weights that made an answer's first token; None where it does not say."""
    try:
        return str(answer["choices"][0]["weight_versions"][0]["version"])
    except (KeyError, IndexError, TypeError):
        return None
