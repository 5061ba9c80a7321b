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
    """Pearson's test of one or more samples, an exact one of those whose law is nearly certain.

    ``detectable_effect`` is Cohen's w = sqrt(sum (o - e)^2 / e) (o, e probabilities) that would be
    found with probability ``power``. A change of the law with a total variation of
    ``detectable_total_variation`` = w / 2 or more has at least that effect, so it would be found:
    a change between the cells, that is. What moves inside a cell of many tokens is not seen. Where
    every sample's law is nearly certain there is no effect, and the variation is that of the exact
    test.

    ``p_value`` and ``is_same_law`` are None where there were too few draws to tell two cells apart:
    nothing was tested then, which is no pass.
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

    A law that is nearly certain (a temperature near 0) has one cell that all draws should be in,
    however many there are, and so no degree of freedom. There the draws outside it are counted:
    too many of them, by the binomial law, are a fault. The tests together keep to
    ``significance`` (Bonferroni).
    """
    statistic, degrees, total, num_pearson = 0.0, 0, 0, 0
    certain: list[_Certain] = []
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
        total += int(number)
        merged, expected = _merged(observed, law * number)
        if len(expected) > 1:
            statistic += float((np.square(merged - expected) / expected).sum())
            degrees += len(expected) - 1
            num_pearson += int(number)
        elif len(law) > 1 and law.max() * number >= MIN_EXPECTED:
            certain.append(_Certain.of(observed, law))
    p_values = [one.p_value for one in certain]
    if degrees:
        p_values.append(float(stats.chi2.sf(statistic, degrees)))
    p_value = min(1.0, len(p_values) * min(p_values)) if p_values else None
    if is_impossible:
        p_value = 0.0
    each = significance / max(1, len(p_values))
    effect = detectable_effect(num_pearson, degrees, significance=each)
    variations = [one.detectable_total_variation(each) for one in certain]
    variations += [] if effect is None else [effect / 2]
    return LawTest(
        statistic=statistic,
        degrees_of_freedom=degrees,
        p_value=p_value,
        num_samples=total,
        significance=significance,
        power=POWER,
        detectable_effect=effect,
        detectable_total_variation=min(1.0, max(variations)) if variations else None,
        is_same_law=None if p_value is None else p_value >= significance,
    )


@dataclass(frozen=True)
class _Certain:
    """Draws of a law that nearly always gives one cell: how many are elsewhere, and should be."""

    num_draws: int
    num_elsewhere: int
    probability_elsewhere: float

    @classmethod
    def of(cls, observed: Any, law: Any) -> _Certain:
        place = int(law.argmax())
        elsewhere = float(np.delete(law, place).sum())  # not 1 - max: that rounds 1e-20 away
        return cls(int(observed.sum()), int(np.delete(observed, place).sum()), elsewhere)

    @property
    def p_value(self) -> float:
        """P(so many elsewhere, or more). Too few are no sign: fewer than 5 are expected."""
        draws, chance = self.num_draws, self.probability_elsewhere
        return float(stats.binom.sf(self.num_elsewhere - 1, draws, chance))

    def detectable_total_variation(self, significance: float) -> float:
        """The further mass elsewhere that would be called a fault with probability ``POWER``."""
        draws, chance = self.num_draws, self.probability_elsewhere
        # The fewest that are too many; P(Bin(n, p) >= c) is the beta law's I_p(c, n - c + 1).
        least = int(stats.binom.isf(significance, draws, chance)) + 1
        if least > draws:
            return 1.0
        return float(stats.beta.ppf(POWER, least, draws - least + 1)) - chance


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
