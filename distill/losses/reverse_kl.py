"""Owns reverse_kl: KL(draft, target), which makes the draft avoid what the target would not say.

Refuses to know sampling from the draft: it is taken at the positions of the text it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.losses.base import LOSSES, LogitLoss, log_probs, scratch_log_probs


@LOSSES.register("reverse_kl")
class ReverseKL(LogitLoss):
    """sum_v q_v (log q_v - log p_v) in nats (MiniLLM, Gu et al. 2023, arXiv 2306.08543).

    Mode seeking: mass the draft puts where the target has none is punished, missing mass is not.
    On a vocabulary subset p is the target renormalised on the subset. The log-probabilities stay
    in log space on both sides; a softmax as the reference would underflow and its gradient be NaN.
    """

    def per_position(
        self,
        draft_logits_BTV: Tensor,
        target_logits_BTV: Tensor,
        target_logsumexp_BT: Tensor | None = None,
    ) -> Tensor:
        """Return reverse_kl_BT; at least 0 up to rounding."""
        target_BTV = log_probs(target_logits_BTV, self.temperature)
        draft_BTV = log_probs(draft_logits_BTV, self.temperature)
        return (draft_BTV.exp() * (draft_BTV - target_BTV)).sum(dim=-1)

    def value_and_grad(
        self,
        draft_logits_NV: Tensor,
        target_logits_NV: Tensor,
        target_logsumexp_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Closed form: d loss / d z_j = q_j (log q_j - log p_j - loss) / temperature."""
        draft_NV = scratch_log_probs(draft_logits_NV, self.temperature)
        target_NV = scratch_log_probs(target_logits_NV, self.temperature)
        difference_NV = torch.sub(draft_NV, target_NV, out=target_NV)
        probs_NV = draft_NV.exp_()
        loss_N = torch.linalg.vecdot(probs_NV, difference_NV)
        grad_NV = difference_NV.sub_(loss_N.unsqueeze(-1)).mul_(probs_NV)
        return loss_N, grad_NV if self.temperature == 1.0 else grad_NV.div_(self.temperature)
