"""Owns the tests of where a verified block ends.
Refuses to run any model; text is made by a one-letter-per-token decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distill.runtime.commit import Boundary, CommitRules, find_boundary, trim_at_stop_string

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(token_ids: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in token_ids)


def boundary(block: str, *, emitted: str = "", prompt: int = 3, **rules) -> Boundary:
    full = {"max_new_tokens": 100, "max_length": 1000, "decode_text": letters} | rules
    return find_boundary(
        [LETTERS.index(c) for c in block],
        emitted_token_ids=[LETTERS.index(c) for c in emitted],
        num_prompt_tokens=prompt,
        rules=CommitRules(**full),
    )


def test_a_block_without_an_end_is_emitted_whole():
    assert boundary("abc") == Boundary(3, None)


@pytest.mark.parametrize("index", range(5))
def test_a_stop_token_ends_the_block_at_every_index(index):
    block = "aaaaa"[:index] + "z" + "aaaaa"[index + 1 :]
    assert boundary(block, stop_token_ids=frozenset({25})) == Boundary(index + 1, "stop")


def test_the_first_of_two_stop_tokens_wins():
    assert boundary("aybz", stop_token_ids=frozenset({24, 25})) == Boundary(2, "stop")


def test_the_budget_cuts_a_block():
    assert boundary("abcde", emitted="xy", max_new_tokens=5) == Boundary(3, "length")


def test_the_context_cuts_a_block():
    assert boundary("abcde", emitted="x", prompt=4, max_length=7) == Boundary(2, "length")


def test_a_stop_before_the_budget_is_a_stop():
    """faults: the cap was tested first, and tokens behind the stop leaked."""
    assert boundary("abczxy", max_new_tokens=5, stop_token_ids=frozenset({25})) == Boundary(
        4, "stop"
    )


def test_a_stop_behind_the_budget_does_not_exist():
    assert boundary("abcdez", max_new_tokens=5, stop_token_ids=frozenset({25})) == Boundary(
        5, "length"
    )


def test_a_stop_on_the_last_token_of_the_budget_is_a_stop():
    assert boundary("abz", max_new_tokens=3, stop_token_ids=frozenset({25})) == Boundary(3, "stop")


@pytest.mark.parametrize("index", range(8))
def test_a_one_token_stop_string_is_seen_anywhere_in_a_long_block(index):
    """faults: only the last few tokens of an accepted run were looked at."""
    block = "aaaaaaaa"[:index] + "s" + "aaaaaaaa"[index + 1 :]
    assert boundary(block, stop_strings=("s",)) == Boundary(index + 1, "stop")


def test_a_stop_string_may_begin_in_an_earlier_block():
    assert boundary("fghi", emitted="abcde", stop_strings=("defg",)) == Boundary(2, "stop")


def test_a_stop_string_before_a_stop_token_wins():
    assert boundary("stopz", stop_strings=("sto",), stop_token_ids=frozenset({25})) == Boundary(
        3, "stop"
    )


def test_a_stop_string_is_found_far_into_a_long_output():
    assert boundary(
        "aend", emitted="x" * 5000, max_new_tokens=9999, max_length=99999, stop_strings=("end",)
    ) == Boundary(4, "stop")


def test_only_the_tail_of_a_long_output_is_decoded():
    decoded: list[int] = []

    def counting(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return letters(token_ids)

    boundary(
        "ab",
        emitted="x" * 5000,
        max_new_tokens=9999,
        max_length=99999,
        stop_strings=("end",),
        decode_text=counting,
    )
    assert decoded == [4 * 3 + 32 + 2]


def test_text_is_cut_before_the_first_stop_string():
    assert trim_at_stop_string("one stop two END", ["END", "stop"]) == "one "
    assert trim_at_stop_string("nothing here", ["END"]) == "nothing here"
    assert trim_at_stop_string("nothing here", []) == "nothing here"
