"""Owns total_variation: 1 - alpha, the rejection probability itself.

Refuses to know how to get near the target: its gradient vanishes where the two do not overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.losses.base import LOSSES
from distill.losses.overlap import OverlapLoss


@LOSSES.register("total_variation")
class TotalVariation(OverlapLoss):
    """1 - sum_v min(p_v, q_v), the probability that speculative sampling rejects a draft token.

    Equal to half the L1 distance (Leviathan et al. 2023, arXiv 2211.17192, definition 3.2).
    A probability, not nats.
    """

    def of_overlap(self, alpha_BT: Tensor) -> Tensor:
        """In [0, 1]."""
        return 1.0 - alpha_BT

    def slope(self, alpha_N: Tensor) -> Tensor:
        """-1 everywhere."""
        return torch.full_like(alpha_N, -1.0)
