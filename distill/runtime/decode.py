"""Owns the decode loop: propose, run the target once, judge, commit, for rows that come and go.
Refuses to know clocks, HTTP and files. Plain decoding is this loop with nothing proposed.

Legend: B rows, K draft tokens, N flat token positions, V vocabulary, D width.

One round per :meth:`DecodeEngine.step`. The target's cache of a row always holds all of its
tokens but the last; a round feeds that last token and the drafts. After the commit everything that
has state (target cache, draft cache, output, counts) is at the same boundary. Random numbers are
keyed by (seed, tokens emitted so far), so a row's output never depends on its batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from distill.drafters.base import CacheSharer, Drafter, Proposal
from distill.errors import ConfigError
from distill.runtime.cache import RaggedCache
from distill.runtime.commit import find_boundary
from distill.runtime.draft_length import DraftLength, FixedDraftLength
from distill.runtime.forward import forward, prefill
from distill.runtime.requests import (
    DecodeRequest,
    DecodeResult,
    Row,
    RowRound,
    RowUpdate,
    check_request,
)
from distill.runtime.rounds import NOT_JUDGED, judge
from distill.runtime.stats import DecodeStats
from distill.sampling import log_normalizer

_EXPECTED_NEW_TOKENS = 512

__all__ = [
    "DecodeEngine",
    "DecodeRequest",
    "DecodeResult",
    "RowUpdate",
]


class DecodeEngine:
    """Decodes many requests together; rows join and leave between rounds.

    Args:
        target_model: a causal language model in evaluation mode.
        drafter: None for plain decoding. One drafter serves one engine.
        num_draft_tokens: K, the most tokens drafted per round unless a request says otherwise.
        max_batch_size: rows decoded together; further requests wait.
        max_length: tokens per row, prompt included; never beyond the target's own positions.
        tokenizer: gives results their text; needed for stop strings. Ids behind its end (padded
            rows of the output head) are then never emitted.
        keep_hidden: keep final hidden states and log-sum-exps, see :class:`DecodeResult`.
        draft_length: how each row's K is chosen, up to ``num_draft_tokens``, such as
            ``AdaptiveDraftLength``. None: always ``num_draft_tokens``.

    Raises:
        CacheRollbackError: the target's cache cannot forget single tokens.
        ConfigError: no row, fewer than no draft tokens, a draft length that asks for more than
            ``num_draft_tokens``, or a drafter that cannot use this target's layers.
        PairMismatchError: the drafter does not fit the target.
    """

    def __init__(
        self,
        target_model: Any,
        drafter: Drafter | None,
        *,
        num_draft_tokens: int,
        max_batch_size: int,
        max_length: int,
        tokenizer: Any = None,
        keep_hidden: bool = False,
        draft_length: DraftLength | None = None,
    ) -> None:
        if max_batch_size < 1 or num_draft_tokens < 0:
            raise ConfigError(
                f"max_batch_size is {max_batch_size} and num_draft_tokens {num_draft_tokens}; the "
                "first must be at least 1, the second at least 0 (plain decoding)"
            )
        if draft_length is not None and draft_length.max_draft_tokens > num_draft_tokens:
            raise ConfigError(
                f"draft_length asks for up to {draft_length.max_draft_tokens} draft tokens and "
                f"num_draft_tokens is {num_draft_tokens}; raise that to at least as many."
            )
        self._model = target_model
        self._drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        self._draft_length = draft_length or FixedDraftLength(num_draft_tokens)
        self._max_batch_size = max_batch_size
        self._cache = RaggedCache(target_model, max_rows=max_batch_size)
        positions = self._cache.max_positions
        self.max_length = max_length if positions is None else min(max_length, positions)
        self._tokenizer = tokenizer
        self._keep_hidden = keep_hidden
        self.vocabulary_size: int = target_model.get_output_embeddings().out_features
        if tokenizer is not None:
            self.vocabulary_size = min(self.vocabulary_size, len(tokenizer))
        if isinstance(drafter, CacheSharer):
            drafter.share(target_model, self._cache)
        if drafter is not None:
            drafter.start(vocabulary_size=self.vocabulary_size, max_batch_size=max_batch_size)
        self._pending: deque[Row] = deque()
        self._rows: list[Row] = []  # index = row of the cache
        self._finished: dict[int, Row] = {}
        self._finished_stats = DecodeStats()
        self._untold: list[RowUpdate] = []  # more than a step's only after one that broke off
        self._is_settled = True
        self._next_handle = 0

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._pending or self._rows or self._untold)

    @property
    def stats(self) -> DecodeStats:
        """Counts of everything decoded so far, rows in progress included."""
        rounds = [one for row in self._rows for one in row.rounds]
        return self._finished_stats + DecodeStats.from_rounds(rounds)

    def add(self, request: DecodeRequest) -> int:
        """Queue a request; returns its handle.

        Raises:
            DistillError: the request cannot be decoded, see ``requests.check_request``.
        """
        check_request(
            request,
            max_length=self.max_length,
            vocabulary_size=self.vocabulary_size,
            num_input_ids=self._model.get_input_embeddings().weight.shape[0],
            has_tokenizer=self._tokenizer is not None,
            device=self._model.device,
        )
        handle = self._next_handle
        self._next_handle += 1
        fixed = request.num_draft_tokens
        row = Row.of(
            handle,
            request,
            self.max_length,
            draft_length=self._draft_length.start() if fixed is None else FixedDraftLength(fixed),
            decode_text=None if self._tokenizer is None else partial(_text, self._tokenizer),
        )
        self._pending.append(row)
        return handle

    @torch.inference_mode()
    def step(self) -> list[RowUpdate]:
        """Run one round for every row; admits waiting requests first.

        An exception leaves every row where it was before the round, so the caller may cancel one
        and go on. If it comes while rows are told of their round (a draft length that fails, an
        interrupt), those that were are where the round took them, and their updates come with the
        next step's.
        """
        if not self._is_settled:
            self._settle()
        self._admit()
        if self._rows:
            self._is_settled = False
            try:
                rounds = self._round()
            except BaseException:
                self._settle()
                raise
            for row, found in zip(self._rows, rounds, strict=True):
                self._untold.append(row.take(found))
                row.draft_length.observe(found.num_drafted_to_observe, found.num_accepted)
            self._settle()
        told, self._untold = self._untold, []
        return told

    def cancel(self, handle: int) -> DecodeResult:
        """Drop a request, waiting or running, and return what it has so far.

        Raises:
            KeyError: no such request, or its result was already taken.
        """
        self._untold = [update for update in self._untold if update.handle != handle]
        for waiting in self._pending:
            if waiting.handle == handle:
                self._pending.remove(waiting)
                return waiting.result()
        for index, row in enumerate(self._rows):
            if row.handle == handle:
                self._leave(index)
                return row.result()
        return self.result(handle)

    def result(self, handle: int) -> DecodeResult:
        """Return the answer of a finished request, once: the engine forgets it.

        Raises:
            KeyError: not finished, unknown, or already taken.
        """
        return self._finished.pop(handle).result()

    def _admit(self) -> None:
        """Move waiting rows into free places, shortest first among those that enter together."""
        waiting, num_rows = self._pending, len(self._rows)
        entering = list(islice(waiting, self._max_batch_size - num_rows))
        if not entering:
            return
        # Neighbours of similar length are prefilled together with little padding.
        entering.sort(key=lambda row: row.num_prompt_tokens)
        prompts: dict[int, list[int]] = {}
        joined: list[Row] = []
        try:
            for row in entering:
                prompts[self._cache.join()] = row.token_ids[:-1]
                self._rows.append(row)
                if self._drafter is not None:
                    self._drafter.join(
                        row.handle,
                        row.token_ids,
                        row.request.sampling,
                        seed=row.request.seed,
                        stop_token_ids=row.request.stop_token_ids,
                        logits_processors=row.request.logits_processors,
                    )
                    joined.append(row)
            self._cache.reserve(max(self._expected_tokens(row) for row in entering))
            prefill(self._model, self._cache, prompts)
            self._pending = deque(islice(waiting, len(entering), None))
        except BaseException:
            for row in reversed(joined):
                assert self._drafter is not None
                self._drafter.leave(row.handle)
            while self._cache.num_rows > num_rows:
                self._cache.leave(self._cache.num_rows - 1)
            del self._rows[num_rows:]
            self._pending = waiting
            raise

    def _expected_tokens(self, row: Row) -> int:
        """How much of the cache to make at once; a longer answer lets it grow by doubling.

        Not the whole budget: a chat without ``max_tokens`` may use the rest of the context, and
        nearly none does.
        """
        longest = row.num_prompt_tokens + min(row.request.max_new_tokens, _EXPECTED_NEW_TOKENS)
        return min(longest, self.max_length) + self._num_draft_tokens + 1

    def _wanted_drafts(self, row: Row) -> int:
        """K for this round: one token of the budget and of the context is the target's own."""
        return min(
            row.draft_length.choose(),
            row.request.max_new_tokens - row.num_emitted - 1,
            self.max_length - len(row.token_ids) - 1,
        )

    def _round(self) -> list[RowRound]:
        """Propose, run the target, judge, and find where every block ends. Changes no row."""
        wanted = [self._wanted_drafts(row) for row in self._rows]
        proposal = self._propose(wanted)
        drafts = [
            _up_to_a_stop(draft, row.request.stop_token_ids)
            for row, draft in zip(self._rows, _token_lists(proposal), strict=True)
        ]
        pairs = zip(self._rows, drafts, strict=True)
        fed = [[row.token_ids[-1], *draft] for row, draft in pairs]
        output = forward(self._model, self._cache, fed, keep_hidden=self._keep_hidden)
        logits_NV = output.logits_NV[:, : self.vocabulary_size]
        verification = judge(self._rows, drafts, logits_NV, proposal.probs_BKV)
        accepted_B = verification.num_accepted_B.tolist()
        next_B = verification.next_token_B.tolist()
        hidden_ND = output.hidden_ND
        logsumexp_N = None if hidden_ND is None else log_normalizer(logits_NV)
        rounds, flat = [], 0
        for index, (row, draft) in enumerate(zip(self._rows, drafts, strict=True)):
            block = draft[: accepted_B[index]]
            is_judged = next_B[index] != NOT_JUDGED
            if is_judged:
                block.append(next_B[index])
            boundary = find_boundary(
                block,
                emitted_token_ids=row.output_token_ids,
                num_prompt_tokens=row.num_prompt_tokens,
                rules=row.rules,
            )
            stop = flat + boundary.num_tokens
            rounds.append(
                RowRound(
                    num_asked=wanted[index],
                    num_drafted=len(draft) if is_judged else len(block),
                    num_accepted=accepted_B[index],
                    token_ids=block[: boundary.num_tokens],
                    finish_reason=boundary.finish_reason,
                    # What predicted each token of the block.
                    hidden_TD=None if hidden_ND is None else _part(hidden_ND, flat, stop),
                    logsumexp_T=None if logsumexp_N is None else _part(logsumexp_N, flat, stop),
                )
            )
            flat += len(draft) + 1
        return rounds

    def _propose(self, wanted: list[int]) -> Proposal:
        if self._drafter is None or not any(wanted):
            nothing_BK = torch.zeros(len(wanted), 0, dtype=torch.long)
            return Proposal(nothing_BK, [0] * len(wanted), None)
        return self._drafter.propose(
            [row.handle for row in self._rows], [row.token_ids for row in self._rows], wanted
        )

    def _settle(self) -> None:
        """Let finished rows leave, and roll everything to the tokens that stand.

        Where it breaks off, the next step does it again: every part of it may be repeated.
        """
        for index in reversed(range(len(self._rows))):
            row = self._rows[index]
            if row.finish_reason is not None:
                self._leave(index)
                self._finished[row.handle] = row
        for index, row in enumerate(self._rows):
            num_valid_tokens = len(row.token_ids) - 1  # the last one is read by the next round
            self._cache.roll_back(index, num_valid_tokens)
            if self._drafter is not None:
                self._drafter.commit(row.handle, num_valid_tokens)
        self._is_settled = True

    def _leave(self, index: int) -> None:
        """Take a row out of both caches; the last row moves into its place in each."""
        row = self._rows[index]
        if self._drafter is not None:
            self._drafter.leave(row.handle)
        self._cache.leave(index)
        last = self._rows.pop()
        if last is not row:
            self._rows[index] = last
        self._finished_stats += DecodeStats.from_rounds(row.rounds)


def _text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    # A function, not a method: a row that pointed back at its engine would keep the caches of a
    # finished engine alive until the garbage collector comes by, gigabytes later.
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


def _token_lists(proposal: Proposal) -> list[list[int]]:
    padded: list[list[int]] = proposal.tokens_BK.tolist()
    return [row[:number] for row, number in zip(padded, proposal.num_tokens_B, strict=True)]


def _up_to_a_stop(draft: list[int], stop_token_ids: frozenset[int]) -> list[int]:
    """A draft without what stands behind a stop token: that could never be emitted."""
    for index, token in enumerate(draft):
        if token in stop_token_ids:
            return draft[: index + 1]
    return draft


def _part(whole: Tensor, start: int, stop: int) -> Tensor:
    """A part of a round's tensor; a small one alone, for a view keeps the whole round alive."""
    part = whole[start:stop]
    return part.clone() if 2 * len(part) < len(whole) else part
