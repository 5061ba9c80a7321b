"""Owns forward_kl: KL(target, draft), the loss a draft is usually distilled with.

Refuses to know acceptance: a small forward_kl bounds it from below but does not order drafts.
"""

from __future__ import annotations

from torch import Tensor

from distill.losses.base import LOSSES, LogitLoss, log_probs, scratch_log_probs


@LOSSES.register("forward_kl")
class ForwardKL(LogitLoss):
    """sum_v p_v (log p_v - log q_v) in nats (Hinton et al. 2015, arXiv 1503.02531).

    It covers every token the target may emit, so it is never flat far from the target, which is
    why it comes before the acceptance losses. No temperature^2 factor: nothing else is added to it.
    On a vocabulary subset p is the target renormalised on the subset.
    """

    def per_position(
        self,
        draft_logits_BTV: Tensor,
        target_logits_BTV: Tensor,
        target_logsumexp_BT: Tensor | None = None,
    ) -> Tensor:
        """Return forward_kl_BT; at least 0 up to rounding."""
        target_BTV = log_probs(target_logits_BTV, self.temperature)
        draft_BTV = log_probs(draft_logits_BTV, self.temperature)
        return (target_BTV.exp() * (target_BTV - draft_BTV)).sum(dim=-1)

    def value_and_grad(
        self,
        draft_logits_NV: Tensor,
        target_logits_NV: Tensor,
        target_logsumexp_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Closed form: d loss / d z = (q - p) / temperature."""
        target_NV = scratch_log_probs(target_logits_NV, self.temperature)
        draft_NV = scratch_log_probs(draft_logits_NV, self.temperature)
        difference_NV = target_NV - draft_NV
        target_NV = target_NV.exp_()
        loss_N = difference_NV.mul_(target_NV).sum(dim=-1)
        grad_NV = draft_NV.exp_().sub_(target_NV)
        return loss_N, grad_NV if self.temperature == 1.0 else grad_NV.div_(self.temperature)
