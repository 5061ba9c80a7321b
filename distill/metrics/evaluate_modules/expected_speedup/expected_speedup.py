"""Owns the `evaluate` face of the speed model: what observed rounds are worth in wall clock.

Refuses to define it: counting and cost are ``distill.metrics.acceptance`` and ``planner``.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from distill.metrics.acceptance import summarize_rounds
from distill.metrics.planner import call_cost

DESCRIPTION = """
Expected speedup of speculative decoding over plain decoding with the same engine: tokens per
target call divided by the cost of a round, K c + v, in units of one plain target step. c is the
draft cost ratio and v the verify cost ratio; measure both, or the result is only an upper bound.
"""

INPUTS = """
Args:
    predictions: number of draft tokens accepted in each round.
    references: number of draft tokens proposed in each round.
    draft_cost_ratio: one draft step / one target step.
    verify_cost_ratio: target on K + 1 tokens / target on one (default 1.0, a free verification).
Returns:
    expected_speedup, block_efficiency.
Example:
    >>> metric.compute(predictions=[2, 0, 4], references=[4, 4, 4], draft_cost_ratio=0.125)
    {'expected_speedup': 2.0, 'block_efficiency': 3.0}
"""

CITATION = "Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding, \
2023, arXiv 2211.17192, Theorem 3.8."


class ExpectedSpeedup(evaluate.Metric):
    """Tokens per round over the cost of a round."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(
        self,
        *,
        predictions: list[int],
        references: list[int],
        draft_cost_ratio: float,
        verify_cost_ratio: float = 1.0,
    ) -> dict[str, Any]:
        tokens = summarize_rounds(predictions, references)["block_efficiency"]
        costs = [
            call_cost(
                int(depth),
                draft_cost_ratio=draft_cost_ratio,
                verify_cost_ratio=lambda _: verify_cost_ratio,
            )
            for depth in references
        ]
        return {
            "expected_speedup": tokens / (sum(costs) / len(costs)),
            "block_efficiency": tokens,
        }
