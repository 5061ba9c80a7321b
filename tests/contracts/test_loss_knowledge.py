"""Owns what every registered loss does with each kind of knowledge of the target: works or refuses.

Refuses to know any loss by name, and the files the knowledge comes from.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.losses import (
    LOSSES,
    DraftColumns,
    FullKnowledge,
    Head,
    Knowledge,
    LogitLoss,
    SampledKnowledge,
    TargetKnowledge,
    TopKnowledge,
    chunked_loss,
)

N, V, D = 19, 23, 6
KINDS: tuple[Knowledge, ...] = ("full", "top_k", "sampled")
CASES = list(itertools.product(LOSSES.names(), KINDS))
WORKING = [
    (name, kind)
    for name, kind in CASES
    if LOSSES.get(name).space == "logits" and LOSSES.get(name)().why_not(kind) is None
]
TOP_K = [name for name, kind in WORKING if kind == "top_k"]
SAMPLED = [name for name, kind in WORKING if kind == "sampled"]


def _randn(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


TARGET_ND, TARGET_VD, DRAFT_VD = _randn(N, D, seed=2), _randn(V, D, seed=4), _randn(V, D, seed=3)
LAW_NV = (TARGET_ND @ TARGET_VD.T).log_softmax(-1)


def _top(k: int, law_NV: Tensor = LAW_NV) -> TopKnowledge:
    log_probs_NK, ids_NK = law_NV.topk(k, dim=-1)
    others_NV = law_NV.scatter(-1, ids_NK, -torch.inf)
    return TopKnowledge(ids_NK, log_probs_NK, others_NV.exp().sum(-1))


def _whole_sample(law_NV: Tensor = LAW_NV) -> SampledKnowledge:
    """Every token "drawn" exactly as often as it is likely: the expectation of all samples."""
    probs_NV = law_NV.exp()
    ids_NV = torch.arange(law_NV.shape[-1]).expand(len(law_NV), -1)
    return SampledKnowledge(ids_NV, probs_NV, torch.special.entr(probs_NV).sum(-1))


def _knowledge(kind: Knowledge, logsumexp_N: Tensor | None = None) -> TargetKnowledge:
    if kind == "full":
        return FullKnowledge(TARGET_ND, logsumexp_N)
    return _top(5) if kind == "top_k" else _whole_sample()


def _run(name: str, target: TargetKnowledge, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    draft_ND = _randn(N, D, seed=1).requires_grad_()
    settings = {
        "draft_head": Head(DRAFT_VD),
        "columns": DraftColumns(Head(TARGET_VD)),
        "normalizer": N,
    } | options
    result = chunked_loss(LOSSES.get(name)(), draft_ND, target, **settings)
    result.value.backward()
    assert draft_ND.grad is not None
    return result.value.detach(), draft_ND.grad, result.loss_N


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_loss_takes_what_is_known_or_says_why_it_does_not(name: str, kind: Knowledge) -> None:
    reason = LOSSES.get(name)().why_not(kind)
    if kind == "full":
        assert reason is None
    assert reason is None or len(reason.split()) > 4
    if reason is None:
        value, grad_ND, loss_N = _run(
            name,
            FullKnowledge(TARGET_ND) if LOSSES.get(name).space == "hidden" else _knowledge(kind),
        )
        assert torch.isfinite(value)
        assert torch.isfinite(grad_ND).all()
        assert loss_N.shape == (N,)


@pytest.mark.parametrize(
    "name", [name for name in LOSSES.names() if LOSSES.get(name).space == "logits"]
)
@pytest.mark.parametrize("kind", ["top_k", "sampled"])
def test_at_another_temperature_only_full_knowledge_will_do(name: str, kind: Knowledge) -> None:
    loss = LOSSES.get(name)(temperature=0.7)
    assert loss.why_not("full") is None
    assert "0.7" in str(loss.why_not(kind))


@pytest.mark.parametrize(("name", "kind"), WORKING)
@pytest.mark.parametrize("chunk_tokens", [1, 7, N])
def test_chunks_of_any_size_give_the_same(name: str, kind: Knowledge, chunk_tokens: int) -> None:
    parts = _run(name, _knowledge(kind), chunk_tokens=chunk_tokens)
    for part, whole in zip(parts, _run(name, _knowledge(kind), chunk_tokens=1000), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), WORKING)
def test_the_value_without_a_gradient_is_the_same(name: str, kind: Knowledge) -> None:
    _, _, loss_N = _run(name, _knowledge(kind))
    plain = chunked_loss(
        LOSSES.get(name)(),
        _randn(N, D, seed=1),
        _knowledge(kind),
        draft_head=Head(DRAFT_VD),
        columns=DraftColumns(Head(TARGET_VD)),
        normalizer=N,
    )
    torch.testing.assert_close(plain.loss_N, loss_N, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- top_k


@pytest.mark.parametrize("name", TOP_K)
def test_the_whole_vocabulary_as_top_k_is_full_knowledge(name: str) -> None:
    full = _run(name, FullKnowledge(TARGET_ND))
    for known, exact in zip(_run(name, _top(V)), full, strict=True):
        torch.testing.assert_close(known, exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", TOP_K)
def test_the_tail_counts_as_one_token_and_its_gradient_is_autograds(name: str) -> None:
    loss = LOSSES.get(name)()
    assert isinstance(loss, LogitLoss)
    target, columns = _top(4), DraftColumns(Head(TARGET_VD))
    draft_NV = _randn(N, V, seed=5).requires_grad_()
    law_NV = draft_NV.log_softmax(-1)
    top_NK = law_NV.gather(-1, target.token_ids_NK)
    rest_NV = law_NV.scatter(-1, target.token_ids_NK, -torch.inf)
    draft_NS = torch.cat([top_NK, rest_NV.logsumexp(-1, keepdim=True)], -1)
    tail_N1 = target.tail_mass_N.log().unsqueeze(-1)
    if not loss.lumps_tail:
        tail_N1 = torch.full_like(tail_N1, -torch.inf)
    reference_N = loss.per_position(draft_NS, torch.cat([target.log_probs_NK, tail_N1], -1))
    (reference_NV,) = torch.autograd.grad(reference_N.sum(), draft_NV)
    loss_N, grad_NV = target.value_and_grad(loss, draft_NV.detach(), slice(None), columns)
    torch.testing.assert_close(loss_N, reference_N.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_NV, reference_NV, rtol=1e-3, atol=2e-5)


# A loss that knows one token of the target only pulls towards it for ever.
LUMPING = [name for name in TOP_K if getattr(LOSSES.get(name), "lumps_tail", True)]


@pytest.mark.parametrize("name", LUMPING)
def test_a_draft_equal_to_the_target_feels_no_pull_from_top_k(name: str) -> None:
    """Renormalising on the K would pull its tail to 0; a label is all that is left to learn."""
    loss = LOSSES.get(name)()
    assert isinstance(loss, LogitLoss)
    columns = DraftColumns(Head(TARGET_VD))
    loss_N, grad_NV = _top(4).value_and_grad(loss, LAW_NV.clone(), slice(None), columns)
    assert loss_N.abs().max() < 1e-5
    if not loss.needs_whole_mass:  # those are kinked where p = q, and rounding picks a side
        assert grad_NV.abs().max() < 1e-5


@pytest.mark.parametrize("name", TOP_K)
def test_top_k_on_a_vocabulary_subset_is_near_full_knowledge_there(name: str) -> None:
    ids_V = torch.arange(0, V, 2)
    subset: dict[str, Any] = {
        "draft_head": Head(DRAFT_VD).subset(ids_V),
        "columns": DraftColumns(Head(TARGET_VD).subset(ids_V), ids_V),
    }
    logsumexp_N = (TARGET_ND @ TARGET_VD.T).logsumexp(-1)
    value, grad_ND, _ = _run(name, FullKnowledge(TARGET_ND, logsumexp_N), **subset)
    known, known_ND, _ = _run(name, _top(V), **subset)
    torch.testing.assert_close(known, value, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(known_ND, grad_ND, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", TOP_K)
def test_ids_beyond_a_smaller_draft_vocabulary_are_no_columns(name: str) -> None:
    known = V - 4
    value, grad_ND, _ = _run(
        name,
        _top(V),
        draft_head=Head(DRAFT_VD).first(known),
        columns=DraftColumns(Head(TARGET_VD).first(known)),
    )
    exact, exact_ND, _ = _run(
        name,
        FullKnowledge(TARGET_ND),
        draft_head=Head(DRAFT_VD).first(known),
        columns=DraftColumns(Head(TARGET_VD).first(known)),
    )
    torch.testing.assert_close(value, exact, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(grad_ND, exact_ND, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", TOP_K)
def test_nothing_is_learnt_where_the_draft_can_propose_none_of_the_k(name: str) -> None:
    """Then the tail is all there is, and a subset draft has all its mass there already."""
    columns = DraftColumns(Head(TARGET_VD[:2]), torch.tensor([0, 1]))
    target = TopKnowledge(
        torch.tensor([[5, 9]]), torch.tensor([[0.5, 0.25]]).log(), torch.tensor([0.25])
    )
    loss_N, grad_NV = target.value_and_grad(
        LOSSES.get(name)(), torch.tensor([[1.0, -1.0]]), slice(None), columns
    )
    assert torch.isfinite(loss_N).all()
    assert grad_NV.abs().max() < 1e-6


# The target's law on four tokens, of which its two best and their rest are known, and a draft that
# can propose tokens 0 and 2: q = (3/4, 1/4).
FOUR_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
SUBSET_V = torch.tensor([0, 2])
ON_SUBSET = DraftColumns(Head(torch.zeros(2, 1)), SUBSET_V)
SUBSET_DRAFT_NV = torch.tensor([[0.75, 0.25]]).log()


@pytest.mark.parametrize(
    ("name", "value", "grad"),
    [
        # token 1 cannot be proposed: token 0 and the rest are left, (5/7, 2/7) of what is known
        (
            "forward_kl",
            5 / 7 * math.log(5 / 7 / 0.75) + 2 / 7 * math.log(2 / 7 / 0.25),
            0.75 - 5 / 7,
        ),
        # min(0.5, 0.75) + min(0.2, 0.25) are accepted, and both are as large as they get
        ("total_variation", 0.3, 0.0),
        ("cross_entropy", -math.log(0.75), 0.75 - 1.0),
    ],
)
def test_top_k_on_a_subset_is_the_law_worked_out_by_hand(
    name: str, value: float, grad: float
) -> None:
    target = _top(2, FOUR_V.log().unsqueeze(0))
    loss_N, grad_NV = target.value_and_grad(
        LOSSES.get(name)(), SUBSET_DRAFT_NV, slice(None), ON_SUBSET
    )
    assert loss_N.item() == pytest.approx(value, abs=1e-6)
    assert grad_NV[0].tolist() == pytest.approx([grad, -grad], abs=1e-6)


@pytest.mark.parametrize("name", TOP_K)
def test_a_tail_of_exactly_nothing_is_no_loss_that_is_not_a_number(name: str) -> None:
    target = TopKnowledge(torch.tensor([[1, 3]]), torch.tensor([[0.5, 0.5]]).log(), torch.zeros(1))
    loss_N, grad_NV = target.value_and_grad(
        LOSSES.get(name)(), SUBSET_DRAFT_NV, slice(None), ON_SUBSET
    )
    assert torch.isfinite(loss_N).all()
    assert grad_NV.abs().max() < 1e-6


# ---------------------------------------------------------------- sampled


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_on_a_subset_counts_by_its_mass_and_is_worth_its_cross_entropy(name: str) -> None:
    """m = 0.65 of the target lies on the subset: the gradient is m (q - p / m)."""
    target, q_V = _whole_sample(FOUR_V.log().unsqueeze(0)), SUBSET_DRAFT_NV.exp()[0]
    loss, mass, p_V = LOSSES.get(name)(), 0.65, FOUR_V[SUBSET_V]
    loss_N, grad_NV = target.value_and_grad(loss, SUBSET_DRAFT_NV, slice(None), ON_SUBSET)
    torch.testing.assert_close(grad_NV[0], mass * (q_V - p_V / mass))
    assert loss_N.item() == pytest.approx(-0.5 * math.log(0.75) - 0.15 * math.log(0.25), abs=1e-6)
    torch.testing.assert_close(target.value(loss, SUBSET_DRAFT_NV, slice(None), ON_SUBSET), loss_N)


@pytest.mark.parametrize("name", SAMPLED)
def test_no_draft_is_worth_less_than_nothing_on_a_subset(name: str) -> None:
    """A perfect one of a law that lies mostly elsewhere: a negative loss would upset the guards."""
    law_NV = torch.tensor([[0.02, 0.49, 0.01, 0.48]]).log()
    perfect_NV = torch.tensor([[2 / 3, 1 / 3]]).log()
    target = _whole_sample(law_NV)
    loss_N = target.value(LOSSES.get(name)(), perfect_NV, slice(None), ON_SUBSET)
    assert 0 <= loss_N.item() < 0.03


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_in_exact_proportion_is_full_knowledge(name: str) -> None:
    full = _run(name, FullKnowledge(TARGET_ND))
    for known, exact in zip(_run(name, _whole_sample()), full, strict=True):
        torch.testing.assert_close(known, exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", SAMPLED)
def test_unused_places_of_a_sample_do_not_count(name: str) -> None:
    sample = _whole_sample()
    pad = torch.nn.functional.pad
    padded = SampledKnowledge(
        pad(sample.token_ids_NM, (0, 3)), pad(sample.weights_NM, (0, 3)), sample.entropy_N
    )
    for one, other in zip(_run(name, sample), _run(name, padded), strict=True):
        torch.testing.assert_close(one, other)
