"""Owns what one position of the target's text says about a draft: accepted how often, lost to what.

Refuses to know models, tasks and tables: logits of the same positions in, columns of numbers out.

Shape suffixes: T positions of one text, N positions where a draft proposes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.metrics.acceptance import ANALYTIC_CHUNK, RULES
from distill.runtime.verify import acceptance_probability
from distill.sampling import SamplingConfig, logits_to_probs

TOP_K_SIZES = (8, 32, 128)
"""Sizes of a top-k store whose ceiling is computed: alpha <= E[mass of the k likeliest tokens]."""

_DIGITS = 6
_AT_ONE = SamplingConfig(temperature=1.0)


@dataclass(frozen=True)
class DraftLogits:
    """A draft's logits at the positions where it proposes; ``kept_V`` marks what it may propose."""

    positions_N: Tensor
    logits_NV: Tensor
    kept_V: Tensor | None = None


def score_positions(
    target_logits_TV: Tensor,
    token_ids: Sequence[int],
    drafts: Mapping[str, DraftLogits],
    sampling: SamplingConfig,
) -> dict[str, Any]:
    """Columns of one text of the target, for the target itself and for each draft.

    Returns:
        ``target``: ``entropy`` (nats, at temperature 1) and ``top_k_mass`` (sums over positions, at
        ``sampling``, one per ``TOP_K_SIZES``). ``drafts``: per name

        - ``position``: index into the text; the other columns are aligned with it;
        - one column per acceptance rule: the probability that a draft token is accepted;
        - ``text``: min(1, q(x) / p(x)) of the text's own token x, the probability that the draft
          gets THIS token accepted (``speculative_sampling`` where p(x) is 0). Its mean over texts
          drawn from the target is alpha as well, and given the text the tests of a block are
          independent, which ``chain.py`` builds on;
        - ``outside``: the target's probability on tokens the draft cannot propose (0 without a
          subset);
        - ``draft_token``, ``draft_excess``: argmax of q - p and its value: what the draft proposes
          too often here.
    """
    entropy: list[float] = []
    top_k_mass = dict.fromkeys(map(str, TOP_K_SIZES), 0.0)
    columns: dict[str, dict[str, list[Any]]] = {name: {} for name in drafts}
    tokens_T = torch.tensor(list(token_ids), device=target_logits_TV.device, dtype=torch.long)
    for start in range(0, len(target_logits_TV), ANALYTIC_CHUNK):
        logits_TV = target_logits_TV[start : start + ANALYTIC_CHUNK]
        p_TV = logits_to_probs(logits_TV, sampling)
        entropy += _rounded(_entropy(logits_TV, p_TV, sampling))
        for size, mass in _top_k_mass(p_TV).items():
            top_k_mass[size] += mass
        for name, draft in drafts.items():
            is_here = (draft.positions_N >= start) & (draft.positions_N < start + len(logits_TV))
            here = draft.positions_N[is_here]
            p_NV = p_TV if len(here) == len(p_TV) else p_TV[here - start]
            q_NV = logits_to_probs(_cut(draft.logits_NV, is_here, p_NV), sampling)
            found = _draft_columns(p_NV[:, : q_NV.shape[-1]], q_NV, tokens_T[here], draft.kept_V)
            for column, values in ({"position": here.tolist()} | found).items():
                columns[name].setdefault(column, []).extend(values)
    return {"target": {"entropy": entropy, "top_k_mass": top_k_mass}, "drafts": columns}


def _cut(logits_NV: Tensor, is_here: Tensor, p_NV: Tensor) -> Tensor:
    """The chunk's rows, cut to the width both models know."""
    rows = logits_NV if bool(is_here.all()) else logits_NV[is_here]
    return rows[:, : p_NV.shape[-1]]


def _draft_columns(
    p_NV: Tensor, q_NV: Tensor, tokens_N: Tensor, kept_V: Tensor | None
) -> dict[str, list[Any]]:
    accepted = {rule: acceptance_probability(p_NV, q_NV, rule) for rule in RULES}
    found = {rule: _rounded(values_N) for rule, values_N in accepted.items()}
    ids_N1 = tokens_N.unsqueeze(1)
    p_N, q_N = p_NV.gather(1, ids_N1)[:, 0], q_NV.gather(1, ids_N1)[:, 0]
    # p = 0: the text was decoded by a pass of another width, and rounding now says another token.
    # Then the draft is asked for that one: both were read by this pass, and a draft that equals
    # its target is accepted everywhere.
    here_N = accepted["speculative_sampling"]
    found["text"] = _rounded(torch.where(p_N > 0, q_N / p_N, here_N).clamp_max(1.0))
    outside_N = torch.zeros_like(p_N)
    if kept_V is not None:
        outside_N = (p_NV * ~kept_V[: p_NV.shape[-1]]).sum(-1)
    found["outside"] = _rounded(outside_N)
    if len(p_NV):
        excess_N, token_N = (q_NV - p_NV).max(dim=-1)
    else:
        excess_N, token_N = p_N, tokens_N
    return found | {"draft_token": token_N.tolist(), "draft_excess": _rounded(excess_N)}


def _entropy(logits_TV: Tensor, p_TV: Tensor, sampling: SamplingConfig) -> Tensor:
    """-sum p log p of the target at temperature 1, whatever is sampled at: how open a place is."""
    probs_TV = p_TV if sampling == _AT_ONE else logits_to_probs(logits_TV, _AT_ONE)
    entropy_T: Tensor = torch.special.entr(probs_TV).sum(-1)
    return entropy_T


def _top_k_mass(p_TV: Tensor) -> dict[str, float]:
    """Probability on the k likeliest tokens, summed over the positions."""
    most = min(max(TOP_K_SIZES), p_TV.shape[-1])
    sorted_TK = p_TV.topk(most, dim=-1).values.double()
    return {str(k): float(sorted_TK[:, :k].sum()) for k in TOP_K_SIZES}


def _rounded(values_N: Tensor) -> list[float]:
    """Six digits: these numbers are summed over thousands of positions, and stored one by one."""
    return [round(value, _DIGITS) for value in values_N.double().tolist()]
