"""Owns forward_kl: KL(target, draft), the loss a draft is usually distilled with.

Refuses to know acceptance: a small forward_kl bounds it from below but does not order drafts.
"""

from __future__ import annotations

from torch import Tensor

from distill.losses.base import LOSSES
from distill.losses.divergence import Divergence


@LOSSES.register("forward_kl")
class ForwardKL(Divergence):
    """sum_v p_v (log p_v - log q_v) in nats (Hinton et al. 2015, arXiv 1503.02531).

    It covers every token the target may emit, so it is never flat far from the target, which is
    why it comes before the acceptance losses. No temperature^2 factor: nothing else is added to it.
    """

    is_linear_in_target = True

    def of(self, target_log_BTV: Tensor, draft_log_BTV: Tensor) -> Tensor:
        """The definition."""
        return (target_log_BTV.exp() * (target_log_BTV - draft_log_BTV)).sum(dim=-1)

    def closed_form(self, target_log_NV: Tensor, draft_log_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Closed form: d loss / d z = q - p."""
        difference_NV = target_log_NV - draft_log_NV
        target_NV = target_log_NV.exp_()
        loss_N = difference_NV.mul_(target_NV).sum(dim=-1)
        return loss_N, draft_log_NV.exp_().sub_(target_NV)
