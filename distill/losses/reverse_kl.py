"""Owns reverse_kl: KL(draft, target), which makes the draft avoid what the target would not say.

Refuses to know sampling from the draft: it is taken at the positions of the text it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.losses.base import LOSSES
from distill.losses.divergence import Divergence


@LOSSES.register("reverse_kl")
class ReverseKL(Divergence):
    """sum_v q_v (log q_v - log p_v) in nats (MiniLLM, Gu et al. 2023, arXiv 2306.08543).

    Mode seeking: mass the draft puts where the target has none is punished, missing mass is not.
    """

    def of(self, target_log_BTV: Tensor, draft_log_BTV: Tensor) -> Tensor:
        """The definition."""
        return (draft_log_BTV.exp() * (draft_log_BTV - target_log_BTV)).sum(dim=-1)

    def closed_form(self, target_log_NV: Tensor, draft_log_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Closed form: d loss / d z_j = q_j (log q_j - log p_j - loss)."""
        difference_NV = torch.sub(draft_log_NV, target_log_NV, out=target_log_NV)
        probs_NV = draft_log_NV.exp_()
        loss_N = torch.linalg.vecdot(probs_NV, difference_NV)
        return loss_N, difference_NV.sub_(loss_N.unsqueeze(-1)).mul_(probs_NV)
