"""Owns the plain sentences that stand beside numbers: what a difference means, and what it may not.

Refuses to compute: it reads estimates with their intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENOUGH_PROMPTS = 8
"""Below it a bootstrap interval over prompts is too narrow to be believed."""


def difference_sentence(
    draft: str,
    baseline: str,
    row: Mapping[str, Mapping[str, Any]],
    *,
    temperature: float,
    num_prompts: int,
) -> str:
    """What the paired difference of two drafts says, in one sentence.

    The analytic rate is read where both have one, for it has no sampling noise; else the decoded.
    """
    analytic = row["analytic_acceptance_rate"]
    is_analytic = analytic["value"] is not None
    difference = analytic if is_analytic else row["acceptance_rate"]
    where = f"at temperature {exact(temperature)}, on {prompts(num_prompts)}"
    value, low, high = difference["value"], difference["low"], difference["high"]
    if value is None:
        return f"{draft} and {baseline} cannot be compared {where}: nothing was tested"
    points = f"{100 * value:+.1f} points"
    if low is None:
        return f"{draft} against {baseline} {where}: {points}; one prompt gives no interval"
    points += f" (95%: {100 * low:+.1f} to {100 * high:+.1f})"
    if value == low == high == 0.0:
        sentence = f"{draft} and {baseline} are accepted equally often {where}"
    elif low <= 0.0 <= high:
        sentence = f"no difference between {draft} and {baseline} is seen {where}: {points}"
    else:
        direction = "more" if value > 0 else "less"
        sentence = f"{draft} is accepted {direction} often than {baseline} {where}: {points}"
    caveat = few_prompts(num_prompts)
    return sentence if caveat is None else f"{sentence}; {caveat}"


def few_prompts(num_prompts: int) -> str | None:
    """What to say beside an interval over so many prompts; None where they are enough."""
    if num_prompts >= ENOUGH_PROMPTS:
        return None
    return f"fewer than {ENOUGH_PROMPTS} prompts are too few to rely on"


def exact(temperature: float) -> str:
    """0.7 -> 0.7, 1.0 -> 1: as short as tells it from every other number."""
    short = f"{temperature:g}"
    return short if float(short) == temperature else repr(float(temperature))


def prompts(number: int) -> str:
    """1 prompt, 2 prompts."""
    return f"{number} prompt{'' if number == 1 else 's'}"


def percent(value: float) -> str:
    """0.123 -> 12.3%"""
    return f"{100 * value:.1f}%"
