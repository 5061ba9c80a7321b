"""Owns what a chain of independent tests amounts to: expected rounds on a text that is given.

Refuses to know how the probabilities came about.

Speculative sampling emits the target's law whatever was accepted, so a text may be drawn first and
the tests looked at afterwards. Given the text x, the draft's token at position i is accepted and
equal to x_i with probability min(p, q)(x_i), and position i holds x_i with probability p(x_i):
accepted with r_i = min(1, q(x_i) / p(x_i)), independently of all other positions. The expected
counts of any number of draft tokens follow by one pass over the text, without another decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpectedCounts:
    """Expected counts of one text; rates are ratios of sums over texts."""

    num_target_calls: float
    num_proposed: float
    num_tested: float
    num_accepted: float


def expected_counts(
    acceptance: Sequence[float | None], num_draft_tokens: int, *, budget: int | None = None
) -> ExpectedCounts:
    """Expected counts of decoding a text whose i-th token a draft gets right with probability r_i.

    Args:
        acceptance: r_i for every token of the text; None where the draft proposes nothing.
        budget: ``max_new_tokens`` of the decode: a round drafts one token less than is left, for
            the last one is the target's own. None: the text ended by itself.

    By hand with r = [1, .5, 1] and K = 2: the first round tests tokens 0 and 1 and, if both stand,
    emits token 2 untested (.5); else token 1 is corrected and a second round tests token 2. So
    1.5 calls, 2.5 tested, 1 + .5 + .5 accepted.
    """
    length = len(acceptance)
    starts = [0.0] * (length + num_draft_tokens + 2)
    starts[0] = 1.0
    calls = proposed = tested = accepted = 0.0
    for begin in range(length):
        reach = starts[begin]
        if reach == 0.0:
            continue
        calls += reach
        depth = num_draft_tokens
        if budget is not None:
            depth = min(depth, max(0, budget - begin - 1))
        position = begin
        proposed += reach * _num_offered(acceptance, begin, depth)
        while position < min(begin + depth, length) and acceptance[position] is not None:
            rate = acceptance[position] or 0.0
            tested += reach
            accepted += reach * rate
            starts[position + 1] += reach * (1.0 - rate)
            reach *= rate
            position += 1
        starts[position + 1] += reach
    return ExpectedCounts(calls, proposed, tested, accepted)


def _num_offered(acceptance: Sequence[float | None], begin: int, depth: int) -> int:
    """Drafts of a round that starts at ``begin``: they go on past a text's end, not past None."""
    for offset in range(depth):
        if begin + offset < len(acceptance) and acceptance[begin + offset] is None:
            return offset
    return depth


def typical_rounds(acceptance: Sequence[float | None], num_draft_tokens: int) -> list[str]:
    """How each token of a text comes out when a test passes exactly if r >= 1/2.

    "accepted": drafted, and stands. "rejected": drafted wrongly, so the target's own token is here.
    "extra": nothing was drafted, the target gave it after a whole block. At temperature 0, where r
    is 0 or 1, this is what decoding does.
    """
    status: list[str] = []
    drafted = 0
    for rate in acceptance:
        if drafted == num_draft_tokens or rate is None:
            status.append("extra")
            drafted = 0
        elif rate >= 0.5:
            status.append("accepted")
            drafted += 1
        else:
            status.append("rejected")
            drafted = 0
    return status
