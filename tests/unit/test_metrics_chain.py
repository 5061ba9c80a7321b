"""Owns the tests of the chain of tests: by hand, and against speculative decoding simulated.

Refuses to run a model: a text is a list of acceptance probabilities.
"""

from __future__ import annotations

import itertools

import pytest

from distill.metrics.chain import expected_counts, typical_rounds
from distill.runtime.stats import DecodeStats


def test_expected_counts_by_hand() -> None:
    # Token 1 stands half of the time; then token 2 is the extra one, else it is tested on its own.
    found = expected_counts([1.0, 0.5, 1.0], 2)
    assert (found.num_target_calls, found.num_tested, found.num_accepted) == (1.5, 2.5, 2.0)
    assert found.num_proposed == 3.0


def test_a_perfect_draft_needs_one_call_for_every_block_of_k_plus_one() -> None:
    found = expected_counts([1.0] * 10, 4)
    assert (found.num_target_calls, found.num_tested, found.num_accepted) == (2.0, 8.0, 8.0)


def test_a_hopeless_draft_is_tested_at_every_token() -> None:
    found = expected_counts([0.0] * 5, 3)
    assert (found.num_target_calls, found.num_tested, found.num_accepted) == (5.0, 5.0, 0.0)


def test_the_last_token_of_a_budget_is_the_targets_own() -> None:
    # Three tokens are asked for: one round drafts two, and the third comes with it.
    found = expected_counts([1.0, 1.0, 1.0], 8, budget=3)
    assert (found.num_target_calls, found.num_proposed, found.num_tested) == (1.0, 2.0, 2.0)


def test_where_nothing_is_proposed_the_target_goes_alone() -> None:
    found = expected_counts([1.0, None, None], 4)
    assert (found.num_target_calls, found.num_proposed, found.num_tested) == (2.0, 1.0, 1.0)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [None, 6])
def test_expectation_equals_the_enumeration_of_all_outcomes(depth: int, budget: int | None) -> None:
    rates = [0.9, 0.2, 0.7, 0.5, 1.0, 0.3]
    calls = tested = accepted = 0.0
    for outcome in itertools.product([True, False], repeat=len(rates)):
        weight = 1.0
        for passes, rate in zip(outcome, rates, strict=True):
            weight *= rate if passes else 1.0 - rate
        rounds, begin = [], 0
        while begin < len(rates):
            width = depth if budget is None else min(depth, budget - begin - 1)
            stood = 0
            while stood < width and begin + stood < len(rates) and outcome[begin + stood]:
                stood += 1
            emitted = min(stood + 1, len(rates) - begin)
            rounds.append((width, stood, emitted))
            begin += emitted
        stats = DecodeStats.from_rounds(rounds)
        calls += weight * stats.num_target_calls
        tested += weight * stats.num_tested
        accepted += weight * stats.num_accepted
    found = expected_counts(rates, depth, budget=budget)
    assert found.num_target_calls == pytest.approx(calls, abs=1e-12)
    assert found.num_tested == pytest.approx(tested, abs=1e-12)
    assert found.num_accepted == pytest.approx(accepted, abs=1e-12)


def test_rounds_of_a_text_token_by_token() -> None:
    found = typical_rounds([1.0, 1.0, 1.0, 0.0, 1.0, None], 2)
    assert found == ["accepted", "accepted", "extra", "rejected", "accepted", "extra"]
