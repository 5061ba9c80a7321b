"""Owns what every registered loss must satisfy; a new loss is tested here without being named.

Refuses to know any loss by name. Fault classes covered: micro-batch means, padding that trains,
-inf tails, bfloat16 against float32, NaN gradients behind finite losses, logits held for all
positions at once.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.losses import LOSSES, Head, HiddenLoss, LogitLoss, chunked_loss

LOGIT_LOSSES = [name for name in LOSSES.names() if LOSSES.get(name).space == "logits"]
HIDDEN_LOSSES = [name for name in LOSSES.names() if LOSSES.get(name).space == "hidden"]
N, V, D = 23, 37, 8


def _randn(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _logit_loss(name: str, temperature: float = 1.0) -> LogitLoss:
    loss = LOSSES.get(name)(temperature=temperature)
    assert isinstance(loss, LogitLoss)
    return loss


def _run(name: str, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (value, grad of the draft's states, loss_N) of the chunked driver on fixed inputs."""
    draft_ND = _randn(N, D, seed=1).requires_grad_()
    rows = slice(None) if "rows" not in options else options.pop("rows")
    inputs = {
        "target_hidden_ND": _randn(N, D, seed=2)[rows],
        "draft_head": Head(_randn(V, D, seed=3, scale=0.5)),
        "target_head": Head(_randn(V, D, seed=4, scale=0.5)),
        "normalizer": float(N),
    } | options
    result = chunked_loss(LOSSES.get(name)(), draft_ND[rows], **inputs)
    result.value.backward()
    assert draft_ND.grad is not None
    return result.value.detach(), draft_ND.grad, result.loss_N


def test_all_losses_are_found_by_name() -> None:
    assert {"forward_kl", "total_variation", "acceptance", "hidden_regression"} <= set(
        LOSSES.names()
    )
    assert set(LOGIT_LOSSES) | set(HIDDEN_LOSSES) == set(LOSSES.names())


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_loss_is_one_float32_number_per_position_for_any_leading_dimensions(name: str) -> None:
    draft = _randn(2, 5, V, seed=1).to(torch.bfloat16)
    target = _randn(2, 5, V, seed=2).to(torch.bfloat16)
    loss = LOSSES.get(name)()
    loss_BT = loss.per_position(draft, target)
    assert loss_BT.shape == (2, 5)
    assert loss_BT.dtype == torch.float32
    torch.testing.assert_close(loss_BT[1, 3], loss.per_position(draft[1, 3], target[1, 3]))


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_loss_is_not_negative_even_where_the_two_agree_to_bfloat16(name: str) -> None:
    target = _randn(50, V, seed=1, scale=8.0)
    loss_N = LOSSES.get(name)().per_position(target.to(torch.bfloat16), target)
    assert loss_N.min() >= -1e-6


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_small_step_against_the_gradient_lowers_the_loss(name: str) -> None:
    draft = _randn(N, V, seed=1).requires_grad_()
    target = _randn(N, V, seed=2)
    loss = LOSSES.get(name)()
    before_N = loss.per_position(draft, target)
    before_N.sum().backward()
    assert draft.grad is not None
    after_N = loss.per_position((draft - 1e-2 * draft.grad).detach(), target)
    assert after_N.sum() < before_N.sum()


# On a subset (with a log-sum-exp) the losses that need the whole mass know it at temperature 1.
TEMPERATURE_CASES = [
    (name, with_logsumexp, temperature)
    for name in LOGIT_LOSSES
    for with_logsumexp in (False, True)
    for temperature in (0.05, 1.0, 2.5)
    if temperature == 1.0 or not (with_logsumexp and LOSSES.get(name).needs_whole_mass)
]


@pytest.mark.parametrize(("name", "with_logsumexp", "temperature"), TEMPERATURE_CASES)
def test_the_closed_form_gradient_is_the_derivative(
    name: str, with_logsumexp: bool, temperature: float
) -> None:
    draft_NV, target_NV = _randn(N, V, seed=1), _randn(N, V, seed=2)
    logsumexp_N = torch.logsumexp(target_NV, -1) + 0.3 if with_logsumexp else None
    loss = _logit_loss(name, temperature)
    value_N, grad_NV = loss.value_and_grad(draft_NV, target_NV, logsumexp_N)
    reference_N, reference_NV = LogitLoss.value_and_grad(loss, draft_NV, target_NV, logsumexp_N)
    torch.testing.assert_close(value_N, reference_N, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_NV, reference_NV, rtol=1e-3, atol=5e-5 / temperature)
    assert torch.isfinite(grad_NV).all()


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_the_closed_form_leaves_its_inputs_alone(name: str) -> None:
    draft_NV, target_NV = _randn(N, V, seed=1), _randn(N, V, seed=2)
    copies = draft_NV.clone(), target_NV.clone()
    _logit_loss(name).value_and_grad(draft_NV, target_NV)
    assert torch.equal(draft_NV, copies[0])
    assert torch.equal(target_NV, copies[1])


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_adding_a_constant_to_either_models_logits_changes_nothing(name: str) -> None:
    draft_NV, target_NV = _randn(N, V, seed=1), _randn(N, V, seed=2)
    loss = _logit_loss(name)
    torch.testing.assert_close(
        loss.per_position(draft_NV + 7.0, target_NV - 11.0),
        loss.per_position(draft_NV, target_NV),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_masked_vocabulary_rows_give_finite_losses_and_gradients(name: str) -> None:
    draft_NV, target_NV = _randn(N, V, seed=1), _randn(N, V, seed=2)
    draft_NV[:, -5:] = -torch.inf
    target_NV[:, -3:] = -torch.inf
    loss = _logit_loss(name)
    for value_and_grad in (loss.value_and_grad, functools.partial(LogitLoss.value_and_grad, loss)):
        loss_N, grad_NV = value_and_grad(draft_NV, target_NV)
        assert torch.isfinite(loss_N).all()
        assert torch.isfinite(grad_NV).all()


@pytest.mark.parametrize("name", LOSSES.names())
@pytest.mark.parametrize("chunk_tokens", [1, 7, N, 1000])
def test_chunks_of_any_size_give_the_same_value_and_gradient(name: str, chunk_tokens: int) -> None:
    value, grad_ND, loss_N = _run(name, chunk_tokens=chunk_tokens)
    whole, whole_ND, whole_N = _run(name, chunk_tokens=10_000)
    torch.testing.assert_close(value, whole)
    torch.testing.assert_close(grad_ND, whole_ND, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss_N, whole_N)


@pytest.mark.parametrize("name", LOSSES.names())
def test_unequal_micro_batches_add_up_to_the_whole(name: str) -> None:
    whole, whole_ND, _ = _run(name)
    first, first_ND, _ = _run(name, rows=slice(0, 4))
    rest, rest_ND, _ = _run(name, rows=slice(4, None))
    torch.testing.assert_close(first + rest, whole)
    torch.testing.assert_close(first_ND + rest_ND, whole_ND, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES.names())
def test_the_driver_agrees_with_autograd_over_all_positions_at_once(name: str) -> None:
    value, grad_ND, _ = _run(name, chunk_tokens=5)
    draft_ND = _randn(N, D, seed=1).requires_grad_()
    target_ND = _randn(N, D, seed=2)
    loss = LOSSES.get(name)()
    if isinstance(loss, HiddenLoss):
        reference = loss.per_position(draft_ND, target_ND).mean()
    else:
        reference = loss.per_position(
            draft_ND @ _randn(V, D, seed=3, scale=0.5).T,
            target_ND @ _randn(V, D, seed=4, scale=0.5).T,
        ).mean()
    reference.backward()
    assert draft_ND.grad is not None
    torch.testing.assert_close(value, reference.detach())
    torch.testing.assert_close(grad_ND, draft_ND.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES.names())
def test_positions_of_weight_zero_do_not_train_whatever_they_hold(name: str) -> None:
    weight_N = torch.ones(N)
    weight_N[[0, 9, 22]] = 0.0
    target_ND = _randn(N, D, seed=2)
    value, grad_ND, _ = _run(name, weight_N=weight_N, target_hidden_ND=target_ND)
    poisoned_ND = target_ND.clone()
    poisoned_ND[weight_N == 0] = torch.nan
    same, same_ND, _ = _run(name, weight_N=weight_N, target_hidden_ND=poisoned_ND)
    assert torch.equal(value, same)
    assert torch.equal(grad_ND[weight_N != 0], same_ND[weight_N != 0])
    assert not grad_ND[weight_N == 0].any()
