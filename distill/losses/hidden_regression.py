"""Owns hidden_regression: smooth L1 between the draft's and the target's final hidden states.

Refuses to know vocabularies and heads: it needs equal widths and, to mean anything, equal heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.losses.base import LOSSES, HiddenLoss
from distill.sampling import at_least_float32


@LOSSES.register("hidden_regression")
class HiddenRegression(HiddenLoss):
    """Mean over the width of the Huber loss with threshold 1 (EAGLE, arXiv 2401.15077, section 3).

    A draft that shares the target's frozen head and reproduces its last hidden state (after the
    final norm) reproduces its logits. No vocabulary-sized product is needed, so it is the
    cheapest warm start there is; it weighs all directions alike, so a KL phase should follow.
    """

    def per_position(self, draft_hidden_BTD: Tensor, target_hidden_BTD: Tensor) -> Tensor:
        """Return loss_BT >= 0. Both states must have the same width."""
        dtype = at_least_float32(draft_hidden_BTD.dtype)
        return torch.nn.functional.smooth_l1_loss(
            draft_hidden_BTD.to(dtype), target_hidden_BTD.to(dtype), reduction="none"
        ).mean(dim=-1)
