"""Owns where a verified block ends: stop token, stop string, token budget, context length.
Refuses to know models and caches: it answers with a number, and everybody rolls back to it.

Tokens are looked at one by one in the order in which plain decoding would have produced them, so
a stop inside a block wins over a budget that ends behind it, and nothing after it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
DecodeText = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class CommitRules:
    """What ends one request.

    max_new_tokens: tokens this request may emit.
    max_length: tokens the context holds, prompt included.
    decode_text: token ids -> text; needed when there are stop strings.
    """

    max_new_tokens: int
    max_length: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    decode_text: DecodeText | None = None


@dataclass(frozen=True)
class Boundary:
    """How many tokens of the block are emitted, and why the row ends there (None: it goes on)."""

    num_tokens: int
    finish_reason: FinishReason | None


def find_boundary(
    block_token_ids: Sequence[int],
    *,
    emitted_token_ids: Sequence[int],
    num_prompt_tokens: int,
    rules: CommitRules,
) -> Boundary:
    """Return the boundary of a block of verified tokens.

    The stop token is part of the output, and so is the token that completes a stop string; the
    text is trimmed later, by :func:`trim_at_stop_string`. ``min_tokens`` of the sampling settings
    is not known here: it bans stop tokens from the distribution, and leaves stop strings alone.
    """
    # One decoding for the whole block; token by token only where it found something.
    has_stop_string = bool(rules.stop_strings) and _contains_stop_string(
        emitted_token_ids, block_token_ids, rules
    )
    for index, token_id in enumerate(block_token_ids):
        num_tokens = index + 1
        num_emitted = len(emitted_token_ids) + num_tokens
        if token_id in rules.stop_token_ids:
            return Boundary(num_tokens, "stop")
        if has_stop_string and _contains_stop_string(
            emitted_token_ids, block_token_ids[:num_tokens], rules
        ):
            return Boundary(num_tokens, "stop")
        if num_emitted >= rules.max_new_tokens:
            return Boundary(num_tokens, "length")
        if num_prompt_tokens + num_emitted >= rules.max_length:
            return Boundary(num_tokens, "length")
    return Boundary(len(block_token_ids), None)


def trim_at_stop_string(text: str, stop_strings: Sequence[str]) -> str:
    """Cut the text before the first stop string it contains."""
    starts = [text.find(stop) for stop in stop_strings if stop]
    return text[: min((start for start in starts if start >= 0), default=len(text))]


def _contains_stop_string(
    emitted_token_ids: Sequence[int], new_token_ids: Sequence[int], rules: CommitRules
) -> bool:
    assert rules.decode_text is not None
    # Only the tail can hold a new one. A character takes at most four tokens (bytes), and the
    # margin keeps the cut, which may fall inside a character, away from what is searched.
    longest = max(len(stop.encode()) for stop in rules.stop_strings)
    tail = [*emitted_token_ids[-(4 * longest + 32) :], *new_token_ids]
    text = rules.decode_text(tail)
    return any(stop in text for stop in rules.stop_strings)
