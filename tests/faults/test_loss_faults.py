"""Owns the faults others shipped in distillation losses, each as the sentence that denies it here.

Refuses to know what is fine about each loss: that is in tests/contracts/ and tests/unit/.
Left out: template text and masks (generate's), resume order and untied heads (training's).
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distill.artifacts import ArtifactStore
from distill.errors import ConfigError, TrainingError
from distill.initialization import PrunedConfig, initialize
from distill.losses import LOSSES, DraftColumns, FullKnowledge, Head, LogitLoss, chunked_loss
from distill.losses.head import head_of
from distill.models import ModelConfig, load_target
from distill.training.data import TargetFiles, collate, read_rows
from distill.training.trunk import DraftTrunk
from tests.distill_helpers import make_generated

LOGIT_LOSSES = [name for name in LOSSES.names() if LOSSES.get(name).space == "logits"]
P, Q = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]


def _loss(name: str, *, temperature: float = 1.0, **options: float) -> LogitLoss:
    loss = LOSSES.get(name)(temperature=temperature, **options)
    assert isinstance(loss, LogitLoss)
    return loss


def _randn(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _logits(probs: list[float]) -> Tensor:
    return torch.tensor([probs], dtype=torch.float64).log()


def _jsd(p: list[float], q: list[float], beta: float) -> float:
    mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_83_one_batch_as_four_unequal_micro_batches_has_the_same_gradient(name: str) -> None:
    """trl#4719: a mean per micro-batch weighs the tokens of short ones more."""
    draft_ND, target_ND = _randn(20, 6, seed=1), _randn(20, 6, seed=2)
    head, columns = Head(_randn(11, 6, seed=3)), DraftColumns(Head(_randn(11, 6, seed=4)))

    def grad(part: slice) -> Tensor:
        leaf = draft_ND[part].clone().requires_grad_()
        known = FullKnowledge(target_ND[part])
        chunked_loss(
            _loss(name), leaf, known, draft_head=head, columns=columns, normalizer=20
        ).value.backward()
        assert leaf.grad is not None
        return leaf.grad

    parts = [grad(slice(*ends)) for ends in ((0, 1), (1, 3), (3, 10), (10, 20))]
    torch.testing.assert_close(torch.cat(parts), grad(slice(None)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_85_a_batch_given_twice_has_the_loss_of_one(name: str) -> None:
    """easydistill PR#16: divided by the token count twice."""
    draft_ND, target_ND = _randn(9, 6, seed=1), _randn(9, 6, seed=2)
    head, columns = Head(_randn(11, 6, seed=3)), DraftColumns(Head(_randn(11, 6, seed=4)))

    def value(times: int) -> float:
        return chunked_loss(
            _loss(name),
            draft_ND.repeat(times, 1),
            FullKnowledge(target_ND.repeat(times, 1)),
            draft_head=head,
            columns=columns,
            normalizer=9 * times,
        ).value.item()

    assert value(2) == pytest.approx(value(1), rel=1e-5)
    assert value(5) == pytest.approx(value(1), rel=1e-5)


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_86_padding_and_prompt_tokens_do_not_train(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], name: str
) -> None:
    """MambaInLlama#11: the loss ignored the mask. A longer neighbour pads; its loss is its own."""
    target = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))
    draft = initialize(PrunedConfig(layers=(0, 3)), target, seed=0).model.float()
    generated = make_generated(ArtifactStore(tmp_path), tiny_pair_dirs[0], num_rows=12)
    rows = sorted(read_rows(generated, "train", max_length=512), key=lambda row: row.length)
    source, head = TargetFiles(generated), head_of(target.model)

    def losses(*rows_of_batch: int) -> Tensor:
        batch = collate([rows[index] for index in rows_of_batch], source)
        with torch.no_grad():
            hidden_ND = DraftTrunk(draft)(batch.input_ids_BT, batch.flat_positions_N)
        return chunked_loss(
            _loss(name),
            hidden_ND,
            batch.target,
            draft_head=head_of(draft),
            columns=DraftColumns(head),
            normalizer=1,
        ).loss_N

    alone = losses(0)
    assert len(alone) == rows[0].num_positions < rows[0].length
    torch.testing.assert_close(losses(0, -1)[: len(alone)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_87_only_the_position_whose_target_differs_gets_a_gradient(name: str) -> None:
    """swift PR#8436: logits and labels both unshifted, so the mask chose other positions."""
    law_NV = torch.full((5, 7), -30.0)
    law_NV[torch.arange(5), torch.arange(5)] = 30.0
    draft_NV = law_NV.clone()
    draft_NV[3] = 0.0
    _, grad_NV = _loss(name).value_and_grad(draft_NV, law_NV)
    assert grad_NV.abs().sum(-1).gt(1e-6).tolist() == [False, False, False, True, False]
    assert grad_NV[3].argmin() == 3  # a step against the gradient raises the target's token


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_89_the_mixture_of_jsd_is_one_of_probabilities_and_beta_is_the_targets(beta: float) -> None:
    """trl#2202: mixed in log space, and beta the wrong way round."""
    value = _loss("jsd", beta=beta).per_position(_logits(Q), _logits(P)).item()
    assert value == pytest.approx(_jsd(P, Q, beta), abs=1e-12)
    if beta != 0.5:
        assert value != pytest.approx(_jsd(P, Q, 1 - beta), abs=1e-4)


def test_90_jsd_is_continuous_and_its_scaled_limits_are_the_two_kls() -> None:
    """swift#10078: it collapsed to 0 near the ends. The plain value does; divided it must not."""
    forward = _loss("forward_kl").per_position(_logits(Q), _logits(P)).item()
    reverse = _loss("reverse_kl").per_position(_logits(Q), _logits(P)).item()
    for small in (1e-2, 1e-4, 1e-6):
        low = _loss("jsd", beta=small).per_position(_logits(Q), _logits(P)).item() / small
        high = _loss("jsd", beta=1 - small).per_position(_logits(Q), _logits(P)).item() / small
        assert low == pytest.approx(forward, rel=3 * small)
        assert high == pytest.approx(reverse, rel=3 * small)
    grid = [i / 100 for i in range(1, 100)]
    values = [_loss("jsd", beta=beta).per_position(_logits(Q), _logits(P)).item() for beta in grid]
    assert max(abs(a - b) for a, b in itertools.pairwise(values)) < 0.02
    assert min(values) > 0


@pytest.mark.parametrize(("beta", "instead"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_90_at_the_ends_jsd_is_refused_and_its_limit_named(beta: float, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        _loss("jsd", beta=beta)


@pytest.mark.parametrize("name", [name for name in LOGIT_LOSSES if name != "cross_entropy"])
def test_91_the_chunked_loss_is_the_loss_and_nothing_is_mixed_into_it(name: str) -> None:
    """trl PR#5731: the fused path added half a cross-entropy and took the sampling temperature."""
    hidden_ND, head = _randn(8, 6, seed=1), Head(_randn(11, 6, seed=3))
    target_ND = _randn(8, 6, seed=2)

    def value(draft_ND: Tensor) -> float:
        return chunked_loss(
            _loss(name),
            draft_ND.requires_grad_(),
            FullKnowledge(target_ND),
            draft_head=head,
            columns=DraftColumns(head),
            normalizer=8,
        ).value.item()

    plain = _loss(name).per_position(head.logits(hidden_ND), head.logits(target_ND)).mean()
    assert value(hidden_ND.clone()) == pytest.approx(plain.item(), rel=1e-5)
    assert value(target_ND.clone()) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", LOGIT_LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_93_a_float32_draft_and_a_bfloat16_target_never_give_a_negative_loss(
    name: str, temperature: float
) -> None:
    """swift#10156: each side was divided by the temperature in its own precision."""
    target_NV = _randn(400, 64, seed=1, scale=6.0)
    loss_N = _loss(name, temperature=temperature).per_position(target_NV, target_NV.bfloat16())
    assert loss_N.min() >= -1e-6


@pytest.mark.parametrize("name", LOGIT_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_94_at_a_low_temperature_the_gradient_is_a_number(name: str, dtype: torch.dtype) -> None:
    """Soup#719: a finite reverse KL whose gradient was NaN, because a softmax underflowed."""
    draft_NV, target_NV = _randn(40, 50, seed=1, scale=9.0), _randn(40, 50, seed=2, scale=9.0)
    loss = _loss(name, temperature=0.05)
    loss_N, grad_NV = loss.value_and_grad(draft_NV.to(dtype), target_NV.to(dtype))
    assert torch.isfinite(loss_N).all()
    assert torch.isfinite(grad_NV).all()
    draft_NV.requires_grad_()
    loss.per_position(draft_NV, target_NV).sum().backward()
    assert draft_NV.grad is not None
    assert torch.isfinite(draft_NV.grad).all()


@pytest.mark.parametrize("name", LOGIT_LOSSES)
@pytest.mark.parametrize("side", ["draft", "target", "both"])
def test_95_a_tail_of_minus_infinity_leaves_no_nan_in_the_gradient(name: str, side: str) -> None:
    """trl PR#5594: nan_to_num hid it in the value, the gradient kept it."""
    draft_NV, target_NV = _randn(6, 20, seed=1), _randn(6, 20, seed=2)
    if side != "target":
        draft_NV[:, 12:] = -torch.inf
    if side != "draft":
        target_NV[:, 15:] = -torch.inf
    loss_N, grad_NV = _loss(name).value_and_grad(draft_NV, target_NV)
    assert torch.isfinite(loss_N).all()
    assert torch.isfinite(grad_NV).all()


def test_97_a_run_without_one_label_left_is_an_error_and_not_a_loss_of_zero(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    """trl#6668: the prompt alone was longer than max_length."""
    generated = make_generated(ArtifactStore(tmp_path), tiny_pair_dirs[0], num_rows=12)
    with pytest.raises(TrainingError, match="no position to train on"):
        read_rows(generated, "train", max_length=2)


def test_98_no_loss_mixes_terms_whose_scale_changes_differently_with_temperature() -> None:
    """keras-io#869: soft terms shrink with temperature^2, hard ones do not, and were added.

    acceptance_hybrid is the one sum here: near p = q both its terms shrink alike.
    """
    target_NV = _randn(30, 20, seed=2)
    draft_NV = target_NV + _randn(30, 20, seed=1, scale=0.01)
    ratios = {}
    for name in ("forward_kl", "acceptance_hybrid"):
        norms = [
            _loss(name, temperature=temperature).value_and_grad(draft_NV, target_NV)[1].norm()
            for temperature in (1.0, 4.0)
        ]
        ratios[name] = (norms[1] / norms[0]).item()
    # KL's gradient falls as 1 / T^2 (times what softening does to the law), total variation's as
    # 1 / T: a hard term would not fall at all
    assert ratios["forward_kl"] < 1 / 8
    assert ratios["acceptance_hybrid"] < 1 / 2


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_99_heads_of_different_padded_size_meet_on_the_tokens_both_know(name: str) -> None:
    """trl#2215: 152064 against 151936 rows. Slice, then normalise: padding holds no mass."""
    draft_VD, target_VD = _randn(11, 6, seed=3), _randn(14, 6, seed=4)
    draft_ND, target_ND = _randn(8, 6, seed=1).requires_grad_(), _randn(8, 6, seed=2)
    result = chunked_loss(
        _loss(name),
        draft_ND,
        FullKnowledge(target_ND),
        draft_head=Head(draft_VD).first(10),
        columns=DraftColumns(Head(target_VD).first(10)),
        normalizer=8,
    )
    expected_N = _loss(name).per_position(
        draft_ND.detach() @ draft_VD[:10].T, target_ND @ target_VD[:10].T
    )
    torch.testing.assert_close(result.loss_N, expected_N, rtol=1e-4, atol=1e-5)


def test_107_a_long_batch_over_a_large_vocabulary_needs_no_logits_for_all_of_it() -> None:
    """Liger#371. 4,096 positions x 8,192 tokens are 134 MB of float32; a chunk is 4 MB.

    That no loss makes larger tensors of a chunk is in tests/contracts/test_loss_contract.py.
    """
    sizes = []

    class Counting(LogitLoss):
        """Notes the size of what it is given."""

        def value_and_grad(
            self,
            draft_logits_NV: Tensor,
            target_logits_NV: Tensor,
            target_logsumexp_N: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            sizes.append(draft_logits_NV.numel())
            return torch.zeros(len(draft_logits_NV)), torch.zeros_like(draft_logits_NV)

    head = Head(torch.zeros(8192, 2))
    chunked_loss(
        Counting(),
        torch.zeros(4096, 2, requires_grad=True),
        FullKnowledge(torch.zeros(4096, 2)),
        draft_head=head,
        columns=DraftColumns(head),
        normalizer=4096,
    )
    assert sum(sizes) == 4096 * 8192
    assert max(sizes) <= 2**20
