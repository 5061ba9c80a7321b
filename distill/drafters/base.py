"""Owns the contract between the decode loop and whatever proposes tokens, and its registry.
Refuses to know any particular way of proposing.

Legend: B rows, K draft tokens, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from distill.registry import Registry
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
    ) -> None:
        """Meet a new row; nothing is computed before the first proposal."""
        ...

    def propose(
        self,
        handles: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens_B: Sequence[int],
    ) -> Proposal:
        """Draft up to ``num_draft_tokens_B[i]`` tokens after ``token_ids[i]`` (prompt and output).

        A row asked for 0 drafts costs nothing and may be asked for more later.
        """
        ...

    def commit(self, handle: int, num_valid_tokens: int) -> None:
        """Only the first ``num_valid_tokens`` of what was read or drafted stand: roll back."""
        ...

    def leave(self, handle: int) -> None:
        """The row has ended; its handle is never used again."""
        ...


registry: Registry[Any] = Registry("drafter", "distill.drafters")
"""name -> class. Constructors differ: ``causal_lm`` takes a model, ``prompt_lookup`` numbers."""
