"""Owns the `evaluate` face of the acceptance rate: accepted / TESTED draft tokens.

Refuses to define it: the counting is ``distill.metrics.acceptance.summarize_rounds``.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from distill.metrics.acceptance import summarize_rounds

DESCRIPTION = """
Acceptance rate (alpha) of speculative decoding: draft tokens accepted / draft tokens TESTED.
Tokens after the first rejection of a round were never tested, so they are in no denominator.
draft_acceptance_rate, accepted / PROPOSED, is returned beside it because other tools call that one
the acceptance rate; it is lower by construction.
"""

INPUTS = """
Args:
    predictions: number of draft tokens accepted in each round.
    references: number of draft tokens proposed in each round.
Returns:
    acceptance_rate, draft_acceptance_rate, acceptance_by_position.
Example:
    >>> metric.compute(predictions=[2, 0, 4], references=[4, 4, 4])["acceptance_rate"]
    0.75
"""

CITATION = "Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding, \
2023, arXiv 2211.17192."


class AcceptanceRate(evaluate.Metric):
    """Accepted / tested, from rounds."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, *, predictions: list[int], references: list[int]) -> dict[str, Any]:
        rates = summarize_rounds(predictions, references)
        names = ("acceptance_rate", "draft_acceptance_rate", "acceptance_by_position")
        return {name: rates[name] for name in names}
