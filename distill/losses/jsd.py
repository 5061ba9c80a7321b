"""Owns jsd: the generalised Jensen-Shannon divergence, between forward_kl and reverse_kl.

Refuses to know which beta is best: that depends on the task and the sampling temperature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.losses.base import LOSSES
from distill.losses.divergence import Divergence


@LOSSES.register("jsd")
class JSD(Divergence):
    """beta KL(p, m) + (1 - beta) KL(q, m) with m = beta p + (1 - beta) q, in nats.

    GKD's definition (Agarwal et al. 2023, arXiv 2306.13649, section 2): bounded, so one position
    where the draft is far off cannot outweigh the batch. jsd / beta tends to forward_kl as beta
    tends to 0, jsd / (1 - beta) to reverse_kl as beta tends to 1; AT 0 and 1 it is 0 whatever
    the draft does, so those are refused.
    """

    def __init__(self, *, temperature: float = 1.0, beta: float = 0.5) -> None:
        super().__init__(temperature=temperature)
        if not 0 < beta < 1:
            instead = "reverse_kl" if beta >= 1 else "forward_kl"
            raise ConfigError(
                f"beta of jsd is {beta}, but it lies between 0 and 1, and at either end the "
                f"divergence is 0 for every draft. Use {instead}, its scaled limit there, or "
                f"beta: 0.5."
            )
        self.beta = beta

    def _mixture(self, target_log: Tensor, draft_log: Tensor) -> Tensor:
        # logs are added to, not mixed: a mean of logs is another law (a geometric mean)
        return torch.logaddexp(target_log + math.log(self.beta), draft_log + math.log1p(-self.beta))

    def of(self, target_log_BTV: Tensor, draft_log_BTV: Tensor) -> Tensor:
        """The definition."""
        mixture_BTV = self._mixture(target_log_BTV, draft_log_BTV)
        from_target_BT = (target_log_BTV.exp() * (target_log_BTV - mixture_BTV)).sum(dim=-1)
        from_draft_BT = (draft_log_BTV.exp() * (draft_log_BTV - mixture_BTV)).sum(dim=-1)
        return self.beta * from_target_BT + (1.0 - self.beta) * from_draft_BT

    def closed_form(self, target_log_NV: Tensor, draft_log_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Closed form: d loss / d z_j = (1 - beta) q_j (log q_j - log m_j - KL(q, m))."""
        mixture_NV = self._mixture(target_log_NV, draft_log_NV)
        difference_NV = target_log_NV - mixture_NV
        from_target_N = torch.linalg.vecdot(target_log_NV.exp_(), difference_NV)
        difference_NV = torch.sub(draft_log_NV, mixture_NV, out=difference_NV)
        draft_NV = draft_log_NV.exp_()
        from_draft_N = torch.linalg.vecdot(draft_NV, difference_NV)
        grad_NV = difference_NV.sub_(from_draft_N.unsqueeze(-1)).mul_(draft_NV)
        loss_N = self.beta * from_target_N + (1.0 - self.beta) * from_draft_N
        return loss_N, grad_NV.mul_(1.0 - self.beta)
