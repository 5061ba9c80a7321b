"""Owns acceptance: -log alpha, the acceptance rate as a likelihood.

Refuses to know a weight between losses: that is `acceptance_hybrid.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.losses.base import LOSSES
from distill.losses.overlap import OverlapLoss

# Below this overlap the gradient of -log alpha is held at 1 / ALPHA_FLOOR times that of alpha:
# one disjoint position must not outweigh a whole batch.
ALPHA_FLOOR = 1.0e-3


@LOSSES.register("acceptance")
class Acceptance(OverlapLoss):
    """-log sum_v min(p_v, q_v) in nats (the "alpha" form of arXiv 2602.23881).

    Its gradient is total variation's divided by alpha, so a position that is almost never
    accepted is not ignored.
    """

    def of_overlap(self, alpha_BT: Tensor) -> Tensor:
        """-log alpha, continued below ALPHA_FLOOR by its tangent (finite at alpha = 0)."""
        shortfall_BT = (ALPHA_FLOOR - alpha_BT).clamp_min(0.0)
        return -torch.log(alpha_BT.clamp_min(ALPHA_FLOOR)) + shortfall_BT / ALPHA_FLOOR

    def slope(self, alpha_N: Tensor) -> Tensor:
        """-1 / max(alpha, ALPHA_FLOOR)."""
        return -1.0 / alpha_N.clamp_min(ALPHA_FLOOR)
