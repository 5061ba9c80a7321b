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
from distill.sampling import at_least_float32

Space = Literal["logits", "hidden"]
Knowledge = Literal["full", "top_k", "sampled"]
"""What is known of the target at a position: its final state (hence everything), its K most likely
tokens and the mass of all others, or a sample of its tokens. See `knowledge.py`."""

# The log-probability of a masked logit (-inf) becomes this: its probability underflows to exactly 0
# in float32, while 0 * log(0) stays 0 and the gradient stays finite (a real -inf would give
# 0 * inf = NaN). It bounds log-probabilities, not logits: a constant added to all logits of a row
# changes no law, so it must change no loss.
LOG_PROB_FLOOR = -1.0e4


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
    # Whether all tokens outside the K best may be compared as if they were one token.
    lumps_tail: ClassVar[bool] = True
    # Whether the gradient is q - p, and so right on average when p is a sample's frequencies.
    is_linear_in_target: ClassVar[bool] = False
    # Whether value_and_grad differentiates per_position; False where a weight is held constant.
    is_exact_derivative: ClassVar[bool] = True

    def __init__(self, *, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ConfigError(
                f"loss temperature is {temperature}, but a loss compares distributions and needs "
                f"a temperature above 0. Set it to 1.0, the temperature drafts are verified at."
            )
        self.temperature = temperature

    def why_not(self, knowledge: Knowledge) -> str | None:
        """Why this loss cannot be taken from what is known of the target; None: it can."""
        if knowledge == "full":
            return None
        if self.temperature != 1.0:
            return (
                f"its temperature is {self.temperature:g}, and probabilities kept at temperature "
                f"1 without the rest of the vocabulary cannot be taken to another"
            )
        if knowledge == "sampled" and not self.is_linear_in_target:
            return (
                "its gradient is not linear in the target's probabilities, so a sample of the "
                "target's tokens would give a biased one"
            )
        return None

    def per_position(
        self,
        draft_logits_BTV: Tensor,
        target_logits_BTV: Tensor,
        target_logsumexp_BT: Tensor | None = None,
    ) -> Tensor:
        """Return loss_BT (float32; float64 for float64), differentiable in the draft's logits."""
        raise NotImplementedError

    def value_and_grad(
        self,
        draft_logits_NV: Tensor,
        target_logits_NV: Tensor,
        target_logsumexp_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (loss_N, d loss_N / d draft_logits_NV), both float32 (float64 for float64).

        This default asks autograd. A loss may override it with the closed form, which makes
        fewer passes over [N, V]; the contract test holds the two equal.
        """
        with torch.enable_grad():
            draft_logits_NV = draft_logits_NV.detach().requires_grad_()
            loss_N = self.per_position(draft_logits_NV, target_logits_NV, target_logsumexp_N)
            (grad_NV,) = torch.autograd.grad(loss_N.sum(), draft_logits_NV)
        return loss_N.detach(), grad_NV.to(at_least_float32(grad_NV.dtype))


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

    def why_not(self, knowledge: Knowledge) -> str | None:
        """Why this loss cannot be taken from what is known of the target; None: it can."""
        if knowledge == "full":
            return None
        return "it compares final hidden states, and none are kept"

    def per_position(self, draft_hidden_BTD: Tensor, target_hidden_BTD: Tensor) -> Tensor:
        """Return loss_BT (float32), differentiable with respect to the draft's states."""
        raise NotImplementedError


LOSSES: Registry[type[LogitLoss] | type[HiddenLoss]] = Registry(
    kind="loss", package="distill.losses"
)


def _scaled(logits_BTV: Tensor, temperature: float) -> Tensor:
    scaled_BTV = logits_BTV.to(at_least_float32(logits_BTV.dtype))
    return scaled_BTV if temperature == 1.0 else scaled_BTV / temperature


def log_probs(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities, at least float32 and finite, whose exp sums to 1 over the columns.

    At least one column of a row has to be above -inf.
    """
    scaled_BTV = _scaled(logits_BTV, temperature)
    return torch.log_softmax(scaled_BTV, dim=-1).clamp_min(LOG_PROB_FLOOR)


def scratch_log_probs(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `log_probs` without autograd, in memory the caller may overwrite.

    The closed forms use it: each [N, V] buffer less is a tenth of their time.
    """
    scaled_NV = logits_NV.to(at_least_float32(logits_NV.dtype), copy=True)
    if temperature != 1.0:
        scaled_NV /= temperature
    return torch.log_softmax(scaled_NV, dim=-1).clamp_min_(LOG_PROB_FLOOR)


def whole_probs(
    target_logits_BTV: Tensor, target_logsumexp_BT: Tensor | None, temperature: float = 1.0
) -> Tensor:
    """Return the target's probabilities over its WHOLE vocabulary, at the columns given.

    They sum to 1 when `target_logsumexp_BT` is None (the columns are the whole vocabulary), else
    to the mass of the subset. The stored log-sum-exp and the logits come from two matrix products
    of different shapes: where rounding makes the mass exceed 1 it is scaled back to 1.
    """
    logits_BTV = _scaled(target_logits_BTV, temperature)
    if target_logsumexp_BT is None:
        return torch.softmax(logits_BTV, dim=-1)
    if temperature != 1.0:
        raise ConfigError(
            f"the target's log-sum-exp is stored at temperature 1.0, but the loss is taken at "
            f"{temperature}. On a vocabulary subset use temperature 1.0, or forward_kl, or train "
            f"on the whole vocabulary (vocabulary_size: null)."
        )
    probs_BTV = torch.exp(logits_BTV - target_logsumexp_BT.to(logits_BTV.dtype).unsqueeze(-1))
    mass_BT1 = probs_BTV.sum(dim=-1, keepdim=True)
    return probs_BTV / mass_BT1.clamp_min(1.0)
