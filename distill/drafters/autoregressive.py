"""Owns drafting token by token with a causal language model, whosever weights and cache they are.
Refuses to know where the cache comes from, and how many tokens are accepted before it is told.

Legend: A active rows of one call, B asked rows, K draft tokens, V the target's vocabulary, U the
draft's own vocabulary (a subset of V, or V padded differently).

A row's cache is valid up to a number of tokens; whatever committed tokens are missing is read at
the next proposal. So after a full acceptance (the last draft was never read back), after rounds
without drafts and for a new prompt the same code runs, and the cache cannot have holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill.drafters.base import Proposal
from distill.errors import PairMismatchError, SamplingError
from distill.logit_edits import LogitsProcessor, edit_logits, has_edits
from distill.models.quantization import Int8Linear
from distill.runtime.cache import RaggedCache
from distill.runtime.forward import forward, prefill
from distill.sampling import (
    DRAFT_LANE,
    SamplingConfig,
    argmax_last,
    probs_by_row,
    sample,
    uniforms,
)

_MAX_FEED = 8  # more missing tokens than this are read apart, not as padding for every row


@dataclass
class _Row:
    cache_row: int
    num_prompt_tokens: int
    sampling: SamplingConfig
    seed: int
    stop_token_ids: frozenset[int]
    logits_processors: Sequence[LogitsProcessor]


@dataclass
class _Active:
    """One row of the proposal in progress."""

    index: int  # where the caller wants it
    row: _Row
    tokens: list[int]  # prompt, output and what was drafted so far
    num_drafts: int


class AutoregressiveDrafter:
    """Drafts token by token, each drawn from the draft after the row's own sampling transform.

    A subclass provides the model and the cache, and lets rows into and out of that cache.

    Args:
        vocabulary_token_ids: ids the draft may propose. Only these rows of its output head are
            computed, and q is zero elsewhere, so the output law is untouched. None: all.
    """

    model: Any
    max_length: int | None
    _cache: RaggedCache
    _num_layers: int | None = None  # layers that run for a draft; None: all

    def __init__(self, *, vocabulary_token_ids: Sequence[int] | Tensor | None = None) -> None:
        self._requested_ids = vocabulary_token_ids
        self._rows: dict[int, _Row] = {}
        self._owners: list[int] = []  # cache row -> handle
        self._head: nn.Module | None = None
        self._ids_U: Tensor | None = None
        self._probs: Tensor | None = None
        self._vocabulary_size = 0

    def start(self, *, vocabulary_size: int, max_batch_size: int) -> None:
        """Forget every row and get ready for a target with this many token ids.

        Raises:
            PairMismatchError: ``vocabulary_token_ids`` has ids that the target or draft lacks.
        """
        self._rows, self._owners = {}, []
        self._vocabulary_size = vocabulary_size
        self._head = self._ids_U = self._probs = None
        if self._requested_ids is None:
            return
        own_head = self.model.get_output_embeddings()
        ids_U = torch.as_tensor(self._requested_ids, dtype=torch.long).unique()
        limit = min(vocabulary_size, own_head.out_features)
        if not ids_U.numel() or int(ids_U[0]) < 0 or int(ids_U[-1]) >= limit:
            raise PairMismatchError(
                f"The draft's vocabulary subset needs ids from 0 to {limit - 1} (target and draft "
                f"have both), found {ids_U.numel()} ids up to "
                f"{int(ids_U[-1]) if ids_U.numel() else 'none'}. Use the subset saved with this "
                "draft, or none."
            )
        self._ids_U = ids_U.to(self.model.device)
        self._head = _head_rows(own_head, self._ids_U)

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
        """Remember the row, the last one of the cache; it is read at the first proposal."""
        row = _Row(
            len(self._owners),
            len(prompt_token_ids),
            sampling,
            seed,
            stop_token_ids,
            logits_processors,
        )
        self._owners.append(handle)
        self._rows[handle] = row

    def commit(self, handle: int, num_valid_tokens: int) -> None:
        """Roll the row back to the tokens that stand; fewer may have been read so far."""
        row = self._rows[handle].cache_row
        self._cache.roll_back(row, min(self._cache.lengths[row], num_valid_tokens))

    def leave(self, handle: int) -> None:
        """Forget the row; the last row of the cache takes over its number."""
        row = self._rows.pop(handle).cache_row
        last_owner = self._owners.pop()
        if last_owner != handle:
            self._owners[row] = last_owner
            self._rows[last_owner].cache_row = row

    def num_cached_tokens(self, handle: int) -> int:
        """How many tokens of the row the draft has read: a number the tests watch."""
        return self._cache.lengths[self._rows[handle].cache_row]

    @torch.inference_mode()
    def propose(
        self,
        handles: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens_B: Sequence[int],
    ) -> Proposal:
        """Draft up to the asked number per row; fewer where the draft's context ends."""
        active = self._active_rows(handles, token_ids, num_draft_tokens_B)
        width = max((row.num_drafts for row in active), default=0)
        device = self.model.device
        drafted: list[list[int]] = [[] for _ in handles]
        probs_BKV = uniforms_AK = None
        if not all(a.row.sampling.is_greedy for a in active):
            probs_BKV = self._room_for_probs(len(handles), width, device)
            uniforms_AK = self._uniforms(active, width)
        if active:
            self._read_long_prefixes(active)
        for step in range(width):
            live = [n for n, a in enumerate(active) if a.num_drafts > step]
            if not live:
                break
            stepping = [active[n] for n in live]
            logits_AU = self._read(stepping)
            uniforms_A = None if uniforms_AK is None else uniforms_AK[live, step]
            tokens_A = self._draw(stepping, logits_AU, uniforms_A, step, probs_BKV)
            for a, token in zip(stepping, tokens_A.tolist(), strict=True):
                if a.num_drafts > step:  # a row that ran out of tokens to draw stops here
                    a.tokens.append(token)
                    drafted[a.index].append(token)
                    if token in a.row.stop_token_ids:
                        a.num_drafts = step + 1  # nothing behind it could ever be emitted
        padded = [[*tokens, *([0] * (width - len(tokens)))] for tokens in drafted]
        tokens_BK = torch.tensor(padded, dtype=torch.long, device=device).view(len(drafted), width)
        return Proposal(tokens_BK, [len(tokens) for tokens in drafted], probs_BKV)

    def _room_for_probs(self, num_rows: int, width: int, device: torch.device) -> Tensor:
        """A part of one buffer that is used again every round: it is as large as B K V.

        Zero where this draft never writes, that is for ids it lacks; rows that are not written
        this round keep old values and are not read.
        """
        old = self._probs
        if old is None or old.shape[0] < num_rows or old.shape[1] < width:
            rows = num_rows if old is None else max(num_rows, old.shape[0])
            steps = width if old is None else max(width, old.shape[1])
            shape = (rows, steps, self._vocabulary_size)
            self._probs = torch.zeros(shape, dtype=torch.float32, device=device)
        assert self._probs is not None
        return self._probs[:num_rows, :width]

    def _active_rows(
        self,
        handles: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens_B: Sequence[int],
    ) -> list[_Active]:
        """Rows that draft, in cache order; the last draft needs no place in the cache."""
        active = []
        for index, (handle, tokens) in enumerate(zip(handles, token_ids, strict=True)):
            number = num_draft_tokens_B[index]
            # The last token is read again if need be: its logits are the first draft's.
            self.commit(handle, len(tokens) - 1)
            if self.max_length is not None:
                number = min(number, self.max_length - len(tokens) + 1)
            if number > 0 and self._can_read(handle, tokens):
                active.append(_Active(index, self._rows[handle], list(tokens), number))
        return sorted(active, key=lambda a: a.row.cache_row)

    def _can_read(self, handle: int, tokens: Sequence[int]) -> bool:
        """Whether the draft has an embedding for everything it has not read yet.

        A target may have more ids than its draft; a row that uses one goes on without drafts.
        """
        unread = tokens[self.num_cached_tokens(handle) :]
        num_readable: int = self.model.get_input_embeddings().weight.shape[0]
        return max(unread) < num_readable

    def _read_long_prefixes(self, active: list[_Active]) -> None:
        missing = {}
        for a in active:
            cached = self._cache.lengths[a.row.cache_row]
            if len(a.tokens) - cached > _MAX_FEED:
                missing[a.row.cache_row] = a.tokens[cached:-1]
        self._cache.reserve(max(len(a.tokens) + a.num_drafts for a in active))
        prefill(self.model, self._cache, missing)

    def _read(self, stepping: list[_Active]) -> Tensor:
        """Read what each row is missing; logits [A, U] after its last token."""
        first = stepping[0].row.cache_row
        last = stepping[-1].row.cache_row
        feeds: list[Sequence[int]] = [()] * (last - first + 1)
        for a in stepping:
            row = a.row.cache_row
            feeds[row - first] = a.tokens[self._cache.lengths[row] :]
        output = forward(
            self.model,
            self._cache,
            feeds,
            first_row=first,
            logits_of="last",
            head=self._head,
            num_layers=self._num_layers,
        )
        logits_AU = output.logits_NV
        return logits_AU if self._ids_U is not None else logits_AU[:, : self._vocabulary_size]

    def _draw(
        self,
        stepping: list[_Active],
        logits_AU: Tensor,
        uniforms_A: Tensor | None,
        step: int,
        probs_BKV: Tensor | None,
    ) -> Tensor:
        """One token per row; records in ``probs_BKV`` what it was drawn from.

        Both are None where every row takes the most likely token.
        """
        logits_AU = self._edited(stepping, logits_AU, step)
        greedy = [n for n, a in enumerate(stepping) if a.row.sampling.is_greedy]
        sampled = [n for n, a in enumerate(stepping) if not a.row.sampling.is_greedy]
        if not sampled:
            columns_A = argmax_last(logits_AU)
        else:
            assert probs_BKV is not None
            assert uniforms_A is not None
            chosen = logits_AU if not greedy else logits_AU[sampled]
            probs_AU = probs_by_row(chosen, [stepping[n].row.sampling for n in sampled]).float()
            for n, probs_U in zip(sampled, probs_AU, strict=True):
                drawn_from_V = probs_BKV[stepping[n].index, step]
                if self._ids_U is None:
                    drawn_from_V[: len(probs_U)] = probs_U
                else:
                    drawn_from_V.scatter_(0, self._ids_U, probs_U)
            columns_A = sample(probs_AU, uniforms_A if not greedy else uniforms_A[sampled])
            if greedy:
                drawn_A, columns_A = columns_A, columns_A.new_empty(len(stepping))
                columns_A[sampled] = drawn_A
                columns_A[greedy] = argmax_last(logits_AU[greedy])
        return columns_A if self._ids_U is None else self._ids_U[columns_A]

    def _edited(self, stepping: list[_Active], logits_AU: Tensor, step: int) -> Tensor:
        """Apply penalties and bans as the target will, on the prefix that includes the drafts."""
        rows = [
            n for n, a in enumerate(stepping) if has_edits(a.row.sampling, a.row.logits_processors)
        ]
        if not rows:
            return logits_AU
        logits_AU = logits_AU.float().clone()
        for n in rows:
            a = stepping[n]
            size = max(self._vocabulary_size, logits_AU.shape[1])
            ids_U = self._ids_U
            if ids_U is None:
                ids_U = torch.arange(logits_AU.shape[1], device=logits_AU.device)
            full_V = logits_AU.new_full((size,), -torch.inf)
            full_V[ids_U] = logits_AU[n]
            try:
                edited_V = edit_logits(
                    full_V,
                    a.row.sampling,
                    prompt_token_ids=a.tokens[: a.row.num_prompt_tokens],
                    output_token_ids=a.tokens[a.row.num_prompt_tokens :],
                    stop_token_ids=a.row.stop_token_ids,
                    logits_processors=a.row.logits_processors,
                )
            except Exception as error:
                # The draft's few ids may all be banned; the target still has others to choose. And
                # what fails behind a drafted token fails for everybody only if that token stands:
                # then the target is asked the same.
                if not step and not isinstance(error, SamplingError):
                    raise
                a.num_drafts = step
                continue
            logits_AU[n] = edited_V[ids_U]
        return logits_AU

    def _uniforms(self, active: list[_Active], width: int) -> Tensor:
        """One number per row and draft, keyed by the position of the token in the output."""
        counters = [
            [len(a.tokens) - a.row.num_prompt_tokens + step for step in range(width)]
            for a in active
        ]
        return uniforms([[a.row.seed] for a in active], counters, DRAFT_LANE)


def _head_rows(head: Any, ids_U: Tensor) -> nn.Module:
    """A linear layer with some rows of the output head, copied once."""
    if isinstance(head, Int8Linear):
        return head.rows(ids_U)
    weight_UD = head.weight.detach()[ids_U]
    bias = getattr(head, "bias", None)
    with torch.device("meta"):
        rows = nn.Linear(weight_UD.shape[1], weight_UD.shape[0], bias=bias is not None)
    rows.weight = nn.Parameter(weight_UD, requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias.detach()[ids_U], requires_grad=False)
    return rows
