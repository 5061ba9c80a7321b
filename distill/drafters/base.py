"""Owns the contract between the decode loop and whatever proposes tokens, and its registry.
Refuses to know any particular way of proposing.

Legend: B rows, K draft tokens, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from distill.logit_edits import LogitsProcessor
from distill.registry import Registry
from distill.runtime.cache import RaggedCache
from distill.sampling import SamplingConfig


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens of one round, rows in the order they were asked for.

    tokens_BK: padded with any valid id behind each row's own number.
    num_tokens_B: how many are real; at most what was asked.
    probs_BKV: float32, what each token was REALLY drawn from; None for a deterministic drafter
        (q is the one-hot of the token). Rows at temperature 0 are never read. Valid until the
        drafter's next proposal.
    """

    tokens_BK: Tensor
    num_tokens_B: Sequence[int]
    probs_BKV: Tensor | None


@runtime_checkable
class Drafter(Protocol):
    """Proposes continuations for rows that join and leave; keeps whatever state that needs.

    ``max_length`` is how many tokens (prompt included) it can look at, None if any; a row longer
    than that is asked for no drafts and goes on with the target alone.
    """

    max_length: int | None

    def start(self, *, vocabulary_size: int, max_batch_size: int) -> None:
        """Forget every row and get ready for a target with this many token ids."""
        ...

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
        """Meet a new row; nothing is computed before the first proposal.

        An exception has to leave the rows as they were.
        """
        ...

    def propose(
        self,
        handles: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens_B: Sequence[int],
    ) -> Proposal:
        """Draft up to ``num_draft_tokens_B[i]`` tokens after ``token_ids[i]`` (prompt and output).

        What follows a drafted stop token is never used.

        A row asked for 0 drafts costs nothing and may be asked for more later.
        """
        ...

    def commit(self, handle: int, num_valid_tokens: int) -> None:
        """Only the first ``num_valid_tokens`` of what was read or drafted stand: roll back.

        May be repeated, and is after a proposal that failed.
        """
        ...

    def leave(self, handle: int) -> None:
        """The row has ended; its handle is never used again."""
        ...


@runtime_checkable
class CacheSharer(Protocol):
    """A drafter that computes with the target's own weights and cache, and holds none itself.

    The engine lends both before ``start``. The drafter's rows are the cache's rows: they join and
    leave together, in the same order. When a proposal is asked for, a row of the cache holds all
    of the row's tokens but the last, and so it must again when the proposal is returned.
    """

    def share(self, model: Any, cache: RaggedCache) -> None:
        """Take the target and the cache that its engine decodes with.

        Raises:
            ConfigError: this drafter's settings do not fit the target.
        """
        ...


registry: Registry[Any] = Registry("drafter", "distill.drafters")
"""name -> class. Constructors differ: ``causal_lm`` takes a model, the others take numbers."""
