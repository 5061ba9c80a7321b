"""Owns the distillation losses: one file each, found by name in `LOSSES`.

Refuses to know models, batches, optimisers and where the target's states came from.
"""

from __future__ import annotations

from distill.losses.base import LOSSES, HiddenLoss, LogitLoss, Loss
from distill.losses.chunked import ChunkedLoss, chunked_loss
from distill.losses.head import Head

__all__ = ["LOSSES", "ChunkedLoss", "Head", "HiddenLoss", "LogitLoss", "Loss", "chunked_loss"]
