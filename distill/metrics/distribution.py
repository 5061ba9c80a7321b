"""Owns the test of drawn tokens against the law they should follow, and what it could have seen.

Refuses to know who drew them: counts and probabilities in, a verdict with its power out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

SIGNIFICANCE = 0.001
"""How often a faultless runtime is called wrong. Draws are seeded, so a run does not flicker."""

POWER = 0.8
MIN_EXPECTED = 5.0
"""Cells expected less often are merged: below it the chi-square law is no good approximation."""


@dataclass(frozen=True)
class LawTest:
    """Pearson's test of one or more samples.

    ``detectable_effect`` is Cohen's w = sqrt(sum (o - e)^2 / e) (o, e probabilities) that would be
    found with probability ``power``. A change of the law with a total variation of
    ``detectable_total_variation`` = w / 2 or more has at least that effect, so it would be found:
    a change between the cells, that is. What moves inside a cell of many tokens is not seen.

    ``p_value`` and ``is_same_law`` are None where no two cells could be told apart: nothing was
    tested then, which is no pass.
    """

    statistic: float
    degrees_of_freedom: int
    p_value: float | None
    num_samples: int
    significance: float
    power: float
    detectable_effect: float | None
    detectable_total_variation: float | None
    is_same_law: bool | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def law_test(
    samples: Sequence[tuple[Sequence[int], Sequence[float]]], *, significance: float = SIGNIFICANCE
) -> LawTest:
    """Pearson's chi-square of counts against probabilities, pooled over independent samples.

    Args:
        samples: (counts per cell, probability per cell) of each sample; probabilities sum to 1.

    Statistics and degrees of freedom of independent samples add up; a sample of nothing adds
    nothing. A count in a cell of probability zero is a certain fault: the p-value is then 0.
    """
    statistic, degrees, total = 0.0, 0, 0
    is_impossible = False
    for counts, probabilities in samples:
        observed = np.asarray(counts, dtype=np.float64)
        law = np.asarray(probabilities, dtype=np.float64)
        assert observed.shape == law.shape
        assert abs(law.sum() - 1.0) < 1e-6, f"probabilities sum to {law.sum()}"
        number = float(observed.sum())
        if not number:  # nothing drawn: 0 / 0 in every cell
            continue
        is_impossible |= bool(observed[law == 0.0].sum())
        merged, expected = _merged(observed, law * number)
        statistic += float((np.square(merged - expected) / expected).sum())
        degrees += len(expected) - 1
        total += int(number)
    p_value = 0.0 if is_impossible else None
    if degrees and not is_impossible:
        p_value = float(stats.chi2.sf(statistic, degrees))
    effect = detectable_effect(total, degrees, significance=significance)
    return LawTest(
        statistic=statistic,
        degrees_of_freedom=degrees,
        p_value=p_value,
        num_samples=total,
        significance=significance,
        power=POWER,
        detectable_effect=effect,
        detectable_total_variation=None if effect is None else min(1.0, effect / 2),
        is_same_law=None if p_value is None else p_value >= significance,
    )


def detectable_effect(
    num_samples: int,
    degrees_of_freedom: int,
    *,
    significance: float = SIGNIFICANCE,
    power: float = POWER,
) -> float | None:
    """Cohen's w that N draws find with the given power; None without a degree of freedom.

    Under an effect w the statistic is non-central chi-square with non-centrality N w^2 (Cohen 1988,
    section 7.4).
    """
    if num_samples == 0 or degrees_of_freedom == 0:
        return None
    threshold = stats.chi2.isf(significance, degrees_of_freedom)

    def shortfall(noncentrality: float) -> float:
        return float(stats.ncx2.sf(threshold, degrees_of_freedom, noncentrality)) - power

    high = 1.0
    while shortfall(high) < 0:
        high *= 2
    return float(np.sqrt(optimize.brentq(shortfall, 1e-9, high) / num_samples))


def _merged(observed: Any, expected: Any) -> tuple[Any, Any]:
    """Cells too rare to test alone, put together; what is still too rare joins the rarest other."""
    is_rare = expected < MIN_EXPECTED
    kept, wanted = observed[~is_rare], expected[~is_rare]
    if is_rare.any():
        rest, rest_wanted = observed[is_rare].sum(), expected[is_rare].sum()
        if rest_wanted >= MIN_EXPECTED or len(wanted) == 0:
            kept, wanted = np.append(kept, rest), np.append(wanted, rest_wanted)
        else:
            rarest = int(wanted.argmin())
            kept[rarest] += rest
            wanted[rarest] += rest_wanted
    return kept, wanted
