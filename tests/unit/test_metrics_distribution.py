"""Owns the tests of the law test: against scipy, its false alarms, and the power it claims.

Refuses to run a model: laws are vectors, draws are seeded.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from distill.metrics.distribution import detectable_effect, law_test

LAW = [0.4, 0.3, 0.2, 0.1]


def test_statistic_and_p_value_are_pearsons() -> None:
    counts = [45, 28, 17, 10]
    expected = stats.chisquare(counts, [100 * p for p in LAW])
    found = law_test([(counts, LAW)])
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.degrees_of_freedom, found.num_samples) == (3, 100)
    assert found.is_same_law


def test_independent_samples_add_up() -> None:
    one, other = ([45, 28, 17, 10], LAW), ([25, 75], [0.5, 0.5])
    both = law_test([one, other])
    assert both.statistic == pytest.approx(law_test([one]).statistic + law_test([other]).statistic)
    assert both.degrees_of_freedom == 4
    assert not both.is_same_law


def test_rare_cells_are_merged_by_hand() -> None:
    # Expected 80, 14, 3, 3: the last two are tested as one cell of 6.
    found = law_test([([80, 14, 0, 6], [0.8, 0.14, 0.03, 0.03])])
    assert found.statistic == pytest.approx(0.0, abs=1e-12)
    assert found.degrees_of_freedom == 2


def test_a_token_the_target_never_says_is_a_certain_fault() -> None:
    found = law_test([([50, 49, 1], [0.5, 0.5, 0.0])])
    assert found.p_value == 0.0
    assert not found.is_same_law


def test_the_right_law_is_seldom_called_wrong_and_a_detectable_one_is_found() -> None:
    rng = np.random.default_rng(3)
    number = 400
    effect = detectable_effect(number, 3)
    assert effect is not None
    # A shift of exactly that effect: w^2 = sum d^2 / p.
    direction = np.array([1.0, -1.0, 0.0, 0.0])
    size = effect / np.sqrt((direction**2 / np.array(LAW)).sum())
    shifted = np.array(LAW) + size * direction
    false_alarms = sum(
        not law_test([(rng.multinomial(number, LAW), LAW)]).is_same_law for _ in range(300)
    )
    found = sum(
        not law_test([(rng.multinomial(number, shifted), LAW)]).is_same_law for _ in range(300)
    )
    assert false_alarms <= 3  # 0.3 expected
    assert 0.7 <= found / 300 <= 0.9  # 0.8 claimed


def test_a_total_variation_as_stated_has_at_least_the_detectable_effect() -> None:
    found = law_test([([160, 120, 80, 40], LAW)])
    assert found.detectable_total_variation is not None
    assert found.detectable_effect is not None
    # Cauchy-Schwarz: TV <= w / 2, with equality for two cells of one half.
    shift = found.detectable_total_variation
    assert np.sqrt(2 * shift**2 / 0.5) == pytest.approx(found.detectable_effect)


def test_more_draws_find_smaller_changes() -> None:
    effects = [detectable_effect(n, 5) for n in (100, 400)]
    assert effects[0] == pytest.approx(2 * effects[1], rel=1e-6)  # type: ignore[operator]


def test_nothing_drawn_finds_nothing() -> None:
    found = law_test([])
    assert (found.p_value, found.detectable_effect) == (None, None)


@pytest.mark.parametrize("sample", [([64], [1.0]), ([3, 1], [0.6, 0.4]), ([0, 0], [0.5, 0.5])])
def test_without_a_degree_of_freedom_the_law_is_not_judged(
    sample: tuple[list[int], list[float]],
) -> None:
    # One cell, two cells too rare to tell apart, and no draw at all (0 / 0 in every cell).
    found = law_test([sample])
    assert found.degrees_of_freedom == 0
    assert found.is_same_law is None
    json.dumps(found.to_dict(), allow_nan=False)


# A law that leaves no choice: one outcome with all but a sliver of the mass.


@pytest.mark.parametrize("number", [64, 8192])
def test_draws_of_a_nearly_certain_law_are_judged_however_many_they_are(number: int) -> None:
    found = law_test([([number, 0, 0], [1.0 - 1e-6, 1e-6, 0.0])])
    assert found.degrees_of_freedom == 0
    assert (found.is_same_law, found.p_value) == (True, 1.0)


def test_the_p_value_of_a_nearly_certain_law_is_the_binomial_tail() -> None:
    # 3 of 100 where 1 in 100 is expected: P(3 or more) = 1 - P(0) - P(1) - P(2).
    by_hand = 1 - 0.99**100 - 100 * 0.01 * 0.99**99 - 4950 * 0.01**2 * 0.99**98
    found = law_test([([97, 3], [0.99, 0.01])])
    assert found.p_value == pytest.approx(by_hand)
    assert found.is_same_law
    # Two such samples: the smaller of the two tails, twice.
    both = law_test([([97, 3], [0.99, 0.01]), ([100, 0], [0.99, 0.01])])
    assert both.p_value == pytest.approx(2 * by_hand)


def test_a_draft_that_changes_a_nearly_certain_law_is_caught() -> None:
    assert law_test([([90, 10], [0.99, 0.01])]).is_same_law is False
    beside = ([50, 50], [0.5, 0.5])
    assert law_test([beside]).is_same_law is True
    assert law_test([beside, ([90, 10], [0.99, 0.01])]).is_same_law is False


def test_the_change_said_to_be_detectable_in_a_nearly_certain_law_is_found_as_often() -> None:
    law = [0.995, 0.005]
    number = 256
    shift = law_test([([number, 0], law)]).detectable_total_variation
    assert shift is not None
    rng = np.random.default_rng(4)
    counts = rng.binomial(number, 0.005 + shift, 400)
    found = sum(law_test([([number - n, n], law)]).is_same_law is False for n in counts.tolist())
    assert 0.72 <= found / 400 <= 0.88  # 0.8 claimed


def test_a_certain_fault_is_one_even_without_a_degree_of_freedom() -> None:
    assert law_test([([3, 1], [1.0, 0.0])]).is_same_law is False
