"""Owns cross_entropy: -log q of the target's most likely token.

Refuses to know the sampled text: the label is the target's own argmax at each position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.losses.base import LOSSES, LogitLoss, log_probs, scratch_log_probs


@LOSSES.register("cross_entropy")
class CrossEntropy(LogitLoss):
    """-log q(argmax p) in nats: what greedy verification accepts, and nothing of the rest of p.

    On greedy text it is sequence-level distillation (Kim and Rush 2016, arXiv 1606.07947). The
    baseline the distribution losses must beat at temperature 1. On a vocabulary subset the
    label is the most likely token of the subset.
    """

    lumps_tail = False  # many unlikely tokens together are no most likely token

    def per_position(
        self,
        draft_logits_BTV: Tensor,
        target_logits_BTV: Tensor,
        target_logsumexp_BT: Tensor | None = None,
    ) -> Tensor:
        """Return cross_entropy_BT; 0 only for a draft certain of the target's choice."""
        label_BT1 = target_logits_BTV.argmax(dim=-1, keepdim=True)
        return -log_probs(draft_logits_BTV, self.temperature).gather(-1, label_BT1).squeeze(-1)

    def value_and_grad(
        self,
        draft_logits_NV: Tensor,
        target_logits_NV: Tensor,
        target_logsumexp_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Closed form: (q - onehot(label)) / temperature."""
        label_N1 = target_logits_NV.argmax(dim=-1, keepdim=True)
        draft_NV = scratch_log_probs(draft_logits_NV, self.temperature)
        loss_N = -draft_NV.gather(-1, label_N1).squeeze(-1)
        grad_NV = draft_NV.exp_()
        grad_NV.scatter_add_(-1, label_N1, torch.full_like(label_N1, -1.0, dtype=grad_NV.dtype))
        return loss_N, grad_NV if self.temperature == 1.0 else grad_NV.div_(self.temperature)
