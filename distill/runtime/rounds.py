"""Owns judging one round: from the target's logits of ragged rows to what each row accepts.
Refuses to know models and caches; the acceptance rule itself is in ``verify``.

Legend: B rows, R some of them, K draft tokens, S = K + 1, N flat positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.runtime.requests import Row
from distill.runtime.verify import Verification, verify, verify_greedy
from distill.sampling import (
    ACCEPT_LANE,
    RESIDUAL_LANE,
    argmax_last,
    edit_logits,
    probs_by_row,
    uniforms,
)


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

    Args:
        drafts: per row the drafted tokens, of any number.
        logits_NV: the target's, row after row: len(draft) + 1 positions each.
        draft_probs_BKV: q of the drafts, see ``Proposal``; K may exceed what was proposed.
    """
    device = logits_NV.device
    width = max(len(draft) for draft in drafts)
    number_B = torch.tensor([len(draft) for draft in drafts], device=device)
    padded = [[*draft, *([0] * (width - len(draft)))] for draft in drafts]
    first_B = (number_B + 1).cumsum(0) - number_B - 1
    steps_S = torch.arange(width + 1, device=device)
    whole = _Round(
        logits_NV=_edited(rows, drafts, logits_NV),
        flat_BS=first_B.unsqueeze(1) + steps_S.minimum(number_B.unsqueeze(1)),
        tokens_BK=torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), width),
        number_B=number_B,
        draft_probs_BKV=None if draft_probs_BKV is None else draft_probs_BKV[:, :width].to(device),
    )
    greedy = [n for n, row in enumerate(rows) if row.request.sampling.is_greedy]
    sampled = [n for n, row in enumerate(rows) if not row.request.sampling.is_greedy]
    if not sampled:
        return _judge_greedy(whole)
    if not greedy:
        return _judge_sampled(rows, whole)
    num_accepted_B = torch.zeros_like(number_B)
    next_token_B = torch.zeros_like(number_B)
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


def _edited(rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits_NV: Tensor) -> Tensor:
    """Penalties, bans and biases, position by position, on prefix plus drafted tokens."""
    if not any(row.request.sampling.has_logit_edits for row in rows):
        return logits_NV
    logits_NV = logits_NV.float().clone()
    flat = 0
    for row, draft in zip(rows, drafts, strict=True):
        if row.request.sampling.has_logit_edits:
            for step in range(len(draft) + 1):
                logits_NV[flat + step] = edit_logits(
                    logits_NV[flat + step],
                    row.request.sampling,
                    prompt_token_ids=row.prompt_token_ids,
                    output_token_ids=[*row.output_token_ids, *draft[:step]],
                    stop_token_ids=row.request.stop_token_ids,
                )
        flat += len(draft) + 1
    return logits_NV
