"""Owns total_variation: 1 - alpha, the rejection probability itself.

Refuses to know how to get near the target: its gradient vanishes where the two do not overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.losses.base import (
    LOSSES,
    LogitLoss,
    log_probs,
    overlap_and_grad,
    scratch_log_probs,
    whole_probs,
)


@LOSSES.register("total_variation")
class TotalVariation(LogitLoss):
    """1 - sum_v min(p_v, q_v), the probability that speculative sampling rejects a draft token.

    Equal to half the L1 distance (Leviathan et al. 2023, arXiv 2211.17192, definition 3.2).
    A probability, not nats. On a vocabulary subset p keeps its true mass: what lies outside the
    subset is rejected whatever the draft does, and counts.
    """

    needs_whole_mass = True

    def per_position(
        self,
        draft_logits_BTV: Tensor,
        target_logits_BTV: Tensor,
        target_logsumexp_BT: Tensor | None = None,
    ) -> Tensor:
        """Return total_variation_BT in [0, 1]."""
        target_BTV = whole_probs(target_logits_BTV, target_logsumexp_BT, self.temperature)
        draft_BTV = log_probs(draft_logits_BTV, self.temperature).exp()
        return 1.0 - torch.minimum(target_BTV, draft_BTV).sum(dim=-1)

    def value_and_grad(
        self,
        draft_logits_NV: Tensor,
        target_logits_NV: Tensor,
        target_logsumexp_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Closed form of `overlap_and_grad`, with the sign of a loss."""
        target_NV = whole_probs(target_logits_NV, target_logsumexp_N, self.temperature)
        draft_NV = scratch_log_probs(draft_logits_NV, self.temperature).exp_()
        alpha_N, grad_NV = overlap_and_grad(target_NV, draft_NV)
        return 1.0 - alpha_N, grad_NV.mul_(-1.0 / self.temperature)
