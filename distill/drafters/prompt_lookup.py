"""Owns drafting by copying: what followed the last few tokens when they occurred before.
Refuses to know models; it needs no training and is the baseline a trained draft has to beat.

The idea is prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding): answers often
repeat their prompt. The proposal is deterministic, so q is the one-hot of each token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distill.drafters.base import Proposal, registry
from distill.logit_edits import LogitsProcessor
from distill.sampling import SamplingConfig


@registry.register("prompt_lookup")
class PromptLookupDrafter:
    """Finds the longest recent n-gram at the end of a row and proposes what came after it.

    Args:
        max_ngram, min_ngram: lengths tried, longest first; among equals the latest match wins.
    """

    max_length: int | None = None

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        assert 1 <= min_ngram <= max_ngram
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self._vocabulary_size = 0

    def start(self, *, vocabulary_size: int, max_batch_size: int) -> None:
        """Remember how many ids the target has; prompts may hold ids that it cannot emit."""
        self._vocabulary_size = vocabulary_size

    def join(
        self,
        handle: int,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        seed: int,
        stop_token_ids: frozenset[int] = frozenset(),
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """Nothing to prepare: a row's own tokens are all there is."""

    def propose(
        self,
        handles: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens_B: Sequence[int],
    ) -> Proposal:
        """Copy up to the asked number of tokens from behind the match; none without a match."""
        drafts = [
            self._continuation(list(tokens), number) if number else []
            for tokens, number in zip(token_ids, num_draft_tokens_B, strict=True)
        ]
        width = max((len(draft) for draft in drafts), default=0)
        padded = [draft + [0] * (width - len(draft)) for draft in drafts]
        tokens_BK = torch.tensor(padded, dtype=torch.long).reshape(len(drafts), width)
        return Proposal(tokens_BK, [len(draft) for draft in drafts], None)

    def commit(self, handle: int, num_valid_tokens: int) -> None:
        """Nothing to roll back."""

    def leave(self, handle: int) -> None:
        """Nothing to forget."""

    def _continuation(self, tokens: list[int], number: int) -> list[int]:
        for size in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            ngram = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start] == ngram[0] and tokens[start : start + size] == ngram:
                    return self._emittable(tokens[start + size : start + size + number])
        return []

    def _emittable(self, draft: list[int]) -> list[int]:
        """Cut before the first id the target cannot emit (a padded or draft-only id)."""
        for index, token in enumerate(draft):
            if token >= self._vocabulary_size:
                return draft[:index]
        return draft
