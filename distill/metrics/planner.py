"""Owns the speed model: tokens per target call, speedup, the best depth, the break-even rate.

Refuses to know models and clocks: rates and cost ratios are arguments, measured elsewhere.

Symbols of Leviathan et al. 2023 (arXiv 2211.17192): alpha = acceptance_rate (accepted / tested),
gamma = num_draft_tokens (K), c = draft_cost_ratio. v(n) = verify_cost_ratio is ours: the paper
takes a target call on K + 1 tokens to cost as much as on one, which a CPU does not grant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distill.errors import ConfigError

MAX_DRAFT_TOKENS = 16
"""Depth searched by default: past it a chain gains nothing at the rates drafts reach."""

TokensPerCall = Callable[[int], float]
VerifyCost = Callable[[int], float]


@dataclass(frozen=True)
class Plan:
    """The best depth. ``num_draft_tokens == 0`` is a legal answer: decode plainly."""

    num_draft_tokens: int
    speedup: float
    tokens_per_call: float


def free_verification(num_tokens: int) -> float:
    """The paper's assumption: a target call costs the same whatever its width."""
    return 1.0


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Tokens emitted per target call, bonus or correction included: Leviathan et al., Eq. 1.

    Summed term by term rather than by the closed form, so that alpha = 1 needs no special case.
    Raises ConfigError for a rate outside [0, 1] or a negative depth.
    """
    _check_rate(acceptance_rate)
    _check_depth(num_draft_tokens)
    return math.fsum(acceptance_rate**i for i in range(num_draft_tokens + 1))


def draft_acceptance_rate(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Accepted / PROPOSED implied by alpha (accepted / TESTED): (E[tokens] - 1) / K.

    Lower than alpha by construction: alpha = 0.7 reads as 0.51 at K = 3 and 0.44 at K = 4.
    """
    if num_draft_tokens < 1:
        raise ConfigError(
            f"num_draft_tokens = {num_draft_tokens}: a rate over proposed tokens needs at least 1."
        )
    return (expected_tokens(acceptance_rate, num_draft_tokens) - 1.0) / num_draft_tokens


def tokens_from_positions(
    conditional_acceptance_by_position: Sequence[float | None],
    *,
    tail_rate: float,
    draft_coverage: float = 1.0,
) -> TokensPerCall:
    """Tokens per target call as a function of K, from measured conditional rates.

    The i.i.d. formula misjudges depth because real rates rise or fall along a block; a chain of
    measured rates does not. Positions never tested (None) and those beyond the measured depth take
    ``tail_rate``, the pooled alpha. ``draft_coverage`` is the share of target calls for which
    the drafter proposes anything: 1 for a model, less for a lookup that finds no match.
    """
    _check_rate(draft_coverage)
    rates = [tail_rate if r is None else r for r in conditional_acceptance_by_position]
    for rate in (*rates, tail_rate):
        _check_rate(rate)

    def tokens(num_draft_tokens: int) -> float:
        _check_depth(num_draft_tokens)
        total, reach = 1.0, 1.0
        for position in range(num_draft_tokens):
            reach *= rates[position] if position < len(rates) else tail_rate
            total += reach
        return 1.0 + draft_coverage * (total - 1.0)

    return tokens


def call_cost(
    num_draft_tokens: int,
    *,
    draft_cost_ratio: float,
    verify_cost_ratio: VerifyCost = free_verification,
    draft_coverage: float = 1.0,
) -> float:
    """Cost of one round in units of one plain target step: K c + v(K + 1); 1 at K = 0.

    A round for which the drafter proposes nothing is a plain step.
    """
    _check_depth(num_draft_tokens)
    if num_draft_tokens == 0:
        return 1.0
    drafted = num_draft_tokens * draft_cost_ratio + verify_cost_ratio(num_draft_tokens + 1)
    return draft_coverage * drafted + (1.0 - draft_coverage)


def speedup(
    acceptance_rate: float,
    num_draft_tokens: int,
    *,
    draft_cost_ratio: float,
    verify_cost_ratio: VerifyCost = free_verification,
) -> float:
    """Wall-clock factor over plain decoding: Leviathan et al., Theorem 3.8, with measured v."""
    return expected_tokens(acceptance_rate, num_draft_tokens) / call_cost(
        num_draft_tokens, draft_cost_ratio=draft_cost_ratio, verify_cost_ratio=verify_cost_ratio
    )


def operations_ratio(
    acceptance_rate: float, num_draft_tokens: int, *, draft_operations_ratio: float
) -> float:
    """Arithmetic per emitted token over plain decoding: Leviathan et al., Theorem 3.11."""
    work = num_draft_tokens * draft_operations_ratio + num_draft_tokens + 1
    return work / expected_tokens(acceptance_rate, num_draft_tokens)


def best_num_draft_tokens(
    tokens_per_call: TokensPerCall,
    *,
    draft_cost_ratio: float,
    verify_cost_ratio: VerifyCost = free_verification,
    draft_coverage: float = 1.0,
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
) -> Plan:
    """The depth in 0..max_draft_tokens with the largest predicted speedup; ties go to the smaller.

    ``tokens_per_call`` maps K to tokens per target call: ``tokens_from_positions`` when measured,
    ``lambda k: expected_tokens(alpha, k)`` for the i.i.d. model.
    """
    best = Plan(num_draft_tokens=0, speedup=1.0, tokens_per_call=1.0)
    for depth in range(1, max_draft_tokens + 1):
        tokens = tokens_per_call(depth)
        factor = tokens / call_cost(
            depth,
            draft_cost_ratio=draft_cost_ratio,
            verify_cost_ratio=verify_cost_ratio,
            draft_coverage=draft_coverage,
        )
        if factor > best.speedup:
            best = Plan(num_draft_tokens=depth, speedup=factor, tokens_per_call=tokens)
    return best


def break_even_acceptance_rate(
    *,
    draft_cost_ratio: float,
    verify_cost_ratio: VerifyCost = free_verification,
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
) -> float | None:
    """Smallest i.i.d. alpha at which SOME depth is no slower than plain decoding.

    None when even a perfect draft loses. With free verification it equals c (Corollary 3.9).
    """

    def gain(alpha: float) -> float:
        return max(
            speedup(
                alpha, k, draft_cost_ratio=draft_cost_ratio, verify_cost_ratio=verify_cost_ratio
            )
            for k in range(1, max_draft_tokens + 1)
        )

    if gain(1.0) < 1.0:
        return None
    low, high = 0.0, 1.0
    if gain(low) >= 1.0:
        return 0.0
    # Bisection is enough: each depth's speedup increases with alpha, so their maximum does too.
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) >= 1.0 else (middle, high)
    return high


def interpolate(measured: Mapping[int, float]) -> VerifyCost:
    """v(n) between measured widths, piecewise linear; the last slope continues beyond them."""
    if not measured:
        raise ConfigError("verify_cost_ratio needs at least one measured width; none was given.")
    widths = sorted(measured)

    def cost(num_tokens: int) -> float:
        if len(widths) == 1 or num_tokens <= widths[0]:
            return measured[widths[0]]
        right = next((i for i, w in enumerate(widths) if w >= num_tokens), len(widths) - 1)
        low, high = widths[right - 1], widths[right]
        slope = (measured[high] - measured[low]) / (high - low)
        return measured[low] + slope * (num_tokens - low)

    return cost


def _check_rate(rate: float) -> None:
    if not 0.0 <= rate <= 1.0:
        raise ConfigError(f"acceptance_rate = {rate}: a probability lies between 0 and 1.")


def _check_depth(depth: int) -> None:
    if depth < 0:
        raise ConfigError(f"num_draft_tokens = {depth}: it cannot be negative. Use 0 to disable.")
