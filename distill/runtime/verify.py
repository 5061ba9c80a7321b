"""Owns the acceptance rule: which drafted tokens stand, and which token follows them.
Refuses to know models, caches, stops and random generators: tensors in, tensors out.

Legend: B rows, K draft tokens, S = K + 1, V vocabulary; p = target, q = draft. The rule is
speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023,
arXiv 2302.01318): accept draft x with probability min(1, p(x) / q(x)), replace the first rejected
one by a draw from max(0, p - q), and after K acceptances draw one more from p. The emitted tokens
follow p exactly, whatever q is; q only decides how many come per call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.sampling import argmax_last, overlap, residual, sample

ACCEPTANCE_RULES = ("speculative_sampling", "draft_argmax", "sample_and_match")


@dataclass(frozen=True)
class Verification:
    """What one round decided: per row, drafts ``[:num_accepted]`` and then ``next_token``."""

    num_accepted_B: Tensor
    next_token_B: Tensor


def verify(
    target_probs_BSV: Tensor,
    draft_probs_BKV: Tensor | None,
    draft_tokens_BK: Tensor,
    uniforms_BS: Tensor,
    num_draft_tokens_B: Tensor | None = None,
) -> Verification:
    """Accept or reject K drafted tokens per row; the emitted block follows the target's law.

    Args:
        target_probs_BSV: p at the K drafted positions and at the one after them.
        draft_probs_BKV: q that the drafts were REALLY drawn from; None for a deterministic
            drafter, whose q is the one-hot of the draft.
        uniforms_BS: float64 in the open interval (0, 1): K acceptance tests, then the draw of the
            replacing or extra token. The result is piecewise constant in each of them.
        num_draft_tokens_B: how many drafts of each row are real; the rest is padding, whose
            probabilities are never read into a result. None: all K.
    """
    num_rows, num_drafts = draft_tokens_BK.shape
    assert target_probs_BSV.shape[:2] == (num_rows, num_drafts + 1)
    assert uniforms_BS.shape == (num_rows, num_drafts + 1)
    assert draft_probs_BKV is None or draft_probs_BKV.shape == (
        num_rows,
        num_drafts,
        target_probs_BSV.shape[-1],
    )
    device = target_probs_BSV.device
    rows_B = torch.arange(num_rows, device=device)
    uniforms_BS = uniforms_BS.to(device)
    if num_draft_tokens_B is None:
        num_draft_tokens_B = torch.full((num_rows,), num_drafts, device=device)
    if num_drafts == 0:
        return Verification(
            torch.zeros_like(rows_B), sample(target_probs_BSV[:, 0], uniforms_BS[:, 0])
        )
    ids_BK1 = draft_tokens_BK.unsqueeze(-1)
    p_BK = target_probs_BSV[:, :-1].gather(2, ids_BK1).squeeze(-1).double()
    q_BK = torch.ones_like(p_BK)
    if draft_probs_BKV is not None:
        q_BK = draft_probs_BKV.gather(2, ids_BK1).squeeze(-1).double()
    # u < p / q without a division; strict, so that p = 0 is rejected whatever u is.
    is_accepted_BK = uniforms_BS[:, :-1] * q_BK < p_BK
    num_accepted_B = _leading_true(is_accepted_BK, num_draft_tokens_B)

    probs_BV = target_probs_BSV[rows_B, num_accepted_B]
    rejected = (num_accepted_B < num_draft_tokens_B).nonzero().squeeze(-1)
    if rejected.numel():
        position = num_accepted_B[rejected]
        p_NV = probs_BV[rejected]
        if draft_probs_BKV is None:
            q_NV = torch.zeros_like(p_NV)
            q_NV.scatter_(1, draft_tokens_BK[rejected, position].unsqueeze(-1), 1.0)
        else:
            q_NV = draft_probs_BKV[rejected, position].to(p_NV.dtype)
        probs_BV[rejected] = residual(p_NV, q_NV)
    return Verification(num_accepted_B, sample(probs_BV, uniforms_BS[:, -1]))


def verify_greedy(
    target_tokens_BS: Tensor,
    draft_tokens_BK: Tensor,
    num_draft_tokens_B: Tensor | None = None,
) -> Verification:
    """The same law at temperature 0: a draft stands while it equals the target's argmax.

    Args:
        target_tokens_BS: the target's most likely token at every position; no softmax is needed.
    """
    num_rows, num_drafts = draft_tokens_BK.shape
    assert target_tokens_BS.shape == (num_rows, num_drafts + 1)
    if num_draft_tokens_B is None:
        num_draft_tokens_B = torch.full((num_rows,), num_drafts, device=target_tokens_BS.device)
    matches_BK = target_tokens_BS[:, :-1] == draft_tokens_BK
    num_accepted_B = _leading_true(matches_BK, num_draft_tokens_B)
    return Verification(
        num_accepted_B, target_tokens_BS.gather(1, num_accepted_B.unsqueeze(-1)).squeeze(-1)
    )


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor, rule: str) -> Tensor:
    """Chance that the draft's token is accepted at one position, under a rule some runtime uses.

    ``speculative_sampling`` sum_v min(p, q): this library, and whoever samples the draft;
    ``draft_argmax`` p[argmax q]: a greedy draft beside a sampling target;
    ``sample_and_match`` sum_v p q: both sample, equal tokens are accepted.
    At temperature 0 all three are equal.

    Args:
        target_probs, draft_probs: [..., V], after the same sampling transform.

    Raises:
        ConfigError: no such rule.
    """
    if rule == "speculative_sampling":
        return overlap(target_probs, draft_probs)
    if rule == "draft_argmax":
        return target_probs.gather(-1, argmax_last(draft_probs).unsqueeze(-1)).squeeze(-1)
    if rule == "sample_and_match":
        return (target_probs * draft_probs).sum(dim=-1)
    raise ConfigError(f"Unknown acceptance rule {rule!r}. Known: {', '.join(ACCEPTANCE_RULES)}.")


def _leading_true(is_accepted_BK: Tensor, num_draft_tokens_B: Tensor) -> Tensor:
    """How many real drafts stand before the first one that does not."""
    position_K = torch.arange(is_accepted_BK.shape[1], device=is_accepted_BK.device)
    is_real_BK = position_K < num_draft_tokens_B.unsqueeze(-1)
    return (is_accepted_BK & is_real_BK).long().cumprod(dim=1).sum(dim=1)
