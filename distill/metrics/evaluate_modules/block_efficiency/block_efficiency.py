"""Owns the `evaluate` face of block efficiency: tokens emitted per target call.

Refuses to define it: the counting is ``distill.metrics.acceptance.summarize_rounds``.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from distill.metrics.acceptance import summarize_rounds

DESCRIPTION = """
Block efficiency (tau) of speculative decoding: tokens emitted per target call, the correction or
bonus token included. Plain decoding scores 1; the maximum is the number of draft tokens plus 1.
"""

INPUTS = """
Args:
    predictions: number of draft tokens accepted in each round.
    references: number of draft tokens proposed in each round.
Returns:
    block_efficiency, num_emitted, num_target_calls.
Example:
    >>> metric.compute(predictions=[2, 0, 4], references=[4, 4, 4])["block_efficiency"]
    3.0
"""

CITATION = "Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding, \
2023, arXiv 2211.17192."


class BlockEfficiency(evaluate.Metric):
    """Emitted / target calls, from rounds."""

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
        return {
            "block_efficiency": rates["block_efficiency"],
            "num_emitted": rates["num_emitted"],
            "num_target_calls": rates["num_target_calls"],
        }
