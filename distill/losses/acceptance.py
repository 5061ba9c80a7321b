"""Owns acceptance: -log alpha, the acceptance rate as a likelihood.

Refuses to know a weight between losses: that is `acceptance_hybrid.py`.
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

# Below this overlap the gradient of -log alpha is held at 1 / ALPHA_FLOOR times that of alpha:
# one disjoint position must not outweigh a whole batch.
ALPHA_FLOOR = 1.0e-3


@LOSSES.register("acceptance")
class Acceptance(LogitLoss):
    """-log sum_v min(p_v, q_v) in nats (the "alpha" form of arXiv 2602.23881).

    Its gradient is total variation's divided by alpha, so a position that is almost never
    accepted is not ignored. On a vocabulary subset p keeps its true mass.
    """

    needs_whole_mass = True

    def per_position(
        self,
        draft_logits_BTV: Tensor,
        target_logits_BTV: Tensor,
        target_logsumexp_BT: Tensor | None = None,
    ) -> Tensor:
        """Return -log alpha_BT, linear below ALPHA_FLOOR with the slope it has there."""
        target_BTV = whole_probs(target_logits_BTV, target_logsumexp_BT, self.temperature)
        draft_BTV = log_probs(draft_logits_BTV, self.temperature).exp()
        return negative_log(torch.minimum(target_BTV, draft_BTV).sum(dim=-1))

    def value_and_grad(
        self,
        draft_logits_NV: Tensor,
        target_logits_NV: Tensor,
        target_logsumexp_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Closed form: -(d alpha / d z) / max(alpha, ALPHA_FLOOR)."""
        target_NV = whole_probs(target_logits_NV, target_logsumexp_N, self.temperature)
        draft_NV = scratch_log_probs(draft_logits_NV, self.temperature).exp_()
        alpha_N, grad_NV = overlap_and_grad(target_NV, draft_NV)
        slope_N = -1.0 / (self.temperature * alpha_N.clamp_min(ALPHA_FLOOR))
        return negative_log(alpha_N), grad_NV.mul_(slope_N.unsqueeze(-1))


def negative_log(alpha_BT: Tensor) -> Tensor:
    """Return -log alpha, continued below ALPHA_FLOOR by its tangent (finite at alpha = 0)."""
    clamped_BT = alpha_BT.clamp_min(ALPHA_FLOOR)
    shortfall_BT = (ALPHA_FLOOR - alpha_BT).clamp_min(0.0)
    return -torch.log(clamped_BT) + shortfall_BT / ALPHA_FLOOR
