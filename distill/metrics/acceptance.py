"""Owns how acceptance is counted and how it follows from two distributions.

Refuses to know how text was decoded: it takes counts of rounds, or logits of the same positions.

Shape suffixes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.runtime.stats import DecodeStats
from distill.runtime.verify import ACCEPTANCE_RULES, acceptance_probability
from distill.sampling import SamplingConfig, logits_to_probs

RULES = ACCEPTANCE_RULES
"""How a runtime may accept a draft token at a temperature above 0; all three are lossless.

speculative_sampling: sample from q, accept with min(1, p/q): sum_v min(p, q). Ours; transformers.
draft_argmax: draft by argmax whatever the temperature: p(argmax q). vLLM and llama.cpp by default.
sample_and_match: sample from q, accept when the target's own sample agrees: sum_v p q. MLX.
At temperature 0 they coincide.
"""

PRIMARY_RULE = "speculative_sampling"

ANALYTIC_CHUNK = 256
"""Positions turned into probabilities at once: bounds memory at a few [256, V] float32 arrays."""


def summarize_rounds(
    num_accepted: Sequence[int], num_proposed: Sequence[int] | int
) -> dict[str, Any]:
    """Rates of a list of rounds: round i proposed ``num_proposed[i]`` tokens, accepted a prefix.

    A round tests one token more than it accepts, unless it accepts all it proposed; it emits one
    token more than it accepts. Undefined rates are None. With accepted = [2, 0, 4] and K = 4:
    6 accepted of 8 tested (0.75) and of 12 proposed (0.5), 9 emitted in 3 target calls (tau 3).

    Returns acceptance_rate, draft_acceptance_rate, block_efficiency, acceptance_by_position,
    conditional_acceptance_by_position, and the counts they come from.

    Raises ConfigError for lists of different lengths or a round that accepts more than it proposed.
    """
    accepted = [int(a) for a in num_accepted]
    if isinstance(num_proposed, int):
        proposed = [num_proposed] * len(accepted)
    else:
        proposed = [int(k) for k in num_proposed]
    if len(accepted) != len(proposed):
        raise ConfigError(
            f"{len(accepted)} rounds were accepted from but {len(proposed)} were proposed. "
            "Give one number of proposed tokens per round, or a single one for all."
        )
    for index, (a, k) in enumerate(zip(accepted, proposed, strict=True)):
        if not 0 <= a <= k:
            raise ConfigError(f"Round {index} accepted {a} of {k} proposed tokens.")
    ledger = DecodeStats.from_rounds((k, a, a + 1) for a, k in zip(accepted, proposed, strict=True))
    return {
        "acceptance_rate": ledger.acceptance_rate,
        "draft_acceptance_rate": ledger.draft_acceptance_rate,
        "block_efficiency": ledger.block_efficiency,
        "acceptance_by_position": list(ledger.acceptance_by_position),
        "conditional_acceptance_by_position": list(ledger.conditional_acceptance_by_position),
        "num_target_calls": ledger.num_target_calls,
        "num_proposed": ledger.num_proposed,
        "num_tested": ledger.num_tested,
        "num_accepted": ledger.num_accepted,
        "num_emitted": ledger.num_emitted,
    }


def analytic_sums(
    target_logits_NV: Tensor, draft_logits_NV: Tensor, sampling: SamplingConfig
) -> dict[str, float]:
    """Sum over N positions of the acceptance probability under each rule of ``RULES``.

    The mean over positions of sum_v min(p, q) = 1 - TV(p, q) is alpha (Leviathan et al. 2023,
    arXiv 2211.17192, Corollary 3.6). p and q go through the SAME sampling transform, in float32.
    Logits of unequal padded width are cut to the common one; -inf marks tokens the draft lacks.
    """
    width = min(target_logits_NV.shape[-1], draft_logits_NV.shape[-1])
    sums = dict.fromkeys(RULES, 0.0)
    for start in range(0, len(target_logits_NV), ANALYTIC_CHUNK):
        block = slice(start, start + ANALYTIC_CHUNK)
        p_NV = logits_to_probs(target_logits_NV[block, :width], sampling)
        q_NV = logits_to_probs(draft_logits_NV[block, :width], sampling)
        for rule in RULES:
            accepted_N = acceptance_probability(p_NV, q_NV, rule)
            sums[rule] += float(accepted_N.to(torch.float64).sum())
    return sums
