"""Owns the unit tests of the acceptance rule: single decisions with hand-chosen numbers.
Refuses to prove the law of whole blocks: tests/exactness enumerates it.
"""

from __future__ import annotations

import pytest
import torch

from distill.errors import ConfigError
from distill.runtime.verify import (
    ACCEPTANCE_RULES,
    acceptance_probability,
    verify,
    verify_greedy,
)

SMALLEST_U, LARGEST_U = 2.0**-53, 1 - 2.0**-53


def decide(target, draft, tokens, u, number=None):
    """One row: (num_accepted, next_token)."""
    result = verify(
        torch.tensor([target], dtype=torch.float64),
        None if draft is None else torch.tensor([draft], dtype=torch.float64),
        torch.tensor([tokens], dtype=torch.long),
        torch.tensor([u], dtype=torch.float64),
        None if number is None else torch.tensor([number]),
    )
    return result.num_accepted_B.item(), result.next_token_B.item()


def test_a_draft_is_accepted_below_the_ratio_and_rejected_above_it():
    target, draft = [[0.3, 0.7], [1.0, 0.0]], [[0.6, 0.4]]
    assert decide(target, draft, [0], [0.499, 0.5]) == (1, 0)
    assert decide(target, draft, [0], [0.501, 0.5]) == (0, 1)


def test_a_draft_the_target_likes_better_is_always_accepted():
    assert decide([[0.9, 0.1], [0.0, 1.0]], [[0.5, 0.5]], [0], [LARGEST_U, 0.5]) == (1, 1)


def test_a_draft_of_target_probability_zero_is_rejected_whatever_the_random_number():
    """faults: a uniform of exactly 0 accepted p = 0 tokens elsewhere."""
    for u in (SMALLEST_U, 0.0, 0.5):
        assert decide([[0.0, 1.0], [1.0, 0.0]], [[0.5, 0.5]], [0], [u, 0.5]) == (0, 1)


def test_the_replacement_comes_from_the_positive_part_of_p_minus_q():
    target, draft = [[0.5, 0.3, 0.2], [1.0, 0, 0]], [[0.2, 0.2, 0.6]]
    assert decide(target, draft, [2], [0.9, 0.74]) == (0, 0)
    assert decide(target, draft, [2], [0.9, 0.76]) == (0, 1)


def test_tokens_behind_a_rejection_do_not_count_even_if_they_would_pass():
    target = [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    draft = [[1.0, 0.0], [1.0, 0.0]]
    assert decide(target, draft, [0, 0], [0.5, 0.5, 0.5]) == (0, 1)


def test_an_always_wrong_single_draft_leaves_plain_decoding():
    """faults: a logits index shifted by one committed draft[0] unverified."""
    target = [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert decide(target, [[1.0, 0.0, 0.0]], [0], [0.5, 0.5]) == (0, 1)


def test_after_all_drafts_the_extra_token_comes_from_the_last_target_row():
    target = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    draft = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert decide(target, draft, [0, 1], [0.5, 0.5, 0.5]) == (2, 2)


def test_without_drafts_the_token_is_drawn_from_the_target():
    result = verify(
        torch.tensor([[[0.25, 0.75]], [[0.25, 0.75]]]),
        None,
        torch.zeros(2, 0, dtype=torch.long),
        torch.tensor([[0.2], [0.3]], dtype=torch.float64),
    )
    assert result.num_accepted_B.tolist() == [0, 0]
    assert result.next_token_B.tolist() == [0, 1]


def test_padding_drafts_are_never_read_into_a_result():
    target = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    draft = [[1.0, 0.0], [float("nan"), float("nan")]]
    assert decide(target, draft, [0, 0], [0.5, SMALLEST_U, 0.5], number=1) == (1, 1)
    assert decide(target, draft, [1, 0], [0.5, SMALLEST_U, 0.5], number=0) == (0, 0)


def test_a_deterministic_draft_is_a_one_hot_draft():
    target = [[0.6, 0.3, 0.1], [0.0, 0.0, 1.0]]
    for u in (0.1, 0.59, 0.61, 0.99):
        for last in (0.1, 0.5, 0.9):
            assert decide(target, None, [0], [u, last]) == decide(
                target, [[1.0, 0.0, 0.0]], [0], [u, last]
            )


def test_equal_distributions_up_to_rounding_fall_back_to_the_target():
    """faults: p == q up to one ulp with u close to 1 leaves a zero-sum residual."""
    q = torch.tensor([0.7, 0.3], dtype=torch.float64)
    p = torch.nextafter(q, torch.zeros(2, dtype=torch.float64))
    target = [p.tolist(), [1.0, 0.0]]
    assert decide(target, [q.tolist()], [0], [LARGEST_U, 0.69]) == (0, 0)
    assert decide(target, [q.tolist()], [0], [LARGEST_U, 0.71]) == (0, 1)


def test_target_probabilities_are_left_as_they_were():
    target = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    before = target.clone()
    verify(
        target,
        torch.tensor([[[1.0, 0.0]]]),
        torch.tensor([[0]]),
        torch.tensor([[0.9, 0.5]]).double(),
    )
    assert torch.equal(target, before)


def test_greedy_accepts_the_leading_matches_and_corrects_the_first_mismatch():
    target = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]])
    draft = torch.tensor([[4, 5, 6], [4, 0, 6], [4, 5, 6]])
    result = verify_greedy(target, draft, torch.tensor([3, 3, 1]))
    assert result.num_accepted_B.tolist() == [3, 1, 1]
    assert result.next_token_B.tolist() == [7, 5, 5]


def test_at_temperature_zero_the_sampled_rule_gives_the_greedy_answer():
    """faults: a greedy draft beside p/q with soft q accepted tokens that are not the argmax."""
    eye = torch.eye(5, dtype=torch.float64)
    target_tokens, draft_tokens = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 4]])
    u = torch.tensor([[LARGEST_U, SMALLEST_U, 0.5]], dtype=torch.float64)
    sampled = verify(eye[target_tokens], eye[draft_tokens], draft_tokens, u)
    greedy = verify_greedy(target_tokens, draft_tokens)
    assert sampled.num_accepted_B.tolist() == greedy.num_accepted_B.tolist() == [1]
    assert sampled.next_token_B.tolist() == greedy.next_token_B.tolist() == [2]


def test_acceptance_rules_have_the_values_of_their_formulas():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    expected = {"speculative_sampling": 0.6, "draft_argmax": 0.2, "sample_and_match": 0.28}
    assert set(expected) == set(ACCEPTANCE_RULES)
    for rule, value in expected.items():
        assert acceptance_probability(p, q, rule).item() == pytest.approx(value)


def test_acceptance_rules_agree_at_temperature_zero():
    p, q = torch.eye(4)[torch.tensor([1, 2])], torch.eye(4)[torch.tensor([1, 3])]
    for rule in ACCEPTANCE_RULES:
        assert acceptance_probability(p, q, rule).tolist() == [1.0, 0.0]


def test_an_unknown_acceptance_rule_lists_the_known_ones():
    with pytest.raises(ConfigError, match="sample_and_match"):
        acceptance_probability(torch.ones(1), torch.ones(1), "typical")
