"""A policy on held-out rows: loss, and accuracy by generation where the domain has a verifier.

The figures are the same on any number of ranks and for any grouping into forwards: sums over all rows, divided once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from finetune.config import RunConfig
from finetune.data.batches import Budget, rank_batches
from finetune.data.prepare import Prepared
from finetune.domains.base import Domain
from finetune.domains.prompts import domain_of
from finetune.model.builtin import load_tokenizer
from finetune.model.policy import Policy
from finetune.model.source import Source
from finetune.parallel.world import World
from finetune.records import EvalResult
from finetune.rules import forward_tokens
from finetune.train.evaluate import generated_scores


@dataclass(frozen=True)
class HeldOut:
    """The rows to be measured on, and how."""

    prepared: Prepared
    config: RunConfig
    source: Source
    world: World
    beat: Callable[[str], None]  # is told what is being done, often; what it raises ends the measurement


def evaluate_held_out(
    module: nn.Module, held_out: HeldOut, unsharded: Callable[[], Policy]
) -> EvalResult | None:
    """Return loss and accuracy, equal on every rank; None where no row is held out.

    `unsharded` gives the policy that may generate; it is asked for only where the domain has a verifier.
    """
    examples = held_out.prepared.eval
    if not examples:
        return None
    losses = _row_losses(module, held_out)
    result = EvalResult(
        loss=_mean(losses),
        num_tokens=sum(example.num_supervised for example in examples),
        num_rows=len(held_out.prepared.eval_rows),
        row_losses=[losses[place][0] / losses[place][1] for place in sorted(losses)],
    )
    domain = domain_of(held_out.config)
    if not domain.has_verifier:
        return result
    scores = _scores(unsharded(), held_out, domain)
    known = [score for score in scores if score is not None]
    return replace(result, scores=scores, accuracy=math.fsum(known) / len(known) if known else None)


def held_out_loss(module: nn.Module, held_out: HeldOut) -> float:
    """Return sum of w * nll / sum of w over all supervised tokens of all rows."""
    return _mean(_row_losses(module, held_out))


def _row_losses(module: nn.Module, held_out: HeldOut) -> dict[int, tuple[float, float]]:
    """Return place of an example -> (sum of w * nll, sum of w), for all of them, on every rank."""
    world, examples = held_out.world, held_out.prepared.eval
    batches, _ = rank_batches(
        range(len(examples)), examples, Budget(forward_tokens(held_out.config)), world.rank, world.size
    )
    own: dict[int, tuple[float, float]] = {}
    module.eval()
    with torch.no_grad():
        for batch in batches:
            held_out.beat("evaluating the held-out loss")
            on_device = batch.to(world.device)
            nll_N = (-module(on_device) * on_device.weights_N).double().cpu()
            if not batch.weights_N.any():
                continue  # a copy that only kept the ranks together
            for place in batch.row_N.unique().tolist():
                of_row = batch.row_N == place
                own[place] = (float(nll_N[of_row].sum()), float(batch.weights_N[of_row].double().sum()))
    module.train()
    return {place: sums for part in world.gather(own) for place, sums in part.items()}


def _mean(losses: dict[int, tuple[float, float]]) -> float:
    return math.fsum(nll for nll, _ in losses.values()) / math.fsum(weight for _, weight in losses.values())


def _scores(policy: Policy, held_out: HeldOut, domain: Domain) -> list[float | None]:
    """Score every held-out row, each rank its share; no collective runs while answers are made."""
    world, prepared = held_out.world, held_out.prepared
    held_out.beat("answering held-out rows")
    examples = {
        example.row: example for example in reversed(prepared.eval)
    }  # of a row that became several: the first
    own = [place for place in sorted(examples) if place % world.size == world.rank]
    tokenizer = load_tokenizer(held_out.source)
    found = generated_scores(
        policy.generator,
        tokenizer,
        domain,
        [examples[place] for place in own],
        prepared.eval_rows,
        lambda: held_out.beat("answering held-out rows"),
    )
    every = {
        place: score
        for part in world.gather(dict(zip(own, found, strict=True)))
        for place, score in part.items()
    }
    return [every[place] for place in sorted(every)]
