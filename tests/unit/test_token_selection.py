"""Owns that the tokens a step keeps are chosen over the whole step, whoever holds its parts.

Refuses to know which gap is large: that is select_by_gap's, in test_losses.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from distill.training.data import Batch
from distill.training.processes import Processes
from distill.training.selection import Reference, kept_tokens

# the gaps of a step of three micro-batches
GAPS = [[0.1, 5.0], [4.0, -1.0, 0.3], [2.0]]


class _Ranks:
    """Adds up what every rank holds, as the real ones do."""

    def __init__(self, others: Tensor) -> None:
        self._others = others

    def add_tensor(self, tensor: Tensor) -> Tensor:
        return tensor + self._others


class _Easy:
    """A reference whose loss is 1 everywhere."""

    def losses(self, batch: Batch, losses: Any) -> Tensor:
        return torch.ones(len(batch.flat_positions_N))


def _batch(gaps: list[float]) -> Batch:
    return cast(Batch, type("B", (), {"flat_positions_N": torch.tensor(gaps), "gaps": gaps})())


def _keep(mine: Iterable[int], others: Tensor) -> tuple[dict[int, list[float]], int]:
    weights, num_kept = kept_tokens(
        [(index, _batch(GAPS[index])) for index in mine],
        [len(gaps) for gaps in GAPS],
        draft_losses=lambda batch: torch.tensor(cast(Any, batch).gaps) + 1.0,
        reference=cast(Reference, _Easy()),
        losses=cast(Any, None),
        keep_fraction=0.5,
        processes=cast(Processes, _Ranks(others)),
    )
    return {index: weight_N.tolist() for index, weight_N in weights.items()}, num_kept


def _held_by(indices: Iterable[int]) -> Tensor:
    """What ranks with these micro-batches would add."""
    pair_2N = torch.zeros(2, 6)
    start = 0
    for index, gaps in enumerate(GAPS):
        if index in set(indices):
            pair_2N[0, start : start + len(gaps)] = torch.tensor(gaps) + 1.0
            pair_2N[1, start : start + len(gaps)] = 1.0
        start += len(gaps)
    return pair_2N


EXPECTED = {0: [0.0, 1.0], 1: [1.0, 0.0, 0.0], 2: [1.0]}


@pytest.mark.parametrize("mine", [[0, 1, 2], [0, 2], [1], []], ids=str)
def test_every_rank_keeps_the_same_half_of_the_whole_step(mine: list[int]) -> None:
    others = [index for index in range(3) if index not in mine]
    weights, num_kept = _keep(mine, _held_by(others))
    assert weights == {index: EXPECTED[index] for index in mine}
    assert num_kept == 3
