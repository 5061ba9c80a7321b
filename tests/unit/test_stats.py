"""Owns the tests of the ledger: what counts as tested, accepted and emitted.
Refuses to run any model.
"""

from __future__ import annotations

import json

import pytest

from distill.runtime.stats import DecodeStats


def test_counts_of_a_few_rounds_by_hand():
    # proposed, accepted, emitted: two accepted of four; all of four; none of two; a plain round.
    stats = DecodeStats.from_rounds([(4, 2, 3), (4, 4, 5), (2, 0, 1), (0, 0, 1)])
    assert stats.num_target_calls == 4
    assert stats.num_rounds == 3
    assert (stats.num_proposed, stats.num_tested, stats.num_accepted) == (10, 3 + 4 + 1, 6)
    assert stats.num_emitted == 10
    assert stats.proposed_by_position == (3, 3, 2, 2)
    assert stats.tested_by_position == (3, 2, 2, 1)
    assert stats.accepted_by_position == (2, 2, 1, 1)
    assert stats.accepted_length_histogram == (1, 0, 1, 0, 1)
    assert stats.acceptance_rate == pytest.approx(6 / 8)
    assert stats.draft_acceptance_rate == pytest.approx(6 / 10)
    assert stats.block_efficiency == pytest.approx(10 / 4)
    assert stats.acceptance_by_position == pytest.approx((2 / 3, 2 / 3, 1 / 2, 1 / 2))
    assert stats.conditional_acceptance_by_position == pytest.approx((2 / 3, 1.0, 1 / 2, 1.0))


def test_tokens_behind_an_end_of_sequence_are_not_accepted():
    """faults: block [d1, d2, EOS, d4, d5, extra] emits 3 tokens, not 6."""
    stats = DecodeStats.from_rounds([(5, 5, 3)])
    assert (stats.num_emitted, stats.num_accepted, stats.num_tested) == (3, 3, 3)
    assert stats.num_proposed == 5
    assert stats.accepted_length_histogram == (0, 0, 0, 1, 0, 0)


def test_a_cut_on_the_correction_token_keeps_the_rejection_as_tested():
    stats = DecodeStats.from_rounds([(5, 2, 3)])
    assert (stats.num_tested, stats.num_accepted) == (3, 2)


def test_a_draft_that_is_always_wrong_has_rate_zero_and_a_perfect_one_has_one():
    assert DecodeStats.from_rounds([(4, 0, 1)] * 3).acceptance_rate == 0.0
    assert DecodeStats.from_rounds([(4, 4, 5)] * 3).acceptance_rate == 1.0


def test_rates_of_an_empty_ledger_are_unknown_not_zero():
    stats = DecodeStats()
    assert stats.acceptance_rate is None
    assert stats.draft_acceptance_rate is None
    assert stats.block_efficiency is None
    assert stats.acceptance_by_position == ()


def test_plain_decoding_has_block_efficiency_one_and_no_acceptance_rate():
    stats = DecodeStats.from_rounds([(0, 0, 1)] * 7)
    assert stats.block_efficiency == 1.0
    assert stats.acceptance_rate is None
    assert stats.num_rounds == 0


def test_rounds_without_drafts_count_as_calls_and_leave_every_acceptance_rate_alone():
    """A row that goes on and off: K = 3, 0, 0, 2, 0."""
    mixed = [(3, 1, 2), (0, 0, 1), (0, 0, 1), (2, 2, 3), (0, 0, 1)]
    stats = DecodeStats.from_rounds(mixed)
    drafted = DecodeStats.from_rounds([one for one in mixed if one[0]])
    assert (stats.num_target_calls, stats.num_rounds, stats.num_emitted) == (5, 2, 8)
    assert (drafted.num_target_calls, drafted.num_rounds, drafted.num_emitted) == (2, 2, 5)
    assert stats.acceptance_rate == drafted.acceptance_rate == pytest.approx(3 / 4)
    assert stats.draft_acceptance_rate == drafted.draft_acceptance_rate == pytest.approx(3 / 5)
    assert stats.acceptance_by_position == drafted.acceptance_by_position
    assert stats.accepted_length_histogram == (0, 1, 1, 0)
    assert stats.block_efficiency == pytest.approx(8 / 5)


def test_adding_two_ledgers_equals_the_ledger_of_all_rounds():
    one, other = [(4, 2, 3), (0, 0, 1)], [(6, 6, 7), (1, 1, 2)]
    merged = DecodeStats.from_rounds(one) + DecodeStats.from_rounds(other)
    assert merged == DecodeStats.from_rounds(one + other)
    assert merged + DecodeStats() == merged


def test_counts_survive_json():
    stats = DecodeStats.from_rounds([(3, 1, 2), (3, 3, 4)])
    assert DecodeStats.from_dict(json.loads(json.dumps(stats.to_dict()))) == stats
