"""Owns what stops a run: a loss or a gradient that is not a number, a loss that leaps.

Refuses to know how a step is computed; it is shown numbers before the weights move.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.errors import TrainingError
from distill.training.checkpoint import saved_step
from distill.training.data import Batch

_NUM_REMEMBERED = 50  # steps of the same loss that a step is compared with
_NUM_NEEDED = 20  # before so many, a falling loss looks like any other
_SMALL_LOSS = 0.01  # below it a multiple is noise
_NUM_SHOWN = 16

_WAY_OUT = (
    "Lower distill.learning_rate or raise distill.warmup_steps; if it stays at the same rows, "
    "look at them in the generate artifact."
)
# nothing was updated yet, so no learning rate did this
_WAY_OUT_AT_FIRST = (
    "No step was taken yet, so it comes from the draft as it starts or from what generate kept of "
    "these rows: compute in float32 (distill.compute_dtype), start another draft "
    "(distill.initialization), or generate these rows again."
)


class Guard:
    """Refuses to go on from numbers that ruin the weights; every refusal says where it stands.

    `max_loss_ratio`: how many times the median of the last steps a loss may be; None: any.
    """

    def __init__(self, max_loss_ratio: float | None, work_dir: Path) -> None:
        self._max_loss_ratio, self._work_dir = max_loss_ratio, work_dir

    def check_batch(self, step: int, name: str, batch: Batch, loss_N: Tensor) -> None:
        """Check one micro-batch's losses.

        Raises:
            TrainingError: one of them is not a number; names its rows.
        """
        if torch.isfinite(loss_N.sum()):
            return
        bad_N = ~torch.isfinite(loss_N.cpu())
        rows = sorted({batch.row_ids[i] for i in batch.row_index_N[bad_N].tolist()})
        raise TrainingError(
            f"step {step}: {name} is not a number at {int(bad_N.sum())} of {len(bad_N)} "
            f"positions, in rows {_listed(rows)}. {_way_out(step)} {self._last_good()}"
        )

    def check_step(
        self,
        step: int,
        name: str,
        loss: float,
        *,
        row_ids: Iterable[str],
        log: Sequence[Mapping[str, Any]],
    ) -> None:
        """Check a whole step's loss against the last ones of the same name in the log.

        Raises:
            TrainingError: it is more than `max_loss_ratio` times their median.
        """
        if self._max_loss_ratio is None:
            return
        past = [record["loss"] for record in log if record.get("loss_name") == name]
        if len(past) < _NUM_NEEDED:
            return
        median = statistics.median(past[-_NUM_REMEMBERED:])
        if loss <= self._max_loss_ratio * max(median, _SMALL_LOSS):
            return
        raise TrainingError(
            f"step {step}: {name} leapt to {loss:.4g}, more than {self._max_loss_ratio:g} times "
            f"the median {median:.4g} of the steps before, on rows {_listed(list(row_ids))}. "
            f"{_WAY_OUT} To go on all the same, set distill.max_loss_ratio higher, or to null. "
            f"{self._last_good()}"
        )

    def check_norm(
        self, step: int, name: str, norm: float, *, loss: float, row_ids: Iterable[str]
    ) -> None:
        """Check the norm of a step's gradient.

        Raises:
            TrainingError: it is not a finite number.
        """
        if norm < float("inf"):
            return
        raise TrainingError(
            f"step {step}: the gradient of {name} has norm {norm} although its loss is {loss:.4g}, "
            f"on rows {_listed(list(row_ids))}. {_way_out(step)} {self._last_good()}"
        )

    def _last_good(self) -> str:
        step = saved_step(self._work_dir)
        if step is None:
            return "No state was saved yet."
        return f"The last good state is of step {step}, in {self._work_dir}."


def _way_out(step: int) -> str:
    return _WAY_OUT if step else _WAY_OUT_AT_FIRST


def _listed(rows: Sequence[str]) -> str:
    more = f", ... ({len(rows)} in all)" if len(rows) > _NUM_SHOWN else ""
    return ", ".join(rows[:_NUM_SHOWN]) + more
