"""Owns the contract of a loss: one number per position, its registry and the float32 primitives.

Refuses to know masks, means, chunks and optimisers: those are `chunked.py`'s and the loop's job.

Shapes: B rows, T positions, N flat token positions, V vocabulary (or the subset of it that the
draft can propose), D width. Any number of leading dimensions is accepted where BT is written.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.registry import Registry

Space = Literal["logits", "hidden"]

# A masked logit (-inf) becomes this: its probability underflows to exactly 0 in float32, while
# 0 * log(0) stays 0 and the gradient stays finite (a real -inf would give 0 * inf = NaN).
LOGIT_FLOOR = -1.0e4


class Loss(Protocol):
    """What the chunked driver needs: per position, no mask and no mean.

    `space` says what is compared: "logits" of both models, or their final hidden states.
    """

    space: ClassVar[Space]

    def per_position(self, draft_logits_BTV: Tensor, target_logits_BTV: Tensor, /) -> Tensor:
        """Return loss_BT in float32."""
        ...


class LogitLoss:
    """Base of the losses that compare distributions over the vocabulary, at one temperature.

    On a vocabulary subset the target's logits are only part of its vocabulary.
    `target_logsumexp_BT`, the log-sum-exp of the WHOLE vocabulary, then tells how much of the
    target's probability lies outside. Losses that say so (`needs_whole_mass`) use it; the others
    compare with the target renormalised on the subset.
    """

    space: ClassVar[Space] = "logits"
    needs_whole_mass: ClassVar[bool] = False

    def __init__(self, *, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ConfigError(
                f"loss temperature is {temperature}, but a loss compares distributions and needs "
                f"a temperature above 0. Set it to 1.0, the temperature drafts are verified at."
            )
        self.temperature = temperature

    def per_position(
        self,
        draft_logits_BTV: Tensor,
        target_logits_BTV: Tensor,
        target_logsumexp_BT: Tensor | None = None,
    ) -> Tensor:
        """Return loss_BT (float32), differentiable with respect to the draft's logits."""
        raise NotImplementedError

    def value_and_grad(
        self,
        draft_logits_NV: Tensor,
        target_logits_NV: Tensor,
        target_logsumexp_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (loss_N, d loss_N / d draft_logits_NV), both float32.

        This default asks autograd. A loss may override it with the closed form, which makes
        fewer passes over [N, V]; the contract test holds the two equal.
        """
        with torch.enable_grad():
            draft_logits_NV = draft_logits_NV.detach().requires_grad_()
            loss_N = self.per_position(draft_logits_NV, target_logits_NV, target_logsumexp_N)
            (grad_NV,) = torch.autograd.grad(loss_N.sum(), draft_logits_NV)
        return loss_N.detach(), grad_NV.float()


class HiddenLoss:
    """Base of the losses that compare final hidden states: after the last norm, before the head."""

    space: ClassVar[Space] = "hidden"
    needs_whole_mass: ClassVar[bool] = False

    def __init__(self, *, temperature: float = 1.0) -> None:
        if temperature != 1.0:
            raise ConfigError(
                f"a loss on hidden states has no temperature, but it is {temperature}. "
                f"Leave the phase's temperature at 1.0."
            )

    def per_position(self, draft_hidden_BTD: Tensor, target_hidden_BTD: Tensor) -> Tensor:
        """Return loss_BT (float32), differentiable with respect to the draft's states."""
        raise NotImplementedError


LOSSES: Registry[type[LogitLoss] | type[HiddenLoss]] = Registry(
    kind="loss", package="distill.losses"
)


def finite_logits(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return logits / temperature in float32 with -inf raised to a finite floor."""
    scaled_BTV = logits_BTV.float()
    if temperature != 1.0:
        scaled_BTV = scaled_BTV / temperature
    return scaled_BTV.clamp_min(LOGIT_FLOOR)


def log_probs(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return float32 log-probabilities that sum to 1 over the columns given."""
    return torch.log_softmax(finite_logits(logits_BTV, temperature), dim=-1)


def scratch_log_probs(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `log_probs` without autograd, in memory the caller may overwrite.

    The closed forms use it: each [N, V] buffer less is a tenth of their time.
    """
    scaled_NV = logits_NV.to(torch.float32, copy=True)
    if temperature != 1.0:
        scaled_NV /= temperature
    return torch.log_softmax(scaled_NV.clamp_min_(LOGIT_FLOOR), dim=-1)


def whole_probs(
    target_logits_BTV: Tensor, target_logsumexp_BT: Tensor | None, temperature: float = 1.0
) -> Tensor:
    """Return the target's float32 probabilities over its WHOLE vocabulary, at the columns given.

    They sum to 1 when `target_logsumexp_BT` is None (the columns are the whole vocabulary), else
    to the mass of the subset. The stored log-sum-exp and the logits come from two matrix products
    of different shapes: where rounding makes the mass exceed 1 it is scaled back to 1.
    """
    logits_BTV = finite_logits(target_logits_BTV, temperature)
    if target_logsumexp_BT is None:
        return torch.softmax(logits_BTV, dim=-1)
    if temperature != 1.0:
        raise ConfigError(
            f"the target's log-sum-exp is stored at temperature 1.0, but the loss is taken at "
            f"{temperature}. On a vocabulary subset use temperature 1.0, or forward_kl, or train "
            f"on the whole vocabulary (vocabulary_size: null)."
        )
    probs_BTV = torch.exp(logits_BTV - target_logsumexp_BT.float().unsqueeze(-1))
    mass_BT1 = probs_BTV.sum(dim=-1, keepdim=True)
    return probs_BTV / mass_BT1.clamp_min(1.0)


def overlap_and_grad(target_probs_NV: Tensor, draft_probs_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha_N = sum_v min(p, q) and its gradient with respect to the draft's logits.

    d alpha / d z_j = q_j (m_j - sum_v m_v q_v) with m_v = 1 where q_v < p_v, from the Jacobian
    of the softmax; where p = q the subgradient 0 is taken. (alpha: Leviathan et al. 2023,
    arXiv 2211.17192, corollary 3.6.)
    """
    alpha_N = torch.minimum(target_probs_NV, draft_probs_NV).sum(dim=-1)
    # the comparison is written as 0.0 and 1.0 in place: torch.where took 4x as long here
    grad_NV = torch.lt(draft_probs_NV, target_probs_NV, out=torch.empty_like(draft_probs_NV))
    grad_NV.mul_(draft_probs_NV)
    grad_NV.addcmul_(draft_probs_NV, grad_NV.sum(dim=-1, keepdim=True), value=-1.0)
    return alpha_N, grad_NV
