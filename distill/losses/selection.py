"""Owns token selection: which positions a step trains, by the gap of two drafts' losses.

Refuses to know where the reference draft comes from and how its losses are computed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def select_by_gap(
    draft_loss_N: Tensor, reference_loss_N: Tensor, *, keep_fraction: float
) -> Tensor:
    """Return keep_N (bool): the ceil(keep_fraction N) positions with the largest gap.

    The gap is draft loss - reference loss: large where the reference shows that a draft of this
    size can do better, small where both fail (AdaSPEC, arXiv 2510.19779, section 3.2). Of equal
    gaps the earlier position is kept. A gap that is not a number is kept first, so that it is
    reported and not hidden.
    """
    assert 0 < keep_fraction <= 1, "refused when the config is read"
    gap_N = torch.nan_to_num(draft_loss_N - reference_loss_N, nan=torch.inf)
    num_kept = math.ceil(keep_fraction * len(gap_N) - 1e-9)  # 0.1 * 30 is 3.0000000000000004
    kept = torch.argsort(gap_N, descending=True, stable=True)[:num_kept]
    return torch.zeros_like(gap_N, dtype=torch.bool).index_fill_(0, kept, True)
