"""Owns the choice of the weights that are kept: held-out acceptance, and the best seen so far.

Refuses to know the training loss: a lower loss on the training text is not what a draft is for.

B rows, T positions, N positions scored, V vocabulary or its subset, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.losses import DraftColumns, FullKnowledge, Head
from distill.losses.base import log_probs, whole_probs
from distill.losses.chunked import default_chunk_tokens
from distill.training.data import Batch, Row, TargetSource, collate, pack_by_length


@dataclass(frozen=True)
class HeldOutScore:
    """Acceptance on the target's own held-out text, means over `num_positions`.

    `acceptance`: sum_v min(p, q), what speculative sampling accepts at temperature 1 (Leviathan et
    al. 2023, arXiv 2211.17192, corollary 3.6). `greedy_agreement`: how often the most likely tokens
    are the same, what is accepted at temperature 0. Both count what the subset leaves out.
    """

    acceptance: float
    greedy_agreement: float
    num_positions: int


@dataclass(frozen=True)
class Best:
    """The step with the highest held-out acceptance, and the trained parameters it had."""

    step: int
    score: HeldOutScore
    parameters: dict[str, Tensor]

    @classmethod
    def of(cls, step: int, score: HeldOutScore, parameters: Mapping[str, Tensor]) -> Best:
        """Copy the parameters."""
        copies = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        return cls(step, score, copies)


def evaluations_since(best: Best, log: Sequence[Mapping[str, Any]]) -> int:
    """Return how many evaluations of a log came after the best one."""
    return sum(1 for record in log if "held_out" in record and record["step"] > best.step)


class HeldOut:
    """A fixed sample of held-out rows, with what the target would choose at each position."""

    def __init__(
        self,
        rows: Sequence[Row],
        source: TargetSource,
        *,
        target_head: Head,
        token_ids_V: Tensor | None,
        max_tokens: int,
        micro_batch_tokens: int,
        seed: int,
    ) -> None:
        """`target_head` is the whole one; `token_ids_V` is the draft's subset of its rows.

        `source` knows the target in full: what weights are kept must not depend on the store.
        """
        chosen = _sample(rows, max_tokens, seed)
        chosen.sort(key=lambda row: (row.length, row.row_id))
        packed = pack_by_length(chosen, range(len(chosen)), micro_batch_tokens)
        self._batches = [collate([chosen[i] for i in indices], source) for indices in packed]
        self._token_ids_V = token_ids_V
        self._columns = DraftColumns(target_head.subset(token_ids_V), token_ids_V)
        chunk = default_chunk_tokens(target_head.num_rows)
        with torch.no_grad():
            # once: the whole vocabulary is the most expensive part of scoring, and it is fixed
            self._choices = [
                torch.cat(
                    [target_head.logits(h_ND).argmax(-1) for h_ND in batch_states.split(chunk)]
                )
                for batch_states in (
                    _full(batch, target_head.weight_VD.device).hidden_ND for batch in self._batches
                )
            ]

    @torch.no_grad()
    def score(self, draft_states: Callable[[Batch], Tensor], draft_head: Head) -> HeldOutScore:
        """Score a draft: `draft_states` gives its final states hidden_ND at a batch's positions.

        `draft_head` has the rows of the subset.
        """
        accepted = agreed = 0.0
        num_positions = 0
        chunk = default_chunk_tokens(draft_head.num_rows)
        for batch, choice_N in zip(self._batches, self._choices, strict=True):
            hidden_ND = draft_states(batch)
            for start in range(0, len(hidden_ND), chunk):
                part = slice(start, start + chunk)
                alpha_N, token_N = self._compare(batch, part, draft_head.logits(hidden_ND[part]))
                accepted += alpha_N.sum(dtype=torch.float64).item()
                agreed += (token_N == choice_N[part]).sum().item()
            num_positions += len(hidden_ND)
        return HeldOutScore(accepted / num_positions, agreed / num_positions, num_positions)

    def _compare(self, batch: Batch, part: slice, draft_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Return (alpha_N, the draft's most likely token id_N)."""
        target = _full(batch, draft_NV.device)
        target_NV, logsumexp_N = target.logits(part, self._columns)
        alpha_N = torch.minimum(whole_probs(target_NV, logsumexp_N), log_probs(draft_NV).exp()).sum(
            dim=-1
        )
        token_N = draft_NV.argmax(dim=-1)
        return alpha_N, token_N if self._token_ids_V is None else self._token_ids_V[token_N]


def _full(batch: Batch, device: torch.device) -> FullKnowledge:
    assert isinstance(batch.target, FullKnowledge), "held-out rows are scored in full"
    return batch.target.to(device)


def _sample(rows: Sequence[Row], max_tokens: int, seed: int) -> list[Row]:
    """Return rows in a seeded order until `max_tokens` positions are reached; at least one row."""
    chosen: list[Row] = []
    num_positions = 0
    for index in np.random.default_rng(seed).permutation(len(rows)).tolist():
        if chosen and num_positions + rows[index].num_positions > max_tokens:
            break
        chosen.append(rows[index])
        num_positions += rows[index].num_positions
    return chosen
