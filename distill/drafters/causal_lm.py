"""Owns drafting with a small causal language model that keeps its own key/value cache.
Refuses to know the target; how a token is drafted is in ``autoregressive``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor

from distill.drafters.autoregressive import AutoregressiveDrafter
from distill.drafters.base import registry
from distill.logit_edits import LogitsProcessor
from distill.runtime.cache import RaggedCache
from distill.sampling import SamplingConfig


@registry.register("causal_lm")
class CausalLMDrafter(AutoregressiveDrafter):
    """Drafts token by token, each drawn from the draft after the row's own sampling transform.

    Args:
        model: a causal language model in evaluation mode whose cache can be rolled back.
        vocabulary_token_ids: ids the draft may propose. Only these rows of its output head are
            computed, and q is zero elsewhere, so the output law is untouched. None: all.

    Raises:
        CacheRollbackError: the model's cache cannot forget single tokens.
    """

    def __init__(
        self, model: Any, *, vocabulary_token_ids: Sequence[int] | Tensor | None = None
    ) -> None:
        super().__init__(vocabulary_token_ids=vocabulary_token_ids)
        self.model = model
        self._cache = RaggedCache(model, max_rows=1)
        self.max_length = self._cache.max_positions

    @classmethod
    def of(cls, draft: Any, *, vocabulary_token_ids: Sequence[int] | Tensor | None = None) -> Self:
        """The drafter of a loaded model (``.model``), with the vocabulary that was loaded with it.

        Args:
            vocabulary_token_ids: ids to propose instead of its own, such as ``range(n)``.

        Raises:
            CacheRollbackError: the model's cache cannot forget single tokens.
        """
        if vocabulary_token_ids is None:
            vocabulary_token_ids = getattr(draft, "vocabulary_token_ids", None)
        return cls(draft.model, vocabulary_token_ids=vocabulary_token_ids)

    def start(self, *, vocabulary_size: int, max_batch_size: int) -> None:
        """Forget every row and get ready for a target with this many token ids.

        Raises:
            PairMismatchError: ``vocabulary_token_ids`` has ids that the target or draft lacks.
        """
        self._cache = RaggedCache(self.model, max_rows=max_batch_size)
        super().start(vocabulary_size=vocabulary_size, max_batch_size=max_batch_size)

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
        """Give the row a place in the cache; its prompt is read at the first proposal."""
        self._cache.join()
        super().join(
            handle,
            prompt_token_ids,
            sampling,
            seed=seed,
            stop_token_ids=stop_token_ids,
            logits_processors=logits_processors,
        )

    def leave(self, handle: int) -> None:
        """Free the row's place; the last row of the cache moves into it."""
        row = self._rows[handle].cache_row
        super().leave(handle)
        self._cache.leave(row)
