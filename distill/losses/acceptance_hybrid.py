"""Owns acceptance_hybrid: forward_kl far from the target, total variation near it.

Refuses to know schedules: the weight depends on the position's own overlap only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.losses.base import LOSSES, log_probs, scratch_log_probs, whole_probs
from distill.losses.overlap import OverlapLoss, overlap_and_grad

DECAY = 3.0


@LOSSES.register("acceptance_hybrid")
class AcceptanceHybrid(OverlapLoss):
    """w KL(p, q) + (1 - w)(1 - alpha) with w = exp(-DECAY alpha) held constant.

    The "lambda" form of arXiv 2602.23881: where the draft is far off, alpha is small, w is near 1
    and KL pulls; where it is close, the rejection probability itself is minimised. Both terms are
    taken at the same temperature, so no temperature^2 factor stands between them. On a vocabulary
    subset KL renormalises the target and alpha keeps its true mass.
    """

    is_exact_derivative = False

    def per_position(
        self,
        draft_logits_BTV: Tensor,
        target_logits_BTV: Tensor,
        target_logsumexp_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum per position, at least 0 up to rounding."""
        target_BTV = log_probs(target_logits_BTV, self.temperature)
        draft_BTV = log_probs(draft_logits_BTV, self.temperature)
        kl_BT = (target_BTV.exp() * (target_BTV - draft_BTV)).sum(dim=-1)
        whole_BTV = whole_probs(target_logits_BTV, target_logsumexp_BT, self.temperature)
        alpha_BT = torch.minimum(whole_BTV, draft_BTV.exp()).sum(dim=-1)
        weight_BT = torch.exp(-DECAY * alpha_BT.detach())
        return weight_BT * kl_BT + (1.0 - weight_BT) * (1.0 - alpha_BT)

    def value_and_grad(
        self,
        draft_logits_NV: Tensor,
        target_logits_NV: Tensor,
        target_logsumexp_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Closed form: w (q - p) - (1 - w) d alpha / d z, over the temperature."""
        target_NV = scratch_log_probs(target_logits_NV, self.temperature)
        draft_NV = scratch_log_probs(draft_logits_NV, self.temperature)
        difference_NV = target_NV - draft_NV
        target_NV = target_NV.exp_()
        kl_N = difference_NV.mul_(target_NV).sum(dim=-1)
        draft_NV = draft_NV.exp_()
        whole_NV = target_NV
        if target_logsumexp_N is not None:
            whole_NV = whole_probs(target_logits_NV, target_logsumexp_N, self.temperature)
        alpha_N, grad_alpha_NV = overlap_and_grad(whole_NV, draft_NV)
        weight_N = torch.exp(-DECAY * alpha_N)
        loss_N = weight_N * kl_N + (1.0 - weight_N) * (1.0 - alpha_N)
        grad_NV = draft_NV.sub_(target_NV).mul_(weight_N.unsqueeze(-1))
        grad_NV.addcmul_(grad_alpha_NV, (weight_N - 1.0).unsqueeze(-1))
        return loss_N, grad_NV if self.temperature == 1.0 else grad_NV.div_(self.temperature)
