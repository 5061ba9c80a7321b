"""Owns the target run beside the draft: what it knows, where no store kept it.

Refuses to know losses and files; it is given a model and rows.

N positions that carry loss, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distill.losses import FullKnowledge, Head
from distill.losses.chunked import default_chunk_tokens
from distill.training.data import Row, pad
from distill.training.trunk import DraftTrunk


class LiveTarget:
    """A target in memory. Nothing is rounded or cut; a step pays a forward pass of the target."""

    def __init__(self, model: Any, *, target_head: Head, needs_logsumexp: bool) -> None:
        """`target_head` has the rows of all tokens; their log-sum-exp is needed on a subset."""
        self._trunk = DraftTrunk(model)
        self._device = model.device
        self._head = target_head if needs_logsumexp else None

    @torch.no_grad()
    def of(self, rows: Sequence[Row]) -> FullKnowledge:
        """Run the target; see :class:`distill.training.data.TargetSource`."""
        input_ids_BT, flat_positions_N = pad(rows)
        hidden_ND = self._trunk(input_ids_BT.to(self._device), flat_positions_N.to(self._device))
        return FullKnowledge(hidden_ND, self._logsumexp(hidden_ND))

    def _logsumexp(self, hidden_ND: Tensor) -> Tensor | None:
        if self._head is None:
            return None
        chunk = default_chunk_tokens(self._head.num_rows)
        parts = [
            self._head.logits(part_ND).float().logsumexp(-1) for part_ND in hidden_ND.split(chunk)
        ]
        return torch.cat(parts)
