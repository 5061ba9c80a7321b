"""Owns what the divergences of two laws share: log space on both sides, one temperature.

Refuses to know which divergence: a subclass has its value and its closed-form gradient.
"""

from __future__ import annotations

from torch import Tensor

from distill.losses.base import LogitLoss, log_probs, scratch_log_probs


class Divergence(LogitLoss):
    """A number of p and q that is 0 where they are equal, and not negative.

    On a vocabulary subset p is the target renormalised on the subset. Both laws stay in log
    space; a softmax as the reference would underflow and its gradient be NaN.
    """

    def of(self, target_log_BTV: Tensor, draft_log_BTV: Tensor) -> Tensor:
        """Return loss_BT of two log-laws, differentiable in the draft's."""
        raise NotImplementedError

    def closed_form(self, target_log_NV: Tensor, draft_log_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss_N, d loss_N / d (draft logits / temperature)); may overwrite both laws."""
        raise NotImplementedError

    def per_position(
        self,
        draft_logits_BTV: Tensor,
        target_logits_BTV: Tensor,
        target_logsumexp_BT: Tensor | None = None,
    ) -> Tensor:
        """Return loss_BT; at least 0 up to rounding."""
        return self.of(
            log_probs(target_logits_BTV, self.temperature),
            log_probs(draft_logits_BTV, self.temperature),
        )

    def value_and_grad(
        self,
        draft_logits_NV: Tensor,
        target_logits_NV: Tensor,
        target_logsumexp_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The closed form, through the temperature."""
        loss_N, grad_NV = self.closed_form(
            scratch_log_probs(target_logits_NV, self.temperature),
            scratch_log_probs(draft_logits_NV, self.temperature),
        )
        return loss_N, grad_NV if self.temperature == 1.0 else grad_NV.div_(self.temperature)
