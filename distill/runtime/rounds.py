"""Owns judging one round: from the target's logits of ragged rows to what each row accepts.
Refuses to know models and caches; the acceptance rule itself is in ``verify``.

Legend: B rows, R some of them, K draft tokens, S = K + 1, N flat positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distill.logit_edits import edit_logits, has_edits
from distill.runtime.requests import Row
from distill.runtime.verify import Verification, verify, verify_greedy
from distill.sampling import (
    ACCEPT_LANE,
    RESIDUAL_LANE,
    argmax_last,
    at_least_float32,
    probs_by_row,
    uniforms,
)

NOT_JUDGED = -1
"""Stands for the token after the accepted drafts where nobody could say which it is."""


@dataclass(frozen=True)
class _Round:
    """The ragged round as rectangles: short rows repeat their last position as padding."""

    logits_NV: Tensor
    flat_BS: Tensor  # where each row's positions are in N
    tokens_BK: Tensor
    number_B: Tensor
    draft_probs_BKV: Tensor | None


def judge(
    rows: Sequence[Row],
    drafts: Sequence[Sequence[int]],
    logits_NV: Tensor,
    draft_probs_BKV: Tensor | None,
) -> Verification:
    """Decide what every row accepts and which token it gets next.

    A row whose processors fail behind a drafted token is judged up to there. If its drafts stand
    that far it gets no next token (``NOT_JUDGED``): the next round asks again, without drafts in
    between, and what fails then fails as in plain decoding. Mostly they do not stand that far.

    Args:
        drafts: per row the drafted tokens, of any number.
        logits_NV: the target's, row after row: len(draft) + 1 positions each.
        draft_probs_BKV: q of the drafts, see ``Proposal``; K may exceed what was proposed.

    Raises:
        DistillError: a row's edits fail at its first position, which no draft precedes.
    """
    device = logits_NV.device
    width = max(len(draft) for draft in drafts)
    logits_NV, num_known = _edited(rows, drafts, logits_NV)
    number_B = torch.tensor([len(draft) for draft in drafts], device=device)
    # Without real drafts a row is decided by its first position alone: plain decoding.
    num_judged = [
        0 if row.request.is_control else min(len(draft), known)
        for row, draft, known in zip(rows, drafts, num_known, strict=True)
    ]
    padded = [[*draft, *([0] * (width - len(draft)))] for draft in drafts]
    first_B = (number_B + 1).cumsum(0) - number_B - 1
    steps_S = torch.arange(width + 1, device=device)
    whole = _Round(
        logits_NV=logits_NV,
        flat_BS=first_B.unsqueeze(1) + steps_S.minimum(number_B.unsqueeze(1)),
        tokens_BK=torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), width),
        number_B=torch.tensor(num_judged, device=device),
        draft_probs_BKV=None if draft_probs_BKV is None else draft_probs_BKV[:, :width].to(device),
    )
    found = _decided(rows, whole)
    if all(known > len(draft) for known, draft in zip(num_known, drafts, strict=True)):
        return found
    is_unknown_B = found.num_accepted_B >= torch.tensor(num_known, device=device)
    return replace(found, next_token_B=found.next_token_B.masked_fill(is_unknown_B, NOT_JUDGED))


def _decided(rows: Sequence[Row], whole: _Round) -> Verification:
    greedy = [n for n, row in enumerate(rows) if row.request.sampling.is_greedy]
    sampled = [n for n, row in enumerate(rows) if not row.request.sampling.is_greedy]
    if not sampled:
        return _judge_greedy(whole)
    if not greedy:
        return _judge_sampled(rows, whole)
    num_accepted_B = torch.zeros_like(whole.number_B)
    next_token_B = torch.zeros_like(whole.number_B)
    for part, decision in (
        (greedy, _judge_greedy(_some(whole, greedy))),
        (sampled, _judge_sampled([rows[n] for n in sampled], _some(whole, sampled))),
    ):
        num_accepted_B[part] = decision.num_accepted_B
        next_token_B[part] = decision.next_token_B
    return Verification(num_accepted_B, next_token_B)


def _some(whole: _Round, part: list[int]) -> _Round:
    """The same round for some of its rows, with their logits side by side."""
    flat_RS = whole.flat_BS[part]
    probs = whole.draft_probs_BKV
    return _Round(
        logits_NV=whole.logits_NV[flat_RS.reshape(-1)],
        flat_BS=torch.arange(flat_RS.numel(), device=flat_RS.device).view(flat_RS.shape),
        tokens_BK=whole.tokens_BK[part],
        number_B=whole.number_B[part],
        draft_probs_BKV=None if probs is None else probs[part],
    )


def _judge_greedy(part: _Round) -> Verification:
    return verify_greedy(argmax_last(part.logits_NV)[part.flat_BS], part.tokens_BK, part.number_B)


def _judge_sampled(rows: Sequence[Row], part: _Round) -> Verification:
    num_rows, width = part.flat_BS.shape
    is_whole = part.flat_BS.numel() == part.logits_NV.shape[0]
    logits_NV = part.logits_NV if is_whole else part.logits_NV[part.flat_BS.reshape(-1)]
    samplings = [row.request.sampling for row in rows for _ in range(width)]
    probs_RSV = probs_by_row(logits_NV, samplings).view(num_rows, width, -1)
    # Keyed by the position of a token in its row's output: at most one token is ever emitted per
    # position, and discarded draws never influenced an emitted token, so they may be used again.
    seeds = [[row.request.seed] for row in rows]
    positions = [[row.num_emitted + step for step in range(width)] for row in rows]
    tests_RS = uniforms(seeds, positions, ACCEPT_LANE)
    extra_R1 = uniforms(seeds, [[first[0]] for first in positions], RESIDUAL_LANE)
    uniforms_RS = torch.cat((tests_RS[:, : width - 1], extra_R1), dim=1)
    return verify(probs_RSV, part.draft_probs_BKV, part.tokens_BK, uniforms_RS, part.number_B)


def _edited(
    rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits_NV: Tensor
) -> tuple[Tensor, list[int]]:
    """Penalties, bans and biases, position by position, on prefix plus drafted tokens.

    Returns the logits and, per row, how many of its positions they are known for.
    """
    num_known = [len(draft) + 1 for draft in drafts]
    is_edited = [has_edits(r.request.sampling, r.request.logits_processors) for r in rows]
    if not any(is_edited):
        return logits_NV, num_known
    logits_NV = logits_NV.to(at_least_float32(logits_NV.dtype), copy=True)
    flat = 0
    for index, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        if is_edited[index]:
            num_known[index] = _edit_row(row, draft, logits_NV[flat : flat + len(draft) + 1])
        flat += len(draft) + 1
    return logits_NV, num_known


def _edit_row(row: Row, draft: Sequence[int], logits_SV: Tensor) -> int:
    """Edit one row's positions in place; return how many are known: all, unless one failed.

    Whatever stands behind an excluded draft is never read, nor what stands behind a stop token.
    And nobody should be asked about either: a grammar knows no answer for a text that it forbids,
    or that is over. What fails behind other drafts says nothing of the answer as long as they may
    still be rejected.
    """
    output, stops = row.output_token_ids, row.request.stop_token_ids
    prompt = row.prompt_token_ids
    # All drafts of a control row are rejected by force.
    for step in range(1 if row.request.is_control else len(draft) + 1):
        before = draft[step - 1] if step else None
        if before is not None and (before in stops or logits_SV[step - 1, before] == -torch.inf):
            break
        try:
            logits_SV[step] = edit_logits(
                logits_SV[step],
                row.request.sampling,
                prompt_token_ids=prompt,
                output_token_ids=[*output, *draft[:step]],
                stop_token_ids=stops,
                logits_processors=row.request.logits_processors,
            )
        except Exception:
            if not step:
                raise
            return step
    return len(draft) + 1
