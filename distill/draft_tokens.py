"""Owns the number of draft tokens to use where a config leaves it open, and its part in a key.

Refuses to measure and to plan: it reads what a measurement concluded.
"""

from __future__ import annotations

from distill.artifacts import Artifact

DEFAULT_NUM_DRAFT_TOKENS = 4

UNMEASURED = "unmeasured"
"""Stands in a key for a number of draft tokens that nobody knows yet."""

NONE_HELPS = (
    "no number of draft tokens is faster than plain decoding where this was measured; the bundle "
    "says 1, the least that runtimes take"
)


def best_num_draft_tokens(measure: Artifact | None) -> int | None:
    """The measured best number of draft tokens, 0 when none helps, None when not measured."""
    if measure is None:
        return None
    best = measure.metrics.get("verdict", {}).get("num_draft_tokens")
    return None if best is None else int(best)


def resolve_num_draft_tokens(configured: int | None, measure: Artifact | None) -> int:
    """The configured number of draft tokens, else the measured best, else 4."""
    best = best_num_draft_tokens(measure) if configured is None else configured
    return DEFAULT_NUM_DRAFT_TOKENS if best is None else best


def depth_revision(configured: int | None, measure: Artifact | str | None) -> str:
    """The resolved number of draft tokens as a part of a key.

    It belongs there because it comes from a clock: measuring again gives the same fingerprint and
    maybe another number. "unmeasured" when it is needed and `measure` is only a fingerprint.
    """
    if not isinstance(measure, str):
        return str(resolve_num_draft_tokens(configured, measure))
    return UNMEASURED if configured is None else str(configured)
