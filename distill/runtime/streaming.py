"""Owns handing out answers while they grow: what a round added, as text that stays true.
Refuses to know how a round is decoded, and who reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distill.errors import ConfigError
from distill.runtime.commit import FinishReason
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult, RowUpdate
from distill.runtime.stats import DecodeStats
from distill.runtime.text import TextStream


@dataclass(frozen=True)
class StreamPiece:
    """What one round added to one answer.

    index: which prompt, in the order they were given.
    token_ids: the tokens of the round; all pieces of a prompt joined are its result's.
    text: what has become certain: never half a character, nor the beginning of a stop string that
        may still complete. All pieces joined are the result's text, unless the tokenizer came to
        read earlier tokens differently by what followed: text that is out stays as it is, see
        ``TextStream.finish``. None without a tokenizer.
    finish_reason, result: set in the last piece of a prompt.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason | None = None
    result: DecodeResult | None = None


class DecodeStream(Iterator[StreamPiece]):
    """Iterates over pieces of all answers, a round of the batch at a time, as rounds commit.

    Nothing is decoded before the next piece is asked for. The engine is the stream's alone until
    it has ended or was closed: nobody else steps it or adds to it. Answers that nobody waits for
    any longer cost nothing after :meth:`close`, or once stream and engine are dropped.
    """

    def __init__(
        self, engine: DecodeEngine, requests: Sequence[DecodeRequest], *, tokenizer: Any = None
    ) -> None:
        """Queue all requests.

        Raises:
            ConfigError: the engine has other work.
            DistillError: one of the requests cannot be decoded; none is queued then.
        """
        if engine.has_work:
            raise ConfigError(
                "The engine is decoding other requests, whose updates a stream would take away. "
                "Give the stream an engine of its own, or let this one finish."
            )
        self._engine = engine
        self._requests = list(requests)
        self._texts = [
            None if tokenizer is None else TextStream(tokenizer, request.stop_strings)
            for request in self._requests
        ]
        self._updates: deque[RowUpdate] = deque()
        self._index: dict[int, int] = {}
        try:
            for index, request in enumerate(self._requests):
                self._index[engine.add(request)] = index
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> DecodeStats:
        """Counts of everything decoded so far, over all prompts."""
        return self._engine.stats

    def __next__(self) -> StreamPiece:
        """The next piece; one that cannot be read is lost when that is raised, the others not."""
        while not self._updates:
            if not self._index:
                raise StopIteration
            if not self._engine.has_work:
                self._index.clear()
                raise RuntimeError("the engine was used by somebody else: answers are missing")
            self._updates.extend(self._engine.step())
        return self._piece(self._updates.popleft())

    def close(self) -> None:
        """Drop whatever isn't finished; what was decoded stays counted."""
        for handle in list(self._index):
            self._engine.cancel(handle)
        self._index.clear()
        self._updates.clear()

    def _piece(self, update: RowUpdate) -> StreamPiece:
        index, token_ids = self._index[update.handle], update.new_token_ids
        text = self._texts[index]
        if update.finish_reason is None:
            return StreamPiece(index, token_ids, None if text is None else text.push(token_ids))
        del self._index[update.handle]
        result = self._engine.result(update.handle)
        rest = None
        if text is not None:
            assert result.text is not None, "the engine has the tokenizer that the stream has"
            # Where a stop cuts the last tokens is the engine's decision alone, so they're read
            # from its text.
            is_stop = token_ids[-1] in self._requests[index].stop_token_ids
            rest = text.finish(result.text, token_ids[:-1] if is_stop else token_ids)
        return StreamPiece(index, token_ids, rest, update.finish_reason, result)
