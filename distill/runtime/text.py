"""Turns the tokens of one answer into text that is safe to send: a piece once sent stays true.

Refuses to know where tokens come from, how pieces travel and when an answer ends.

Two things can make sent text wrong later: a character whose bytes are split over tokens, and the
first letters of a stop string that completes in a later token. Both are held back until decided.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class TextStream:
    """The text of one growing answer."""

    def __init__(self, decoder: Decoder, stop_strings: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop_strings = tuple(stop_strings)
        self._token_ids: list[int] = []
        # Only a window is decoded again with each token. It starts one clean piece back, because
        # how a token reads may depend on the one before it (a leading space, for example).
        self._context = 0  # the window's first token
        self._read = 0  # the first token that isn't wholly text yet
        self._num_context_chars = 0
        self._num_taken = 0  # characters past the context that are text already
        self._held = ""
        self._sent: list[str] = []

    @property
    def text(self) -> str:
        """Everything sent so far."""
        return "".join(self._sent)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that has become certain, "" when none has."""
        for token_id in token_ids:
            self._append(token_id)
        certain = self._held[: self._certain_length()]
        self._held = self._held[len(certain) :]
        self._sent.append(certain)
        return certain

    def finish(self, text: str, token_ids: Sequence[int] = ()) -> str:
        """Close the answer, whose whole text is `text`; return what's left to send of it.

        `token_ids` are the tokens after those pushed. They count only when `text` doesn't begin
        with what was sent: a tokenizer that reads earlier tokens differently by what follows. Sent
        text can't be taken back, so the rest is then read as every piece was.
        """
        sent = self.text
        if text.startswith(sent):
            rest = text[len(sent) :]
            self._sent.append(rest)
            return rest
        logger.warning("The answer's text changed after its start was sent; the rest is read on.")
        return self.push(token_ids) + self._flush()

    def _flush(self) -> str:
        """What is held back still, up to the first stop string; nothing follows to decide it."""
        new = self._decode(self._context)[self._num_context_chars :]
        rest = self._held + new[self._num_taken :]
        found = (rest.find(stop) for stop in self._stop_strings)
        rest = rest[: min((start for start in found if start >= 0), default=len(rest))]
        self._held = ""
        self._sent.append(rest)
        return rest

    def _append(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        new = self._decode(self._context)[self._num_context_chars :]
        # A character that isn't complete yet reads as replacement characters.
        complete = new.rstrip(_REPLACEMENT)
        self._held += complete[self._num_taken :]
        self._num_taken = max(self._num_taken, len(complete))
        if new and complete == new:
            self._context, self._read = self._read, len(self._token_ids)
            self._num_context_chars = len(self._decode(self._context))
            self._num_taken = 0

    def _decode(self, start: int) -> str:
        return self._decoder.decode(self._token_ids[start:], skip_special_tokens=True)

    def _certain_length(self) -> int:
        """How much of the held text no stop string can cut."""
        certain = len(self._held)
        for stop in self._stop_strings:
            found = self._held.find(stop)
            if found >= 0:
                certain = min(certain, found)
            for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
                if self._held.endswith(stop[:length]):
                    certain = min(certain, len(self._held) - length)
                    break
        return certain
