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
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill.drafters.base import Drafter, Proposal, registry
from distill.drafters.causal_lm import CausalLMDrafter
from distill.errors import ConfigError
from distill.runtime.cache import RaggedCache, forward, prefill
from distill.runtime.commit import find_boundary
from distill.runtime.requests import (
    DecodeRequest,
    DecodeResult,
    Row,
    RowUpdate,
    check_request,
    prompt_token_ids,
)
from distill.runtime.rounds import judge
from distill.runtime.stats import DecodeStats
from distill.runtime.verify import Verification
from distill.sampling import SamplingConfig, log_normalizer

_EXPECTED_NEW_TOKENS = 512

__all__ = [
    "DecodeEngine",
    "DecodeRequest",
    "DecodeResult",
    "RowUpdate",
    "decode_batch",
    "speculative_decode",
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

    Raises:
        CacheRollbackError: the target's cache cannot forget single tokens.
        ConfigError: no row, or fewer than no draft tokens.
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
    ) -> None:
        if max_batch_size < 1 or num_draft_tokens < 0:
            raise ConfigError(
                f"max_batch_size is {max_batch_size} and num_draft_tokens {num_draft_tokens}; the "
                "first must be at least 1, the second at least 0 (plain decoding)"
            )
        self._model = target_model
        self._drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        self._max_batch_size = max_batch_size
        self._cache = RaggedCache(target_model, max_rows=max_batch_size)
        positions = self._cache.max_positions
        self.max_length = max_length if positions is None else min(max_length, positions)
        self._tokenizer = tokenizer
        self._keep_hidden = keep_hidden
        self.vocabulary_size: int = target_model.get_output_embeddings().weight.shape[0]
        if tokenizer is not None:
            self.vocabulary_size = min(self.vocabulary_size, len(tokenizer))
        if drafter is not None:
            drafter.start(vocabulary_size=self.vocabulary_size, max_batch_size=max_batch_size)
        self._pending: deque[Row] = deque()
        self._rows: list[Row] = []  # index = row of the cache
        self._finished: dict[int, Row] = {}
        self._finished_stats = DecodeStats()
        self._next_handle = 0

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._pending or self._rows)

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
        )
        handle = self._next_handle
        self._next_handle += 1
        decode_text = None if self._tokenizer is None else partial(_text, self._tokenizer)
        self._pending.append(Row.of(handle, request, self.max_length, decode_text))
        return handle

    @torch.inference_mode()
    def step(self) -> list[RowUpdate]:
        """Run one round for every row; admits waiting requests first.

        An exception leaves every row where it was before the round, so the caller may cancel one
        and go on.
        """
        self._admit()
        if not self._rows:
            return []
        lengths = list(self._cache.lengths)
        try:
            proposal = self._propose()
            drafts = _token_lists(proposal)
            pairs = zip(self._rows, drafts, strict=True)
            fed = [[row.token_ids[-1], *draft] for row, draft in pairs]
            output = forward(self._model, self._cache, fed, keep_hidden=self._keep_hidden)
            logits_NV = output.logits_NV[:, : self.vocabulary_size]
            verification = judge(self._rows, drafts, logits_NV, proposal.probs_BKV)
        except BaseException:
            self._restore(lengths)
            raise
        if output.hidden_ND is not None:
            self._keep(verification, drafts, logits_NV, output.hidden_ND)
        return self._commit(verification, drafts)

    def cancel(self, handle: int) -> DecodeResult:
        """Drop a request, waiting or running, and return what it has so far.

        Raises:
            KeyError: no such request, or its result was already taken.
        """
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
        free = self._max_batch_size - len(self._rows)
        entering = [self._pending.popleft() for _ in range(min(free, len(self._pending)))]
        if not entering:
            return
        # Neighbours of similar length are prefilled together with little padding.
        entering.sort(key=lambda row: row.num_prompt_tokens)
        prompts: dict[int, list[int]] = {}
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
                )
        try:
            self._cache.reserve(max(self._expected_tokens(row) for row in entering))
            prefill(self._model, self._cache, prompts)
        except BaseException:
            for row in reversed(entering):
                self._leave(self._rows.index(row))
                self._pending.appendleft(row)
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
        wanted = row.request.num_draft_tokens
        return min(
            self._num_draft_tokens if wanted is None else wanted,
            row.request.max_new_tokens - row.num_emitted - 1,
            self.max_length - len(row.token_ids) - 1,
        )

    def _propose(self) -> Proposal:
        wanted = [self._wanted_drafts(row) for row in self._rows]
        if self._drafter is None or not any(wanted):
            nothing_BK = torch.zeros(len(wanted), 0, dtype=torch.long)
            return Proposal(nothing_BK, [0] * len(wanted), None)
        return self._drafter.propose(
            [row.handle for row in self._rows], [row.token_ids for row in self._rows], wanted
        )

    def _keep(
        self,
        verification: Verification,
        drafts: list[list[int]],
        logits_NV: Tensor,
        hidden_ND: Tensor,
    ) -> None:
        """Keep what predicted each verified token; the commit's boundary is applied later."""
        logsumexp_N = log_normalizer(logits_NV)
        flat = 0
        for row, draft, accepted in zip(
            self._rows, drafts, verification.num_accepted_B.tolist(), strict=True
        ):
            row.hidden.append(hidden_ND[flat : flat + accepted + 1])
            row.logsumexp.append(logsumexp_N[flat : flat + accepted + 1])
            flat += len(draft) + 1

    def _commit(self, verification: Verification, drafts: list[list[int]]) -> list[RowUpdate]:
        """Cut every block at its boundary and roll all state to it."""
        accepted_B = verification.num_accepted_B.tolist()
        next_B = verification.next_token_B.tolist()
        updates = []
        for index, (row, draft) in enumerate(zip(self._rows, drafts, strict=True)):
            block = [*draft[: accepted_B[index]], next_B[index]]
            boundary = find_boundary(
                block,
                emitted_token_ids=row.output_token_ids,
                num_prompt_tokens=row.num_prompt_tokens,
                rules=row.rules,
            )
            emitted = block[: boundary.num_tokens]
            num_before = len(row.token_ids)
            row.token_ids.extend(emitted)
            row.rounds.append((len(draft), accepted_B[index], len(emitted)))
            row.finish_reason = boundary.finish_reason
            updates.append(RowUpdate(row.handle, emitted, boundary.finish_reason))
            if boundary.finish_reason is None:
                self._cache.roll_back(index, len(row.token_ids) - 1)
                if self._drafter is not None:
                    self._drafter.commit(row.handle, num_before + accepted_B[index])
        for index in reversed(range(len(self._rows))):
            row = self._rows[index]
            if row.finish_reason is not None:
                self._leave(index)
                self._finished[row.handle] = row
        return updates

    def _leave(self, index: int) -> None:
        """Take a row out of both caches; the last row moves into its place in each."""
        row = self._rows[index]
        self._finished_stats += DecodeStats.from_rounds(row.rounds)
        if self._drafter is not None:
            self._drafter.leave(row.handle)
        self._cache.leave(index)
        last = self._rows.pop()
        if last is not row:
            self._rows[index] = last

    def _restore(self, lengths: list[int]) -> None:
        """Bring every row's caches back to what is committed, after a round that failed."""
        for index, (row, length) in enumerate(zip(self._rows, lengths, strict=True)):
            self._cache.roll_back(index, length)
            if self._drafter is not None:
                self._drafter.commit(row.handle, len(row.token_ids))


def decode_batch(engine: DecodeEngine, requests: Sequence[DecodeRequest]) -> list[DecodeResult]:
    """Decode all requests and return their results in input order.

    The schedule depends on the requests alone, so equal requests give equal results.

    Raises:
        DistillError: one of the requests cannot be decoded; nothing is decoded then.
    """
    handles: list[int] = []
    try:
        for request in requests:
            handles.append(engine.add(request))
    except BaseException:
        for handle in handles:
            engine.cancel(handle)
        raise
    while engine.has_work:
        engine.step()
    return [engine.result(handle) for handle in handles]


def speculative_decode(
    target: Any,
    draft: Any,
    prompts: Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]],
    sampling: SamplingConfig | None = None,
    *,
    num_draft_tokens: int = 4,
    max_new_tokens: int = 128,
    seed: int = 0,
    stop_strings: Sequence[str] = (),
    max_batch_size: int = 8,
    vocabulary_token_ids: Sequence[int] | None = None,
) -> list[DecodeResult]:
    """Answer prompts with a target and a draft; the answers follow the target's law alone.

    Args:
        target, draft: loaded models (``.model``, ``.tokenizer``, ``.stop_token_ids``). The draft
            may also be None (plain decoding) or the name of a drafter that needs no model, such
            as "prompt_lookup".
        prompts: text, token ids, or chat messages, which go through the target's chat template.
        sampling: the same for all prompts; default temperature 1.
        seed: prompt i uses seed + i, so an answer does not depend on the other prompts.
        vocabulary_token_ids: ids the draft may propose, see ``CausalLMDrafter``.

    Raises:
        DistillError: a prompt or a pair that cannot be decoded; each message has its way out.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts is one text; give a list of prompts, such as [text]")
    token_ids = [prompt_token_ids(target.tokenizer, prompt) for prompt in prompts]
    if draft is None:
        drafter = None
    elif isinstance(draft, str):
        drafter = registry.get(draft)()
    else:
        drafter = CausalLMDrafter(draft.model, vocabulary_token_ids=vocabulary_token_ids)
    engine = DecodeEngine(
        target.model,
        drafter,
        num_draft_tokens=num_draft_tokens,
        max_batch_size=min(max_batch_size, max(len(token_ids), 1)),
        max_length=max((len(ids) for ids in token_ids), default=0) + max_new_tokens,
        tokenizer=target.tokenizer,
    )
    return decode_batch(
        engine,
        [
            DecodeRequest(
                prompt_token_ids=ids,
                max_new_tokens=max_new_tokens,
                sampling=sampling or SamplingConfig(),
                seed=seed + index,
                stop_token_ids=target.stop_token_ids,
                stop_strings=tuple(stop_strings),
                request_id=str(index),
            )
            for index, ids in enumerate(token_ids)
        ],
    )


def _text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    # A function, not a method: a row that pointed back at its engine would keep the caches of a
    # finished engine alive until the garbage collector comes by, gigabytes later.
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


def _token_lists(proposal: Proposal) -> list[list[int]]:
    padded: list[list[int]] = proposal.tokens_BK.tolist()
    return [row[:number] for row, number in zip(padded, proposal.num_tokens_B, strict=True)]
