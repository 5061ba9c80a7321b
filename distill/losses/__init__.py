"""Owns the distillation losses: one file each, found by name in `LOSSES`.

Refuses to know models, batches, optimisers and where the target's states came from.
"""

from __future__ import annotations

from distill.losses.base import LOSSES, HiddenLoss, Knowledge, LogitLoss, Loss
from distill.losses.chunked import ChunkedLoss, chunked_loss
from distill.losses.head import Head
from distill.losses.knowledge import (
    DraftColumns,
    FullKnowledge,
    SampledKnowledge,
    TargetKnowledge,
    TopKnowledge,
)
from distill.losses.selection import select_by_gap

__all__ = [
    "LOSSES",
    "ChunkedLoss",
    "DraftColumns",
    "FullKnowledge",
    "Head",
    "HiddenLoss",
    "Knowledge",
    "LogitLoss",
    "Loss",
    "SampledKnowledge",
    "TargetKnowledge",
    "TopKnowledge",
    "chunked_loss",
    "select_by_gap",
]
