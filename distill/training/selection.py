"""Owns which tokens of a step are trained where a phase keeps only a fraction of them.

Refuses to know how a draft is trained; it is told each token's loss and runs the reference draft.

N positions that carry loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from distill.errors import PairMismatchError
from distill.losses import Head, select_by_gap
from distill.losses.head import head_of
from distill.training.data import Batch
from distill.training.processes import Processes
from distill.training.trunk import DraftTrunk

# (final states, head, batch) -> loss_N of every position, without gradient
Losses = Callable[[Tensor, Head, Batch], Tensor]


class Reference:
    """A frozen draft whose losses tell which tokens a draft of its size can learn.

    One that was distilled already is AdaSPEC's choice (arXiv 2510.19779). The draft as it starts
    costs no training: the tokens kept are then those that improved least so far.
    """

    def __init__(
        self, model: Any, *, num_rows: int, token_ids_V: Tensor | None, dtype: torch.dtype
    ) -> None:
        """`num_rows`: tokens both models know. The model is held in evaluation mode from now on.

        Raises:
            PairMismatchError: its vocabulary is smaller than that.
        """
        head = head_of(model)
        if head.num_rows < num_rows:
            raise PairMismatchError(
                f"the reference draft has {head.num_rows} tokens, but target and draft share "
                f"{num_rows}; use a reference with the target's vocabulary, or leave "
                f"distill.reference out"
            )
        self._trunk = DraftTrunk(model.eval().requires_grad_(False))
        self._head = head.first(num_rows).subset(token_ids_V).to(dtype)
        self._device, self._dtype = model.device, dtype

    def losses(self, batch: Batch, losses: Losses) -> Tensor:
        """Return the reference's loss_N on a batch."""
        is_low = self._dtype != torch.float32
        with torch.autocast(self._device.type, dtype=self._dtype) if is_low else nullcontext():
            hidden_ND = self._trunk(
                batch.input_ids_BT.to(self._device), batch.flat_positions_N.to(self._device)
            )
        return losses(hidden_ND.to(self._dtype), self._head, batch)


def kept_tokens(
    mine: Sequence[tuple[int, Batch]],
    sizes: Sequence[int],
    *,
    draft_losses: Callable[[Batch], Tensor],
    reference: Reference,
    losses: Losses,
    keep_fraction: float,
    processes: Processes,
) -> tuple[dict[int, Tensor], int]:
    """Return ({micro-batch: weight_N of 0 and 1}, how many tokens of the step are kept).

    The choice is made over the whole step, so it depends neither on its micro-batches nor on the
    processes that share them. `mine` are this process's micro-batches with their place in the
    step, `sizes` the positions of all of them. The price is one more forward pass of the draft
    and one of the reference.
    """
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    total = sum(sizes)
    pair_2N: Tensor | None = None
    with torch.no_grad():
        for index, batch in mine:
            draft_N = draft_losses(batch)
            if pair_2N is None:
                pair_2N = torch.zeros(2, total, device=draft_N.device)
            place = slice(starts[index], starts[index] + sizes[index])
            pair_2N[0, place] = draft_N
            pair_2N[1, place] = reference.losses(batch, losses)
    pair_2N = processes.add_tensor(torch.zeros(2, total) if pair_2N is None else pair_2N)
    keep_N = select_by_gap(pair_2N[0], pair_2N[1], keep_fraction=keep_fraction)
    weights = {
        index: keep_N[starts[index] : starts[index] + sizes[index]].float() for index, _ in mine
    }
    return weights, int(keep_N.sum())
