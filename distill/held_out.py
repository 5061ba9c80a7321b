"""Owns the halves of the held-out prompts: one chooses the best weights, the other is reported on.

Refuses to know what is held out and why. A draft chosen on the prompts it is then reported on looks
better than it is, so the two stages that look at held-out prompts look at different ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

_ANSWERED = ("completed", "truncated")


def answered_held_out(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The answers, of all that generate stored, whose prompts fall into halves.

    Those of the held-out split that were given, of a conversation the first. Whoever takes a half
    takes it of these: halves of different sets would share prompts.
    """
    return [
        record
        for record in records
        if record["split"] == "held_out"
        and record["status"] in _ANSWERED
        and not record["turn_index"]
    ]


def reporting_half(prompt_ids: Iterable[str]) -> frozenset[str]:
    """The prompts to report on: the half (the larger one) whose ids hash highest.

    By rank among all held-out prompts, so that neither half is empty from two prompts on; a single
    prompt is in both. The hash is not that of the split, which has used up its own order.
    """
    ranked = sorted(set(prompt_ids), key=_rank)
    return frozenset(ranked[len(ranked) // 2 :])


def selection_half(prompt_ids: Iterable[str]) -> frozenset[str]:
    """The prompts to choose weights on: all others, or the only one there is."""
    everything = frozenset(prompt_ids)
    return everything - reporting_half(everything) or everything


def _rank(prompt_id: str) -> bytes:
    return hashlib.sha256(f"reporting\0{prompt_id}".encode()).digest()
