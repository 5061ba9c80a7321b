"""Owns uncertainty: an estimate and its percentile bootstrap interval over prompts.

Refuses to know what the columns mean: it resamples rows of a table and sums them.

Why prompts and not tokens: tokens of one answer share a prefix and a topic, so they are far from
independent; a prompt is the unit that was drawn. A statistic is therefore a function of column
sums over the resampled prompts, which makes every rate here a ratio of sums and never a mean of
per-prompt ratios (a two-token answer must not weigh as much as a hundred-token one).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Column sums [..., C] -> values [...]; undefined values are NaN."""

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number and its interval.

    ``value`` is None where the statistic is undefined (nothing was tested); ``low`` and ``high``
    are None with fewer than two prompts, because one prompt says nothing about its spread.
    """

    value: float | None
    low: float | None
    high: float | None
    num_prompts: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` restores an equal object."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "num_prompts": self.num_prompts,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Estimate:
        """Inverse of ``to_dict``."""
        return cls(data["value"], data["low"], data["high"], data["num_prompts"])


def estimate(
    columns_NC: npt.ArrayLike,
    statistic: Statistic,
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Percentile bootstrap of ``statistic`` over the N rows (Efron 1979).

    Args:
        columns_NC: one row per prompt, one column per count.
        statistic: maps column sums [..., C] to values [...].
        seed: the resamples depend on it and on N alone, so cells over the same prompts share them.

    Resamples in which the statistic is undefined are left out of the percentiles.
    """
    table_NC = np.asarray(columns_NC, dtype=np.float64)
    if table_NC.ndim == 1:
        table_NC = table_NC[:, None]
    num_prompts = len(table_NC)
    if num_prompts == 0:
        return Estimate(None, None, None, 0)
    value = float(statistic(table_NC.sum(axis=0)))
    if not np.isfinite(value):
        return Estimate(None, None, None, num_prompts)
    if num_prompts < 2:
        return Estimate(value, None, None, num_prompts)
    weights_RN = _resample_weights(num_prompts, seed, num_resamples)
    values_R = statistic(weights_RN @ table_NC)
    defined = values_R[np.isfinite(values_R)]
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(defined, [tail, 100.0 - tail])
    return Estimate(value, float(low), float(high), num_prompts)


def ratio(sums: Floats) -> Floats:
    """Column 0 / column 1."""
    return divide(sums[..., 0], sums[..., 1])


def ratio_difference(sums: Floats) -> Floats:
    """Column 0 / column 1 minus column 2 / column 3: a PAIRED difference over the same prompts."""
    return divide(sums[..., 0], sums[..., 1]) - divide(sums[..., 2], sums[..., 3])


def ratio_of_ratios(sums: Floats) -> Floats:
    """(Column 0 / column 1) / (column 2 / column 3): a speedup from times and token counts."""
    return divide(sums[..., 0] * sums[..., 3], sums[..., 1] * sums[..., 2])


def divide(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise quotient; NaN, without a warning, where the denominator is zero."""
    top = np.asarray(numerator, dtype=np.float64)
    bottom = np.asarray(denominator, dtype=np.float64)
    out = np.full(np.broadcast(top, bottom).shape, np.nan)
    np.divide(top, bottom, out=out, where=bottom != 0)
    return out


@functools.lru_cache(maxsize=16)
def _resample_weights(num_prompts: int, seed: int, num_resamples: int) -> Floats:
    """How often each resample draws each prompt, [R, N]: a sum over draws is then one matmul."""
    generator = np.random.default_rng(seed)
    draws_RN = generator.integers(0, num_prompts, (num_resamples, num_prompts))
    flat = draws_RN + num_prompts * np.arange(num_resamples)[:, None]
    counts = np.bincount(flat.ravel(), minlength=num_resamples * num_prompts)
    return counts.reshape(num_resamples, num_prompts).astype(np.float64)
