"""The policy loss against a loop over single numbers, values worked out by hand, and its independence of every split."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from finetune.train.corrections import BANDS, ROLLOUT_CORRECTIONS, sampler_gap
from finetune.train.losses import (
    LOSSES,
    LossSettings,
    LossStats,
    StepTotals,
    Tokens,
    kl_k3,
    policy_loss,
    rollout_sums,
    step_totals,
    weighted_nll,
)
from tests.train.loss_reference import Formula, Rollout, drawn, step_loss

NAN = math.nan
PAIRS = [(loss, mode) for loss in LOSSES for mode in BANDS if loss != "gspo" or mode in ROLLOUT_CORRECTIONS]


def formula_of(settings: LossSettings) -> Formula:
    floor, cap = {
        "token_truncate": (0, 2),
        "token_mask": (0, 2),
        "geometric_mask": (0.99, 1.01),
        "sequence_truncate": (0, 3),
        "sequence_mask": (0, 3),
    }[settings.correction or "token_truncate"]
    low, high = (3e-4, 4e-4) if settings.loss == "gspo" else (0.2, 0.2)
    return Formula(
        settings.loss,
        settings.correction or "token_truncate",
        floor if settings.correction_floor is None else settings.correction_floor,
        cap if settings.correction_cap is None else settings.correction_cap,
        low if settings.clip_low is None else settings.clip_low,
        high if settings.clip_high is None else settings.clip_high,
        settings.clip_cispo,
        settings.delta,
        settings.beta,
        settings.max_completion_tokens,
    )


def flat(rollouts: list[Rollout]) -> tuple[Tensor, Tokens, StepTotals]:
    """Return the step as one microbatch. What is not trained holds NaN, which must reach nothing."""

    def joined(lists: list[list[float]]) -> Tensor:
        values = [
            v if m else NAN
            for numbers, rollout in zip(lists, rollouts, strict=True)
            for v, m in zip(numbers, rollout.mask, strict=True)
        ]
        return torch.tensor(values, dtype=torch.float64)

    logps_N = torch.stack([value for rollout in rollouts for value in rollout.now]).detach()
    tokens = Tokens(
        joined([r.sampled for r in rollouts]),
        torch.tensor([float(m) for r in rollouts for m in r.mask]),
        torch.tensor([i for i, r in enumerate(rollouts) for _ in r.mask]),
        joined([r.old for r in rollouts]),
        joined([r.ref for r in rollouts]),
    )
    totals = step_totals(
        [r.advantage for r in rollouts], [len(r.places) for r in rollouts], [r.is_trained for r in rollouts]
    )
    return logps_N.requires_grad_(), tokens, totals


def cut(tokens: Tokens, places: Tensor) -> Tokens:
    assert tokens.old_N is not None
    assert tokens.ref_N is not None
    return Tokens(
        tokens.sampled_N[places],
        tokens.mask_N[places],
        tokens.rollout_N[places],
        tokens.old_N[places],
        tokens.ref_N[places],
    )


def with_sums(totals: StepTotals, logps_N: Tensor, tokens: Tokens, parts: list[Tensor]) -> StepTotals:
    """Add the sums of a pass without gradients over the parts."""
    assert tokens.old_N is not None
    gap_N, moved_N = sampler_gap(tokens.old_N, tokens.sampled_N), logps_N - tokens.old_N
    gaps, ratios = (
        sum(
            (
                rollout_sums(v[part], tokens.mask_N[part], tokens.rollout_N[part], len(totals.tokens_R))
                for part in parts
            ),
            torch.zeros_like(totals.tokens_R),
        )
        for v in (gap_N, moved_N)
    )
    return replace(totals, gap_sums_R=gaps, ratio_sums_R=ratios)


def trained(
    settings: LossSettings, rollouts: list[Rollout], parts: list[Tensor] | None = None
) -> tuple[float, Tensor, LossStats]:
    """Return the loss, its gradient by token and the figures, from the microbatches that `parts` are."""
    logps_N, tokens, totals = flat(rollouts)
    parts = parts or [torch.arange(len(logps_N))]
    totals = with_sums(totals, logps_N.detach(), tokens, parts)
    loss, stats = 0.0, LossStats()
    for part in parts:
        share, own = policy_loss(settings, logps_N[part], cut(tokens, part), totals)
        share.backward()
        loss, stats = loss + share.item(), stats + own
    assert logps_N.grad is not None
    return loss, logps_N.grad, stats


def expected(settings: LossSettings, rollouts: list[Rollout]) -> tuple[float, Tensor]:
    leaves = [value for rollout in rollouts for value in rollout.now]
    loss = step_loss(formula_of(settings), rollouts)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.item(), torch.tensor([0.0 if g is None else float(g) for g in grads], dtype=torch.float64)


def variants(loss: str, mode: str) -> Iterator[LossSettings]:
    plain = LossSettings(loss, correction=mode, max_completion_tokens=16)
    yield plain
    yield replace(plain, beta=0.1)
    yield replace(plain, beta=0.1, correction_cap=1.5, correction_floor=None if "trunc" in mode else 0.7)
    yield replace(plain, clip_low=0.05, clip_high=0.4, clip_cispo=0.3)
    if loss != "gspo":
        yield replace(plain, delta=1.1, beta=0.02)
        yield replace(plain, delta=1.5)


@pytest.mark.parametrize(("loss", "mode"), PAIRS)
@pytest.mark.parametrize("drift", [0.0, 3e-4, 0.3])
def test_equals_the_loop_over_single_numbers(loss: str, mode: str, drift: float) -> None:
    for seed, settings in enumerate(variants(loss, mode)):
        rollouts = drawn(seed, drift)
        value, gradient = expected(settings, rollouts)
        own_value, own_gradient, _ = trained(settings, rollouts)
        assert own_value == pytest.approx(value, rel=1e-12, abs=1e-13), settings
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-11, atol=1e-13)


def test_the_drawn_steps_reach_every_branch() -> None:
    for mode in BANDS:
        rates = [trained(LossSettings(correction=mode), drawn(s))[2].figures() for s in range(6)]
        assert any(0 < (r["correction_limited_share"] or 0) < 1 for r in rates), mode
    for loss in LOSSES:
        settings = LossSettings(loss, clip_cispo=0.3)
        figures = sum((trained(settings, drawn(s))[2] for s in range(6)), LossStats())
        assert figures.clipped_high, loss
        assert bool(figures.clipped_low) is (loss != "cispo"), loss


@pytest.mark.parametrize(("loss", "mode"), PAIRS)
def test_any_split_leaves_loss_gradient_and_figures(loss: str, mode: str) -> None:
    """Microbatches, segments and ranks are all the same to the loss: parts whose shares are summed."""
    settings = LossSettings(loss, correction=mode, beta=0.05, max_completion_tokens=16)
    rollouts = drawn(1)
    whole_loss, whole_gradient, whole_stats = trained(settings, rollouts)
    for seed in range(4):
        shuffled = torch.randperm(len(whole_gradient), generator=torch.Generator().manual_seed(seed))
        empty = torch.zeros(0, dtype=torch.long)
        parts = [*shuffled.split(seed * 4 + 1), empty]
        loss_sum, gradient, stats = trained(settings, rollouts, parts)
        assert loss_sum == pytest.approx(whole_loss, rel=1e-12)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-14)
        assert stats.figures() == pytest.approx(whole_stats.figures(), rel=1e-12)


def test_an_averaging_over_ranks_is_undone_by_their_number() -> None:
    settings, rollouts = LossSettings("grpo"), drawn(2)
    _, gradient, _ = trained(settings, rollouts)
    logps_N, tokens, totals = flat(rollouts)
    ranks = []
    for rank in range(2):
        mine = (tokens.rollout_N % 2 == rank).nonzero()[:, 0]
        share, _ = policy_loss(settings, logps_N[mine], cut(tokens, mine), totals)
        ranks.append(torch.autograd.grad(share * 2, logps_N)[0])
    torch.testing.assert_close((ranks[0] + ranks[1]) / 2, gradient)


def two_rollouts(settings: LossSettings, together: bool) -> float:
    """Lengths 2 and 6, advantages +1 and -1, ratio 1."""
    totals = step_totals([1.0, -1.0], [2, 6], [True, True])
    logps_N = torch.full((8,), -1.0)
    rollout_N = torch.tensor([0] * 2 + [1] * 6)
    parts = [slice(0, 8)] if together else [slice(0, 2), slice(2, 8)]
    tokens = [Tokens(logps_N[part], torch.ones(8)[part], rollout_N[part]) for part in parts]
    return sum(
        policy_loss(settings, logps_N[part], own, totals)[0].item()
        for part, own in zip(parts, tokens, strict=True)
    )


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("loss", "value"), [("grpo", 0.0), ("dapo", 0.5), ("dr_grpo", 0.25)])
def test_the_name_of_the_loss_is_its_normalisation(loss: str, value: float, together: bool) -> None:
    settings = LossSettings(loss, max_completion_tokens=8)
    assert two_rollouts(settings, together) == pytest.approx(value, abs=1e-15)


def test_cut_completions_that_are_left_out_are_in_no_denominator() -> None:
    totals = step_totals([1.0, 0.0, 0.0], [3, 4, 4], [True, False, False])
    assert (totals.num_tokens, totals.num_rollouts, totals.tokens_R.tolist()) == (3, 1, [3.0, 0.0, 0.0])
    logps_N = torch.full((11,), -1.0, requires_grad=True)
    tokens = Tokens(
        torch.full((11,), -1.0),
        torch.tensor([1.0] * 3 + [0.0] * 8),
        torch.tensor([0] * 3 + [1] * 4 + [2] * 4),
    )
    share, _ = policy_loss(LossSettings(), logps_N, tokens, totals)
    share.backward()
    assert share.item() == -1.0
    torch.testing.assert_close(logps_N.grad, torch.tensor([-1 / 3] * 3 + [0.0] * 8))


@pytest.mark.parametrize(("loss", "mode"), PAIRS)
def test_nothing_to_train_is_a_loss_of_zero_that_still_has_a_gradient(loss: str, mode: str) -> None:
    totals = replace(step_totals([0.0], [5], [False]), gap_sums_R=torch.zeros(1), ratio_sums_R=torch.zeros(1))
    logps_N = torch.full((5,), -1.0, requires_grad=True)
    nothing = torch.full((5,), NAN)
    tokens = Tokens(nothing, torch.zeros(5), torch.zeros(5, dtype=torch.long), nothing, nothing)
    share, stats = policy_loss(LossSettings(loss, correction=mode, beta=0.1), logps_N, tokens, totals)
    share.backward()
    assert (share.item(), logps_N.grad.tolist()) == (0.0, [0.0] * 5)  # type: ignore[union-attr]
    assert set(stats.figures().values()) == {None}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_first_pass_has_a_ratio_of_exactly_one(loss: str) -> None:
    logps_N, tokens, totals = flat(drawn(4))
    totals = with_sums(totals, logps_N.detach(), tokens, [torch.arange(len(logps_N))])
    first = replace(tokens, old_N=None)
    share, stats = policy_loss(LossSettings(loss), logps_N.float(), first, replace(totals, ratio_sums_R=None))
    assert (stats.ratio_min, stats.ratio_max, stats.clipped_low, stats.clipped_high) == (1.0, 1.0, 0.0, 0.0)
    assert torch.autograd.grad(share, logps_N)[0].isfinite().all()


@pytest.mark.parametrize(
    ("settings", "num_passes", "needed"),
    [
        (LossSettings(), 1, False),
        (LossSettings(), 2, True),
        (LossSettings("gspo"), 1, True),
        (LossSettings(correction="token_mask"), 1, False),
        *[(LossSettings(correction=mode), 1, True) for mode in ROLLOUT_CORRECTIONS],
    ],
)
def test_old_log_probs_are_computed_apart_only_where_they_must(
    settings: LossSettings, num_passes: int, needed: bool
) -> None:
    assert settings.needs_old_pass(num_passes) is needed


def test_a_masked_token_feels_no_kl_and_a_clipped_one_does() -> None:
    """Token 0 is masked by the correction (gap log 4), token 1 is clipped (ratio 2, A > 0), both with u = 1."""
    logps_N = torch.tensor([-2.0, -2.0], dtype=torch.float64, requires_grad=True)
    old_N = torch.tensor([-2.0, -2.0 - math.log(2)], dtype=torch.float64)
    tokens = Tokens(
        old_N - torch.tensor([math.log(4), 0.0]),
        torch.ones(2),
        torch.tensor([0, 0]),
        old_N,
        logps_N.detach() + 1,
    )
    settings = LossSettings(correction="token_mask", beta=0.5)
    share, stats = policy_loss(settings, logps_N, tokens, step_totals([1.0], [2], [True]))
    share.backward()
    assert share.item() == pytest.approx((-1.2 + 0.5 * (math.e - 2)) / 2)
    # d KL / d l = 1 - exp(u)
    assert logps_N.grad.tolist() == pytest.approx([0.0, 0.5 * (1 - math.e) / 2])  # type: ignore[union-attr]
    assert (stats.clipped_high, stats.rho_limited, stats.rho_min, stats.rho_max) == (1, 1, 0, 1)


def test_kl_is_zero_for_equal_policies_and_finite_for_any() -> None:
    near, far = torch.tensor([-1.0, -3.25]), torch.tensor([-500.0])
    assert kl_k3(near, near).tolist() == [0.0, 0.0]
    assert kl_k3(far, torch.tensor([-1.0])).item() == pytest.approx(math.exp(20) - 21)
    assert kl_k3(torch.tensor([-1.0]), far).item() == pytest.approx(math.exp(-20) + 19)
    # float32 keeps what exp(u) - 1 would lose: u^2 / 2.
    assert kl_k3(torch.tensor([0.0]), torch.tensor([1e-4])).item() == pytest.approx(5e-9, rel=1e-2)


def test_a_ratio_beyond_all_numbers_moves_no_rollout_without_advantage() -> None:
    logps_N = torch.tensor([-1.0, -1.0], requires_grad=True)
    old_N = torch.tensor([-900.0, -1.0])
    tokens = Tokens(old_N, torch.ones(2), torch.tensor([0, 0]), old_N)
    for advantage, gradient in ((0.0, [0.0, 0.0]), (1.0, [0.0, -0.5])):
        share, _ = policy_loss(LossSettings(), logps_N, tokens, step_totals([advantage], [2], [True]))
        assert torch.autograd.grad(share, logps_N)[0].tolist() == gradient


def test_delta_bounds_what_a_bad_token_can_do() -> None:
    """A < 0 and a ratio of 10: without delta the loss is 10, with it delta."""
    logps_N = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    tokens = Tokens(
        *[torch.tensor([v], dtype=torch.float64) for v in (-1 - math.log(10), 1.0)], torch.tensor([0])
    )
    tokens = replace(tokens, old_N=tokens.sampled_N)
    totals = step_totals([-1.0], [1], [True])
    losses = [policy_loss(LossSettings(delta=d), logps_N, tokens, totals)[0] for d in (None, 3.0)]
    assert [loss.item() for loss in losses] == pytest.approx([10.0, 3.0])
    gradients = [torch.autograd.grad(loss, logps_N)[0].item() for loss in losses]
    assert gradients == pytest.approx([10.0, 0.0])


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_figures_by_hand(kind: torch.dtype) -> None:
    """Two tokens: gaps 0.5 and -0.5, ratios 1.5 and 0.5, A = 1."""
    sampled_N = torch.tensor([-2.0, -1.0], dtype=torch.float64)
    old_N = torch.tensor([-1.5, -1.5], dtype=torch.float64)
    logps_N = old_N + torch.tensor([1.5, 0.5], dtype=torch.float64).log()
    tokens = Tokens(sampled_N, torch.ones(2, dtype=kind), torch.tensor([0, 0]), old_N, logps_N)
    _, stats = policy_loss(LossSettings(beta=0.1), logps_N, tokens, step_totals([1.0], [2], [True]))
    up, down = math.exp(0.5), math.exp(-0.5)
    assert stats.figures() == pytest.approx(
        {
            "clip_share_low": 0.0,  # the low one has A > 0: it keeps its gradient
            "clip_share_high": 0.5,
            "ratio_mean": 1.0,
            "ratio_min": 0.5,
            "ratio_max": 1.5,
            "correction_mean": (up + down) / 2,
            "correction_min": down,
            "correction_max": up,
            "correction_limited_share": 0.0,
            "logp_gap_mean": 0.5,
            "logp_gap_k3": (up + down - 2) / 2,
            "prob_gap_mean": (abs(math.exp(-1.5) - math.exp(-2)) + abs(math.exp(-1.5) - math.exp(-1))) / 2,
            "kl": 0.0,
        }
    )


def test_a_capped_ratio_of_cispo_counts_with_either_sign() -> None:
    old_N = torch.tensor([-2.0, -2.0, -2.0])
    logps_N = old_N + torch.tensor([1.4, 1.2, 1.4]).log()
    tokens = Tokens(old_N, torch.ones(3), torch.tensor([0, 0, 1]), old_N)
    totals = step_totals([-1.0, 1.0], [2, 1], [True, True])
    share, stats = policy_loss(LossSettings("cispo", clip_cispo=0.3), logps_N, tokens, totals)
    assert (stats.clipped_low, stats.clipped_high) == (0, 2)
    assert share.dtype == torch.float64


def test_figures_of_parts_are_joined_by_their_kind() -> None:
    first = LossStats(num_tokens=1, kl=0.5, ratio_min=0.9, ratio_max=1.1, rho_min=0.2, rho_max=2.0)
    second = LossStats(num_tokens=3, kl=1.5, ratio_min=0.8, ratio_max=1.0, rho_min=0.3, rho_max=1.5)
    figures = (LossStats() + first + second).figures()
    names = ("kl", "ratio_min", "ratio_max", "correction_min", "correction_max")
    assert [figures[name] for name in names] == [0.5, 0.8, 1.1, 0.2, 2.0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"loss": "ppo"}, "loss 'ppo' is none of dapo"),
        ({"correction": "none"}, "correction 'none' is none of token_truncate"),
        ({"loss": "gspo", "correction": "token_mask"}, "gspo goes with geometric_mask"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LossSettings(**values)  # type: ignore[arg-type]


def test_what_a_loss_needs_must_be_there() -> None:
    logps_N, tokens, totals = flat(drawn(0))
    with pytest.raises(AssertionError, match="beta > 0 needs"):
        policy_loss(LossSettings(beta=0.1), logps_N, replace(tokens, ref_N=None), totals)
    with pytest.raises(AssertionError, match="sequence_mask needs the sums"):
        policy_loss(LossSettings(correction="sequence_mask"), logps_N, tokens, totals)


def test_weighted_nll_by_hand() -> None:
    assert float(weighted_nll(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5]))) == 2.0
