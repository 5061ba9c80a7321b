"""Owns the audit of greedy answers: equal to plain decoding, a tie of logits, or broken, and why.
Refuses to know files, clocks and drafts' quality. What is promised is in docs/exactness.md.

Legend: V vocabulary.

A pass over K + 1 tokens adds up in another order than a pass over one, so in half precision two
logits that are a rounding error apart may change places. Two questions are therefore asked where
answers part. How far apart are the two tokens' logits (``margin``)? And does the same happen when
the passes keep their width while every draft is rejected by force (the control)? The control
decides as plain decoding does, so whatever it changes is arithmetic; the rest is logic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from distill.drafters.base import Drafter, Proposal
from distill.errors import ConfigError
from distill.logit_edits import LogitsProcessor, edit_logits
from distill.runtime.cache import RaggedCache
from distill.runtime.commit import CommitRules, find_boundary
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.runtime.forward import forward, prefill
from distill.runtime.requests import Prompts, all_prompt_token_ids
from distill.runtime.speculative import DecodeResults, decode_batch, make_drafter
from distill.sampling import SamplingConfig

TIE_ULPS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 1024}
"""How far apart two logits may be, in units in the last place of the largest, and still be a tie.

A verify pass on K + 1 tokens and a plain step on one sum in different orders; after tens of layers
their logits differ by a few ulps in 16 bits and by some hundreds in float32.
"""

_GREEDY = SamplingConfig(temperature=0.0)


@dataclass(frozen=True)
class Divergence:
    """Where an answer leaves the plain one.

    margin: how far the worse of the two tokens lies below the largest logit, after the common
        prefix, in the target's own precision; ``margin_ulps`` is in units in the last place of
        that largest logit.
    plain_token, other_token: None: that answer ends here. The plain one rightly so, and the other
        goes on; the other one for no reason.
    """

    prompt_index: int
    position: int
    plain_token: int | None
    other_token: int | None
    margin: float
    margin_ulps: float
    is_tie: bool


@dataclass(frozen=True)
class Comparison:
    """Answers beside the plain ones, prompt by prompt."""

    num_compared: int
    divergences: tuple[Divergence, ...]

    @property
    def num_identical(self) -> int:
        """Answers with the same tokens."""
        return self.num_compared - len(self.divergences)

    @property
    def num_ties(self) -> int:
        """Answers that part where the target's logits tie."""
        return sum(d.is_tie for d in self.divergences)

    @property
    def num_broken(self) -> int:
        """Answers that part anywhere else."""
        return len(self.divergences) - self.num_ties


@dataclass(frozen=True)
class LosslessAudit:
    """What :func:`audit` found: speculation and its control, each beside plain decoding."""

    dtype: torch.dtype
    tie_ulps: float
    speculative: Comparison
    control: Comparison
    acceptance_rate: float | None

    @property
    def verdict(self) -> Literal["equal", "ties", "numerics", "logic"]:
        """``equal``: the same tokens everywhere. ``ties``: only ties were decided differently.

        ``numerics``: a token changed beyond the bound, but the control did that as well, so the
        target's passes depend on their width more than the bound allows. ``logic``: the control
        did not, so the fault is in what is accepted, rolled back or committed.
        """
        if not self.speculative.divergences:
            return "equal"
        if not self.speculative.num_broken:
            return "ties"
        return "numerics" if self.control.num_broken else "logic"

    @property
    def is_lossless(self) -> bool:
        """Equal tokens in float32; in half precision equal ones, or ties decided differently."""
        is_half = self.dtype in (torch.bfloat16, torch.float16)
        return self.verdict == "equal" or (self.verdict == "ties" and is_half)


def audit(
    target: Any,
    draft: Any,
    prompts: Prompts,
    sampling: SamplingConfig = _GREEDY,
    *,
    num_draft_tokens: int = 4,
    max_new_tokens: int = 256,
    max_batch_size: int = 8,
    tie_ulps: float | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
) -> LosslessAudit:
    """Decode the prompts plainly, with the draft, and with the control; compare.

    Args:
        target, draft, prompts: as for ``speculative_decode``.
        sampling: temperature 0; edits of the logits (penalties, bans) are part of the audit.
        tie_ulps: the bound on the margin of a tie, default ``TIE_ULPS`` of the target's precision.

    Raises:
        ConfigError: a temperature above 0, where answers are drawn, no draft tokens, or a target
            in a precision that has no bound of its own and none is given.
        DistillError: as ``speculative_decode``.
    """
    if not sampling.is_greedy or num_draft_tokens < 1:
        raise ConfigError(
            f"an audit compares greedy answers: temperature is {sampling.temperature:g} and must "
            f"be 0, num_draft_tokens is {num_draft_tokens} and must be at least 1"
        )
    dtype = target.model.dtype
    if tie_ulps is None and dtype not in TIE_ULPS:
        raise ConfigError(
            f"the target is in {dtype}, and only {', '.join(map(str, TIE_ULPS))} have a bound for "
            "ties. Give tie_ulps, 0 for none."
        )
    bound = TIE_ULPS[dtype] if tie_ulps is None else tie_ulps
    requests = [
        DecodeRequest(
            prompt_token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=0,
            stop_token_ids=target.stop_token_ids,
            logits_processors=tuple(logits_processors),
        )
        for token_ids in all_prompt_token_ids(target.tokenizer, prompts)
    ]

    def answers(drafter: Drafter | None, *, is_control: bool = False) -> DecodeResults:
        engine = DecodeEngine(
            target.model,
            drafter,
            num_draft_tokens=num_draft_tokens if drafter is not None else 0,
            max_batch_size=max_batch_size,
            max_length=max((len(r.prompt_token_ids) for r in requests), default=0) + max_new_tokens,
            tokenizer=target.tokenizer,
        )
        return decode_batch(engine, [replace(r, is_control=is_control) for r in requests])

    plain = _tokens(answers(None))
    speculative = answers(make_drafter(draft))
    control = answers(FillerDrafter(), is_control=True)
    return LosslessAudit(
        dtype=dtype,
        tie_ulps=bound,
        speculative=compare(target, requests, plain, _tokens(speculative), tie_ulps=bound),
        control=compare(target, requests, plain, _tokens(control), tie_ulps=bound),
        acceptance_rate=speculative.stats.acceptance_rate,
    )


def _tokens(results: DecodeResults) -> list[list[int]]:
    return [result.token_ids for result in results]


def compare(
    target: Any,
    requests: Sequence[DecodeRequest],
    plain: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    *,
    tie_ulps: float,
) -> Comparison:
    """Find where each answer leaves the plain one, if it does."""
    found = [
        find_divergence(target, request, a, b, prompt_index=n, tie_ulps=tie_ulps)
        for n, (request, a, b) in enumerate(zip(requests, plain, others, strict=True))
    ]
    return Comparison(len(found), tuple(d for d in found if d is not None))


def find_divergence(
    target: Any,
    request: DecodeRequest,
    plain: Sequence[int],
    other: Sequence[int],
    *,
    tie_ulps: float,
    prompt_index: int = 0,
) -> Divergence | None:
    """Where two greedy answers part, and whether the target's logits tie there; None: nowhere.

    Only the common length is compared: the plain answer may have had a smaller budget. But the
    other answer must end where the request ends it (stop token, stop string, budget): it parts
    where it goes on behind that, or ends before it for no reason, and neither is a tie.
    """
    pairs = zip(plain, other, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        end = find_boundary(
            other,
            emitted_token_ids=(),
            num_prompt_tokens=len(request.prompt_token_ids),
            rules=_rules(target, request),
        )
        is_whole = len(other) >= len(plain) or end.finish_reason is not None
        if end.num_tokens == len(other) and is_whole:
            return None
        position = end.num_tokens
    a = plain[position] if position < len(plain) else None
    b = other[position] if position < len(other) else None
    logits_V = _logits_after(target, request, other[:position]).double()
    top = float(logits_V.max())
    margin = top - min(float(logits_V[token]) for token in (a, b) if token is not None)
    ulp = torch.finfo(target.model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(top), 1e-30)))
    is_tie = a is not None and b is not None and margin <= tie_ulps * ulp
    return Divergence(prompt_index, position, a, b, margin, margin / ulp, is_tie)


def _rules(target: Any, request: DecodeRequest) -> CommitRules:
    """What ends an answer to the request; the context is left out, for no answer outgrows it."""
    return CommitRules(
        max_new_tokens=request.max_new_tokens,
        max_length=len(request.prompt_token_ids) + request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
        stop_strings=request.stop_strings,
        decode_text=lambda ids: target.tokenizer.decode(list(ids), skip_special_tokens=True),
    )


def _logits_after(target: Any, request: DecodeRequest, output: Sequence[int]) -> Tensor:
    """What the next token is chosen from, by a pass over one token."""
    prompt = request.prompt_token_ids
    cache = RaggedCache(target.model, max_rows=1)
    tokens = [*prompt, *output]
    prefill(target.model, cache, {cache.join(): tokens[:-1]})
    logits_V = forward(target.model, cache, [tokens[-1:]]).logits_NV[0]
    if target.tokenizer is not None:
        logits_V = logits_V[: len(target.tokenizer)]
    return edit_logits(
        logits_V,
        request.sampling,
        prompt_token_ids=prompt,
        output_token_ids=output,
        stop_token_ids=request.stop_token_ids,
        logits_processors=request.logits_processors,
    )


class FillerDrafter:
    """Proposes the last token over and over: something of the right width to reject by force."""

    max_length: int | None = None

    def start(self, *, vocabulary_size: int, max_batch_size: int) -> None:
        """Nothing to get ready."""

    def join(self, handle: int, *_: Any, **__: Any) -> None:
        """Nothing to prepare."""

    def propose(
        self,
        handles: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens_B: Sequence[int],
    ) -> Proposal:
        """As many tokens as are asked for."""
        width = max(num_draft_tokens_B, default=0)
        last_B1 = torch.tensor([[tokens[-1]] for tokens in token_ids])
        return Proposal(last_B1.repeat(1, width), list(num_draft_tokens_B), None)

    def commit(self, handle: int, num_valid_tokens: int) -> None:
        """Nothing to roll back."""

    def leave(self, handle: int) -> None:
        """Nothing to forget."""
