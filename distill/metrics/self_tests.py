"""Owns the tests a measurement runs on itself: where the answer is known, does it come out?

Refuses to know models: it judges numbers that were measured beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.metrics import intervals
from distill.metrics.acceptance import PRIMARY_RULE, analytic_sums
from distill.metrics.chain import ExpectedCounts
from distill.metrics.sentences import exact
from distill.runtime.verify import verify
from distill.sampling import SamplingConfig, logits_to_probs

TOLERANCE = 1e-4
"""On an acceptance rate that is 0 or 1 by definition: float32 over a vocabulary."""

MIN_PROMPTS = 8
_CONFIDENCE = 0.999
_NUM_RESAMPLES = 4000


@dataclass(frozen=True)
class SelfTest:
    """One check. ``is_passed`` None: there was too little to judge by; ``detail`` says what."""

    name: str
    temperature: float | None
    expected: str
    found: str
    is_passed: bool | None
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


@dataclass(frozen=True)
class Drawn:
    """What a drafter really drew at N positions of a text, as the engine is told.

    probs_NV: what the tokens were drawn from (``Proposal.probs_BKV``); None at temperature 0.
    """

    tokens_N: Tensor
    probs_NV: Tensor | None


def same_model(
    target_logits_NV: Tensor, drawn: Drawn, sampling: SamplingConfig, *, least: float, slack: float
) -> SelfTest:
    """The target, drafting for itself through the real draft path, is accepted always.

    Both sides come from different code: p from the target's logits along its text, q from the
    drafter. So a penalty, a top-k or a temperature that only a draft meets is seen.

    Args:
        least: the smallest rate that rounding explains in this precision.
        slack: how far below the largest logit a token may lie and still be a tie with it.
    """
    rate = _agreement(target_logits_NV, drawn, sampling, slack=slack)
    return SelfTest(
        "draft == target",
        sampling.temperature,
        f"acceptance rate {least:g} or more (1, but for rounding)",
        "nothing was drafted" if rate is None else f"{rate:.6f}",
        None if rate is None else rate >= least,
        f"analytic, on {len(target_logits_NV)} positions of the target's text",
    )


def _agreement(
    logits_NV: Tensor, drawn: Drawn, sampling: SamplingConfig, *, slack: float
) -> float | None:
    """Mean of sum_v min(softmax(logits / T), q); at temperature 0 the share drawn at a maximum."""
    if not len(logits_NV):
        return None
    if drawn.probs_NV is None:
        chosen_N = logits_NV.double().gather(1, drawn.tokens_N.unsqueeze(1))[:, 0]
        return float((chosen_N >= logits_NV.double().amax(-1) - slack).double().mean())
    plain_NV = (logits_NV.double() / sampling.temperature).softmax(-1)
    width = min(plain_NV.shape[1], drawn.probs_NV.shape[1])
    both_NV = torch.minimum(plain_NV[:, :width], drawn.probs_NV[:, :width].double())
    return float(both_NV.sum(-1).mean())


def disjoint_support(target_logits_NV: Tensor, sampling: SamplingConfig) -> SelfTest:
    """A draft that proposes only what the target cannot say is accepted never.

    The target's logits are kept on even ids, the draft's on odd ones; the acceptance rule of the
    runtime is asked as well as the formula.
    """
    number, width = target_logits_NV.shape
    is_even_V = torch.arange(width, device=target_logits_NV.device) % 2 == 0
    target_NV = target_logits_NV.masked_fill(~is_even_V, -torch.inf)
    draft_NV = target_logits_NV.masked_fill(is_even_V, -torch.inf)
    rate = analytic_sums(target_NV, draft_NV, sampling)[PRIMARY_RULE] / max(1, number)
    num_accepted = 0
    if number > 1:
        p_BSV = logits_to_probs(target_NV[:2].unsqueeze(0), sampling)
        q_BKV = logits_to_probs(draft_NV[:1].unsqueeze(0), sampling)
        least_B2 = torch.full((1, 2), 1e-12, dtype=torch.float64)
        drafts_BK = q_BKV.argmax(-1)
        num_accepted = int(verify(p_BSV, q_BKV, drafts_BK, least_B2).num_accepted_B)
    return SelfTest(
        "disjoint support",
        sampling.temperature,
        "acceptance rate 0",
        f"{rate:.6f}",
        (rate <= TOLERANCE and num_accepted == 0) if number else None,
        "the target on even token ids, the draft on odd ones",
    )


def neutral_processors(
    name: str,
    logits_NV: Tensor,
    drawn: Drawn,
    sampling: SamplingConfig,
    ignored: Mapping[str, Any],
    *,
    least: float,
    slack: float,
) -> SelfTest:
    """What a model draws from, as a draft, is softmax(logits / T) of its own logits, nothing else.

    A penalty or a top-k that a model's generation config asks for, applied to one side only, makes
    a draft that equals its target look wrong. ``ignored`` are such settings: listed, not applied.
    """
    rate = _agreement(logits_NV, drawn, sampling, slack=slack)
    asks = ", ".join(f"{key} {value}" for key, value in sorted(ignored.items()))
    return SelfTest(
        f"processors neutral: {name}",
        sampling.temperature,
        f"softmax(logits / temperature): overlap {least:g} or more (1, but for rounding)",
        "nothing was drafted" if rate is None else f"overlap {rate:.6f}",
        None if rate is None else rate >= least,
        f"its generation config asks for {asks}: not applied here" if asks else "",
    )


def analytic_equals_decoded(
    draft: str,
    temperature: float,
    decoded: Sequence[Mapping[str, Any]],
    expected: Sequence[ExpectedCounts],
    *,
    seed: int,
) -> SelfTest:
    """Real speculative decoding accepts as often as the two distributions say it must.

    Compared is accepted / tested: counted while decoding, and expected from the target's own text
    by ``chain.expected_counts``, which counts exactly the positions a runtime would test (the plain
    mean over all positions counts the extra tokens too). Paired by prompt; passed when zero lies in
    the 99.9% interval of the difference.
    """
    columns = [
        [c["num_accepted"] for c in decoded],
        [c["num_tested"] for c in decoded],
        [e.num_accepted for e in expected],
        [e.num_tested for e in expected],
    ]
    table_NC = np.array(columns, dtype=np.float64).T.reshape(-1, 4)
    found = intervals.estimate(
        table_NC,
        intervals.ratio_difference,
        seed=seed,
        num_resamples=_NUM_RESAMPLES,
        confidence=_CONFIDENCE,
    )
    sums = table_NC.sum(axis=0)
    is_passed = None
    text = "nothing was tested"
    if found.value is not None and found.low is not None and found.high is not None:
        text = (
            f"{sums[0] / sums[1]:.4f} decoded, {sums[2] / sums[3]:.4f} analytic "
            f"(99.9% of the difference: {found.low:+.4f} to {found.high:+.4f})"
        )
        slack = TOLERANCE
        if found.num_prompts >= MIN_PROMPTS:
            is_passed = found.low - slack <= 0.0 <= found.high + slack
    few = f"; fewer than {MIN_PROMPTS} prompts cannot tell" if is_passed is None else ""
    return SelfTest(
        f"analytic == decoded: {draft}",
        temperature,
        "the same acceptance rate",
        text,
        is_passed,
        f"{len(table_NC)} prompts{few}",
    )


def failures(tests: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tests that failed, as reasons not to trust the rest."""
    return [
        f"self-test failed at temperature {exact(t['temperature'])}: {t['name']}: expected "
        f"{t['expected']}, found {t['found']}"
        for t in tests
        if t["is_passed"] is False
    ]
