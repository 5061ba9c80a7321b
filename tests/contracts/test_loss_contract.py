"""Owns what every registered loss must satisfy; a new loss is tested here without being named.

Refuses to know any loss by name. Fault classes covered: micro-batch means, padding that trains,
-inf tails, bfloat16 against float32, NaN gradients behind finite losses, logits held for all
positions at once.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, get_args

import pytest
import torch
import torch.utils._pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distill.losses import (
    LOSSES,
    DraftColumns,
    FullKnowledge,
    Head,
    HiddenLoss,
    Knowledge,
    LogitLoss,
    SampledKnowledge,
    TargetKnowledge,
    TopKnowledge,
    chunked_loss,
)

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
        "target": FullKnowledge(_randn(N, D, seed=2)[rows]),
        "draft_head": Head(_randn(V, D, seed=3, scale=0.5)),
        "columns": DraftColumns(Head(_randn(V, D, seed=4, scale=0.5))),
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
    value, grad_ND, _ = _run(name, weight_N=weight_N, target=FullKnowledge(target_ND))
    poisoned_ND = target_ND.clone()
    poisoned_ND[weight_N == 0] = torch.nan
    same, same_ND, _ = _run(name, weight_N=weight_N, target=FullKnowledge(poisoned_ND))
    assert torch.equal(value, same)
    assert torch.equal(grad_ND[weight_N != 0], same_ND[weight_N != 0])
    assert not grad_ND[weight_N == 0].any()


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_draft_that_equals_a_target_certain_of_its_token_has_loss_zero(name: str) -> None:
    certain_NV = torch.zeros(3, V)
    certain_NV[[0, 1, 2], [4, 0, 36]] = 40.0
    assert LOSSES.get(name)().per_position(certain_NV, certain_NV).abs().max() < 1e-6


# A loss that holds a weight constant has a unit test of its own, which freezes that weight.
EXACT = [name for name in LOSSES.names() if getattr(LOSSES.get(name), "is_exact_derivative", True)]


@pytest.mark.parametrize("name", EXACT)
def test_float64_stays_float64_and_passes_the_numerical_gradient_check(name: str) -> None:
    loss = LOSSES.get(name)()
    draft_NV = _randn(3, 7, seed=1).double().requires_grad_()
    target_NV = _randn(3, 7, seed=2).double()
    assert loss.per_position(draft_NV, target_NV).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda z_NV: loss.per_position(z_NV, target_NV), draft_NV)


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_bfloat16_logits_give_the_loss_of_the_same_numbers_in_float32(name: str) -> None:
    """What is lost is lost in the logits: no step of the loss itself runs in bfloat16."""
    draft_NV, target_NV = _randn(N, V, seed=1).bfloat16(), _randn(N, V, seed=2).bfloat16()
    loss = _logit_loss(name)
    low_N, low_NV = loss.value_and_grad(draft_NV, target_NV)
    high_N, high_NV = loss.value_and_grad(draft_NV.float(), target_NV.float())
    assert low_N.dtype == low_NV.dtype == torch.float32
    torch.testing.assert_close(low_N, high_N)
    torch.testing.assert_close(low_NV, high_NV)


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_bfloat16_head_gives_nearly_the_loss_of_a_float32_one(name: str) -> None:
    """The draft's head: with the target's, a rounded tie would change which token is the label."""
    value, grad_ND, _ = _run(name)
    low, low_ND, _ = _run(name, draft_head=Head(_randn(V, D, seed=3, scale=0.5).bfloat16()))
    torch.testing.assert_close(low, value, rtol=0.02, atol=1e-3)
    assert (low_ND - grad_ND).norm() < 0.05 * grad_ND.norm()


@pytest.mark.parametrize("name", LOSSES.names())
@pytest.mark.parametrize("cuts", [[1, 2, 20], [11], [5, 5, 6, 22]], ids=str)
def test_any_split_over_steps_and_ranks_adds_up_to_the_whole(name: str, cuts: list[int]) -> None:
    """Ranks are parts too: each divides by the token count of all of them."""
    whole, whole_ND, _ = _run(name)
    ends = [0, *cuts, N]
    parts = [_run(name, rows=slice(a, b)) for a, b in itertools.pairwise(ends) if a < b]
    torch.testing.assert_close(torch.stack([part[0] for part in parts]).sum(), whole)
    total_ND = torch.stack([part[1] for part in parts]).sum(0)
    torch.testing.assert_close(total_ND, whole_ND, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOGIT_LOSSES)
@pytest.mark.parametrize(("draft_rows", "target_rows"), [(V + 3, V), (V, V + 11), (V + 3, V + 11)])
def test_padded_rows_of_either_head_change_nothing(
    name: str, draft_rows: int, target_rows: int
) -> None:
    def padded(rows: int, seed: int) -> Head:
        weight_VD = _randn(rows, D, seed=9, scale=50.0)
        weight_VD[:V] = _randn(V, D, seed=seed, scale=0.5)
        return Head(weight_VD).first(V)

    value, grad_ND, _ = _run(name)
    same, same_ND, _ = _run(
        name,
        draft_head=padded(draft_rows, 3),
        columns=DraftColumns(padded(target_rows, 4)),
    )
    assert torch.equal(value, same)
    assert torch.equal(grad_ND, same_ND)


# ---------------------------------------------------------------- memory


class _Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in torch.utils._pytree.tree_leaves(result):
            if isinstance(item, Tensor):
                self.num_elements = max(self.num_elements, item.numel())
        return result


def _known(kind: Knowledge, num_positions: int, num_rows: int) -> TargetKnowledge:
    if kind == "full":
        return FullKnowledge(_randn(num_positions, D, seed=2))
    ids_N7 = torch.arange(7).expand(num_positions, -1) + torch.arange(num_positions)[:, None] % 400
    assert int(ids_N7.max()) < num_rows
    shares_N7, some_N = torch.full((num_positions, 7), 0.1), torch.full((num_positions,), 0.3)
    if kind == "top_k":
        return TopKnowledge(ids_N7, shares_N7.log(), some_N)
    return SampledKnowledge(ids_N7, shares_N7 / 0.7, some_N)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in LOSSES.names()
        for kind in get_args(Knowledge)
        if LOSSES.get(name)().why_not(kind) is None
    ],
)
@pytest.mark.parametrize("is_head_trained", [False, True])
def test_no_tensor_grows_with_positions_times_vocabulary(
    name: str, kind: Knowledge, is_head_trained: bool
) -> None:
    num_rows, chunk = 500, 8
    draft_VD = _randn(num_rows, D, seed=3).requires_grad_(is_head_trained)
    draft_head, columns = Head(draft_VD), DraftColumns(Head(_randn(num_rows, D, seed=4)))

    def largest(num_positions: int) -> int:
        draft_ND = _randn(num_positions, D, seed=1).requires_grad_()
        with _Largest() as seen:
            chunked_loss(
                LOSSES.get(name)(),
                draft_ND,
                _known(kind, num_positions, num_rows),
                draft_head=draft_head,
                columns=columns,
                normalizer=num_positions,
                chunk_tokens=chunk,
            ).value.backward()
        return seen.num_elements

    assert largest(64) <= max(chunk * num_rows, num_rows * D)
    assert largest(480) <= max(chunk * num_rows, num_rows * D)  # [N, V] would be 240,000
