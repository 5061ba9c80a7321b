"""Owns the hand-computed values of the losses, the vocabulary subset and the head's fixed factors.

Refuses to know what every loss shares: that is tests/contracts/test_loss_contract.py.
The faults others shipped in losses are in tests/faults/test_loss_faults.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distill.errors import ConfigError, RegistryError, TrainingError
from distill.losses import (
    LOSSES,
    DraftColumns,
    FullKnowledge,
    Head,
    LogitLoss,
    chunked_loss,
    select_by_gap,
)
from distill.losses.chunked import default_chunk_tokens
from distill.losses.head import head_of
from tests.helpers import make_llama

P = [0.6, 0.3, 0.1]
Q = [0.2, 0.3, 0.5]
ALPHA = 0.2 + 0.3 + 0.1
FORWARD = 0.6 * math.log(3) + 0.1 * math.log(0.2)
REVERSE = 0.2 * math.log(1 / 3) + 0.5 * math.log(5)
# half of KL(p, m) and KL(q, m) with m = .4 .3 .3
JSD = 0.5 * (0.6 * math.log(1.5) + 0.1 * math.log(1 / 3)) + 0.5 * (
    0.2 * math.log(0.5) + 0.5 * math.log(5 / 3)
)


def _loss(name: str, temperature: float = 1.0) -> LogitLoss:
    loss = LOSSES.get(name)(temperature=temperature)
    assert isinstance(loss, LogitLoss)
    return loss


def _logits(probs: list[float], shift: float = 3.0) -> Tensor:
    return torch.tensor([probs]).log() + shift


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward_kl", FORWARD),
        ("reverse_kl", REVERSE),
        ("total_variation", 1 - ALPHA),
        ("acceptance", -math.log(ALPHA)),
        ("cross_entropy", -math.log(0.2)),
        ("jsd", JSD),
        (
            "acceptance_hybrid",
            math.exp(-3 * ALPHA) * FORWARD + (1 - math.exp(-3 * ALPHA)) * (1 - ALPHA),
        ),
    ],
)
def test_value_on_a_three_token_vocabulary(name: str, expected: float) -> None:
    (value,) = _loss(name).per_position(_logits(Q), _logits(P, shift=-2.0)).tolist()
    assert value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "name",
    ["forward_kl", "reverse_kl", "jsd", "total_variation", "acceptance", "acceptance_hybrid"],
)
def test_a_draft_equal_to_its_target_has_loss_zero(name: str) -> None:
    value_N = _loss(name).per_position(_logits(P), _logits(P, shift=0.0))
    assert value_N.abs().max() < 1e-6


def test_hidden_regression_is_quadratic_near_and_linear_far() -> None:
    loss = LOSSES.get("hidden_regression")()
    value_N = loss.per_position(torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2))
    assert value_N.tolist() == pytest.approx([(0.5 * 0.25 + 2.5) / 2])


def test_forward_kl_gradient_is_draft_minus_target_probability() -> None:
    _, grad_NV = _loss("forward_kl").value_and_grad(_logits(Q), _logits(P))
    assert grad_NV[0].tolist() == pytest.approx([-0.4, 0.0, 0.4], abs=1e-6)


def test_acceptance_gradient_is_total_variations_over_alpha() -> None:
    _, variation_NV = _loss("total_variation").value_and_grad(_logits(Q), _logits(P))
    _, acceptance_NV = _loss("acceptance").value_and_grad(_logits(Q), _logits(P))
    torch.testing.assert_close(acceptance_NV, variation_NV / ALPHA)


def test_acceptance_hybrids_gradient_is_that_of_its_terms_at_the_weight_it_has() -> None:
    """w is a constant of the position: the numerical check is made with w frozen."""
    draft_NV = torch.tensor([[0.3, -1.2, 0.8, 0.1]], dtype=torch.float64).requires_grad_()
    target_NV = torch.tensor([[1.0, 0.2, -0.4, 0.6]], dtype=torch.float64)
    alpha_N = 1 - _loss("total_variation").per_position(draft_NV.detach(), target_NV)
    weight_N = torch.exp(-3.0 * alpha_N)

    def frozen(z_NV: Tensor) -> Tensor:
        far = _loss("forward_kl").per_position(z_NV, target_NV)
        near = _loss("total_variation").per_position(z_NV, target_NV)
        return weight_N * far + (1 - weight_N) * near

    assert torch.autograd.gradcheck(frozen, draft_NV)
    (expected_NV,) = torch.autograd.grad(frozen(draft_NV).sum(), draft_NV)
    loss_N, grad_NV = _loss("acceptance_hybrid").value_and_grad(draft_NV.detach(), target_NV)
    torch.testing.assert_close(grad_NV, expected_NV)
    torch.testing.assert_close(loss_N, frozen(draft_NV).detach())


def test_acceptance_of_disjoint_models_is_finite_and_still_pulls() -> None:
    draft = torch.tensor([[30.0, 0.0]])
    target = torch.tensor([[0.0, 30.0]])
    loss_N, grad_NV = _loss("acceptance").value_and_grad(draft, target)
    assert torch.isfinite(loss_N).all()
    assert grad_NV[0, 1] < 0


def test_temperature_softens_both_models() -> None:
    """At temperature 2 the odds 9:1 are 3:1 and 1:1 stays: KL = .75 log 1.5 + .25 log .5."""
    draft, target = _logits([0.5, 0.5]), _logits([0.9, 0.1])
    (value,) = _loss("forward_kl", 2.0).per_position(draft, target).tolist()
    assert value == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        _loss("forward_kl", temperature)


def test_a_misspelt_loss_names_the_nearest() -> None:
    with pytest.raises(RegistryError, match="forward_kl"):
        LOSSES.get("forward_kll")


@pytest.mark.parametrize("temperature", [1.0, 0.05])
@pytest.mark.parametrize("name", [n for n in LOSSES.names() if LOSSES.get(n).space == "logits"])
def test_a_constant_added_to_all_logits_changes_no_loss(name: str, temperature: float) -> None:
    """Whatever the temperature makes of it; a masked token stays masked."""
    generator = torch.Generator().manual_seed(0)
    draft_NV = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    target_NV = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    target_NV[:, 3] = -torch.inf
    loss = _loss(name, temperature)
    for shift in (-30_000.0, 30_000.0):
        for shifted, expected in zip(
            loss.value_and_grad(draft_NV + shift, target_NV + shift),
            loss.value_and_grad(draft_NV, target_NV),
            strict=True,
        ):
            torch.testing.assert_close(shifted, expected, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(
            loss.per_position(draft_NV + shift, target_NV + shift),
            loss.per_position(draft_NV, target_NV),
            rtol=1e-6,
            atol=1e-8,
        )


@pytest.mark.parametrize("name", ["total_variation", "acceptance", "acceptance_hybrid"])
def test_a_constant_added_to_all_logits_changes_no_mass_of_a_subset(name: str) -> None:
    draft_NV, target_NV = torch.zeros(2, 3, dtype=torch.float64), torch.eye(2, 3).double()
    logsumexp_N = target_NV.logsumexp(-1) + 0.5
    torch.testing.assert_close(
        _loss(name).per_position(draft_NV, target_NV - 30_000.0, logsumexp_N - 30_000.0),
        _loss(name).per_position(draft_NV, target_NV, logsumexp_N),
    )


# ---------------------------------------------------------------- vocabulary subset
# target .5 .3 .2, subset {0, 1}: renormalised .625 .375, true mass .8; draft .5 .5


def _on_subset(name: str) -> float:
    whole = _logits([0.5, 0.3, 0.2])
    loss_N = _loss(name).per_position(
        _logits([0.5, 0.5]), whole[:, :2], torch.logsumexp(whole, dim=-1)
    )
    return float(loss_N[0])


def test_on_a_subset_forward_kl_compares_with_the_renormalised_target() -> None:
    expected = 0.625 * math.log(0.625 / 0.5) + 0.375 * math.log(0.375 / 0.5)
    assert _on_subset("forward_kl") == pytest.approx(expected, abs=1e-6)


def test_on_a_subset_the_mass_outside_it_is_rejected() -> None:
    assert _on_subset("total_variation") == pytest.approx(1 - 0.8, abs=1e-6)
    assert _on_subset("acceptance") == pytest.approx(-math.log(0.8), abs=1e-6)


def test_a_log_sum_exp_rounded_too_low_never_makes_probabilities_above_one() -> None:
    whole = _logits([0.7, 0.3])
    loss_N = _loss("total_variation").per_position(
        whole, whole, torch.logsumexp(whole, dim=-1) - 0.1
    )
    assert loss_N.tolist() == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize("name", ["acceptance", "total_variation", "acceptance_hybrid"])
def test_the_true_mass_is_known_at_temperature_one_only(name: str) -> None:
    whole = _logits([0.5, 0.3, 0.2])
    with pytest.raises(ConfigError, match="vocabulary_size"):
        _loss(name, 2.0).per_position(whole[:, :2], whole[:, :2], torch.logsumexp(whole, -1))


def test_the_driver_on_a_subset_equals_the_dense_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    draft_ND = torch.randn(9, 4, generator=generator).requires_grad_()
    target_ND = torch.randn(9, 6, generator=generator)
    draft_VD = torch.randn(20, 4, generator=generator)
    target_VD = torch.randn(20, 6, generator=generator)
    ids_V = torch.tensor([1, 4, 5, 17])
    logits_NV = target_ND @ target_VD.T
    result = chunked_loss(
        _loss("total_variation"),
        draft_ND,
        FullKnowledge(target_ND, torch.logsumexp(logits_NV, -1)),
        draft_head=Head(draft_VD).subset(ids_V),
        columns=DraftColumns(Head(target_VD).subset(ids_V), ids_V),
        normalizer=9,
        chunk_tokens=4,
    )
    target_NV = torch.softmax(logits_NV, -1)
    draft_NV = torch.zeros(9, 20)
    draft_NV[:, ids_V] = torch.softmax(draft_ND.detach() @ draft_VD[ids_V].T, -1)
    dense = 0.5 * (target_NV - draft_NV).abs().sum(-1)
    torch.testing.assert_close(result.loss_N, dense)
    torch.testing.assert_close(result.value.detach(), dense.mean())


# ---------------------------------------------------------------- heads


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"scale": 0.25},
        {"softcap": 2.0},
        {"scale": 3.0, "softcap": 1.5},
        {"has_bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("use_subset", [False, True])
def test_a_trained_head_gets_the_gradient_autograd_would_give(
    head: dict[str, float], use_subset: bool
) -> None:
    head = dict(head)
    has_bias = bool(head.pop("has_bias", False))
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    hidden_ND, weight_VD = leaf(11, 6), leaf(15, 6)
    bias_V = leaf(15) if has_bias else None
    target = torch.randn(11, 6, generator=generator), torch.randn(15, 6, generator=generator)
    ids_V = torch.tensor([0, 3, 4, 9, 14]) if use_subset else None
    draft_head = Head(weight_VD, bias_V, **head).subset(ids_V)
    target_head = Head(target[1]).subset(ids_V)
    logsumexp_N = torch.logsumexp(target[0] @ target[1].T, -1)
    weight_N = torch.linspace(0.0, 1.0, 11)
    loss = _loss("forward_kl")
    leaves = [hidden_ND, weight_VD] + ([bias_V] if bias_V is not None else [])
    value = chunked_loss(
        loss,
        hidden_ND,
        FullKnowledge(target[0], logsumexp_N),
        draft_head=draft_head,
        columns=DraftColumns(target_head, ids_V),
        normalizer=7.0,
        weight_N=weight_N,
        chunk_tokens=4,
    ).value
    dense_N = loss.per_position(draft_head.logits(hidden_ND), target_head.logits(target[0]))
    expected = torch.autograd.grad((dense_N * weight_N).sum() / 7.0, leaves, retain_graph=True)
    for actual_grad, expected_grad in zip(
        torch.autograd.grad(value, leaves, retain_graph=True), expected, strict=True
    ):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-4, atol=1e-6)


def test_without_gradients_only_the_values_are_computed() -> None:
    hidden_ND = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    head = Head(torch.randn(7, 4, generator=torch.Generator().manual_seed(1)))
    result = chunked_loss(
        _loss("acceptance"),
        hidden_ND,
        FullKnowledge(hidden_ND),
        draft_head=head,
        columns=DraftColumns(head),
        normalizer=5,
    )
    assert not result.value.requires_grad
    assert result.loss_N.abs().max() < 1e-6


def test_no_positions_is_a_loss_of_zero() -> None:
    head = Head(torch.ones(7, 4))
    hidden_ND = torch.zeros(0, 4, requires_grad=True)
    result = chunked_loss(
        _loss("forward_kl"),
        hidden_ND,
        FullKnowledge(hidden_ND),
        draft_head=head,
        columns=DraftColumns(head),
        normalizer=1,
    )
    assert result.value.item() == 0.0
    assert result.loss_N.shape == (0,)


def test_a_chunk_is_sized_by_the_vocabulary() -> None:
    assert default_chunk_tokens(8192) == 128
    assert default_chunk_tokens(50) == 1024
    assert default_chunk_tokens(10**9) == 16


def test_the_head_of_a_model_gives_its_logits() -> None:
    model = make_llama(50, hidden=16, heads=2, kv_heads=1)
    tokens_BT = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        hidden_BTD = model.model(input_ids=tokens_BT).last_hidden_state
        expected = model(input_ids=tokens_BT).logits
    torch.testing.assert_close(head_of(model).logits(hidden_BTD), expected)


def test_a_models_logit_scale_and_soft_cap_are_read() -> None:
    model = make_llama(50, hidden=16, heads=2, kv_heads=1)
    model.config.logits_scaling = 4.0
    model.config.final_logit_softcapping = 30.0
    head = head_of(model)
    assert head.scale == 0.25
    assert head.softcap == 30.0


# ---------------------------------------------------------------- token selection


def _kept(draft: list[float], reference: list[float], fraction: float) -> list[int]:
    keep_N = select_by_gap(torch.tensor(draft), torch.tensor(reference), keep_fraction=fraction)
    return keep_N.nonzero().flatten().tolist()


def test_the_tokens_kept_are_those_the_reference_does_better_on() -> None:
    """Gaps 0.1 3.0 -1.0 0.0 2.0: a token that is hard for both is not kept."""
    draft, reference = [9.1, 4.0, 1.0, 7.0, 2.5], [9.0, 1.0, 2.0, 7.0, 0.5]
    assert _kept(draft, reference, 0.4) == [1, 4]
    assert _kept(draft, reference, 0.41) == [0, 1, 4]
    assert _kept(draft, reference, 0.01) == [1]
    assert _kept(draft, reference, 1.0) == [0, 1, 2, 3, 4]


def test_a_fraction_of_a_round_number_is_not_rounded_up() -> None:
    assert len(_kept([0.0] * 30, [0.0] * 30, 0.1)) == 3


def test_of_equal_gaps_the_earlier_position_is_kept() -> None:
    assert _kept([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5], 0.5) == [0, 1]


def test_a_loss_that_is_not_a_number_is_kept_and_so_reported() -> None:
    assert _kept([0.0, math.nan, 5.0], [0.0, 0.0, 0.0], 0.3) == [1]
    # of both drafts: a row that no draft can read, which the loop names
    assert _kept([0.0, math.nan, 5.0], [0.0, math.nan, 0.0], 0.3) == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reference_whose_loss_is_not_a_number_chooses_nothing(bad: float) -> None:
    with pytest.raises(TrainingError, match=r"reference draft.* at 2 of 3 .*distill.reference"):
        _kept([1.0, 2.0, 5.0], [bad, 1.0, bad], 0.3)
