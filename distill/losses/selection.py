"""Owns token selection: which positions a step trains, by the gap of two drafts' losses.

Refuses to know where the reference draft comes from and how its losses are computed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distill.errors import TrainingError


def select_by_gap(
    draft_loss_N: Tensor, reference_loss_N: Tensor, *, keep_fraction: float
) -> Tensor:
    """Return keep_N (bool): the ceil(keep_fraction N) positions with the largest gap.

    The gap is draft loss - reference loss: large where the reference shows that a draft of this
    size can do better, small where both fail (AdaSPEC, arXiv 2510.19779, section 3.2). Of equal
    gaps the earlier position is kept. A draft's loss that is not a number is kept first, so that it
    is reported and not hidden.

    Raises:
        TrainingError: the reference's loss is not a number where the draft's is one.
    """
    assert 0 < keep_fraction <= 1, "refused when the config is read"
    blind_N = draft_loss_N.isfinite() & ~reference_loss_N.isfinite()
    if blind_N.any():
        raise TrainingError(
            f"the reference draft's loss is not a number at {int(blind_N.sum())} of "
            f"{len(blind_N)} positions where the draft's is, so it cannot say which tokens to "
            f"keep. Name another model in distill.reference, leave it out (this draft as it "
            f"starts), or set keep_fraction to 1"
        )
    gap_N = torch.nan_to_num(draft_loss_N - reference_loss_N, nan=torch.inf)
    num_kept = math.ceil(keep_fraction * len(gap_N) - 1e-9)  # 0.1 * 30 is 3.0000000000000004
    kept = torch.argsort(gap_N, descending=True, stable=True)[:num_kept]
    return torch.zeros_like(gap_N, dtype=torch.bool).index_fill_(0, kept, True)
