"""Owns what a plan is read from: best K by alpha, what an improvement buys, what a batch costs.

Refuses to know where rates and costs were measured; the formulas are those of ``planner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill.metrics import planner
from distill.metrics.planner import VerifyCost

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BETTER_ALPHA = 0.05
CHEAPER_DRAFT = 0.5


@dataclass(frozen=True)
class Rates:
    """How often a draft is accepted along a block; see ``planner.tokens_from_positions``."""

    by_position: Sequence[float | None]
    tail: float
    coverage: float = 1.0

    def tokens(self) -> planner.TokensPerCall:
        """Tokens per target call as a function of K."""
        return planner.tokens_from_positions(
            self.by_position, tail_rate=self.tail, draft_coverage=self.coverage
        )

    def raised(self, by: float) -> Rates:
        """Every rate so much higher, at most 1."""
        rates = [None if rate is None else min(1.0, rate + by) for rate in self.by_position]
        return Rates(rates, min(1.0, self.tail + by), self.coverage)


def serving_depth(plans: Sequence[Mapping[str, Any]]) -> int | None:
    """The one K to serve with: its worst predicted speedup over the temperatures is the best.

    ``plans``: of one draft, a ``curve`` of ``speedup`` from K = 1 each. 0: plain decoding, which is
    predicted to be faster at some temperature whatever K is. None without plans.
    """
    if not plans:
        return None
    curves = [[point["speedup"] for point in plan["curve"]] for plan in plans]
    worst = [1.0, *(min(column) for column in zip(*curves, strict=True))]
    return worst.index(max(worst))


def speedups_by_alpha(
    *,
    draft_cost_ratio: float,
    verify_cost_ratio: VerifyCost = planner.free_verification,
    max_draft_tokens: int,
    alphas: Sequence[float] = ALPHAS,
) -> list[dict[str, Any]]:
    """Best K and speedup at each alpha (i.i.d. model), with the speedup at every K."""
    rows = []
    for alpha in alphas:
        curve = [
            planner.speedup(
                alpha,
                depth,
                draft_cost_ratio=draft_cost_ratio,
                verify_cost_ratio=verify_cost_ratio,
            )
            for depth in range(1, max_draft_tokens + 1)
        ]
        best = max(curve)
        rows.append(
            {
                "alpha": alpha,
                "num_draft_tokens": curve.index(best) + 1 if best > 1.0 else 0,
                "predicted_speedup": max(1.0, best),
                "curve": curve,
            }
        )
    return rows


def improvements(
    rates: Rates,
    *,
    draft_cost_ratio: float,
    verify_cost_ratio: VerifyCost,
    max_draft_tokens: int,
) -> list[dict[str, Any]]:
    """What changing one thing would buy, each at its own best K."""
    changes = (
        ("as measured", rates, draft_cost_ratio, verify_cost_ratio),
        (
            f"acceptance {100 * BETTER_ALPHA:g} points higher",
            rates.raised(BETTER_ALPHA),
            draft_cost_ratio,
            verify_cost_ratio,
        ),
        (
            "draft at half the cost",
            rates,
            draft_cost_ratio * CHEAPER_DRAFT,
            verify_cost_ratio,
        ),
        ("free verification", rates, draft_cost_ratio, planner.free_verification),
    )
    rows = []
    for change, changed, cost, verify in changes:
        best = planner.best_num_draft_tokens(
            changed.tokens(),
            draft_cost_ratio=cost,
            verify_cost_ratio=verify,
            draft_coverage=rates.coverage,
            max_draft_tokens=max_draft_tokens,
        )
        rows.append(
            {
                "change": change,
                "num_draft_tokens": best.num_draft_tokens,
                "predicted_speedup": best.speedup,
            }
        )
    return rows


def plan_batches(
    rates: Rates, costs: Sequence[Mapping[str, Any]], *, max_draft_tokens: int
) -> list[dict[str, Any]]:
    """Best K and speedup at each batch size, from costs measured at that size.

    Rows of a batch go on at their own pace, so tokens per call are those of a single row; what
    grows with the batch is the cost of a wide pass. ``costs``: ``batch_size``,
    ``draft_cost_ratio`` and ``verify_cost_ratio`` (by width, as text), relative to a plain step of
    the same batch.
    """
    rows = []
    for cost in costs:
        verify = {int(n): v for n, v in cost["verify_cost_ratio"].items()}
        best = planner.best_num_draft_tokens(
            rates.tokens(),
            draft_cost_ratio=cost["draft_cost_ratio"],
            verify_cost_ratio=planner.interpolate(verify),
            draft_coverage=rates.coverage,
            max_draft_tokens=min(max_draft_tokens, max(verify) - 1),
        )
        rows.append(
            {
                "batch_size": cost["batch_size"],
                "num_draft_tokens": best.num_draft_tokens,
                "predicted_speedup": best.speedup,
            }
        )
    return rows
