"""Owns the draft length that a server takes from a measurement, and its part in a key.
Refuses to measure, and to know who drafts: costs and rates are read where a stage left them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distill.artifacts import Artifact
from distill.draft_tokens import UNMEASURED, depth_revision
from distill.errors import ConfigError
from distill.metrics.verdict import DISTILLED
from distill.runtime.draft_length import AdaptiveDraftLength, SpeedModel


def adaptive_draft_length(
    measure: Artifact | None, num_draft_tokens: int | None, *, max_batch_size: int
) -> AdaptiveDraftLength:
    """The policy for the distilled draft: c, v(n) and the prior acceptance as they were measured.

    Costs are those of the measured batch size nearest to ``max_batch_size``: many rows fill the
    machine, so that wide passes cost more beside plain ones than they do for one. At batch 1 they
    are means over the measured temperatures, as rates are; a row's own rounds soon say more.

    Args:
        num_draft_tokens: the most drafted; None: the deepest round whose cost was measured.
        max_batch_size: rows that are decoded together when the server is busy.

    Raises:
        ConfigError: there is no measurement, or it has no timing of the distilled draft.
    """
    if measure is None:
        raise ConfigError(
            "serve.draft_length is 'adaptive', which needs measured costs, and no measurement was "
            "given. Give serve the 'measure' artifact, or set serve.draft_length to 'fixed'."
        )
    timing = measure.metrics.get("timing") or {}
    costs = [c for c in timing.get("draft_costs", ()) if c["draft"] == DISTILLED]
    if not costs:
        raise ConfigError(
            f"serve.draft_length is 'adaptive', which needs measured costs, and {measure.path} "
            "(measure) timed nothing. Measure with measure.timing.enabled true, or set "
            "serve.draft_length to 'fixed'."
        )
    draft_cost_ratio, verify_cost_ratio = _costs_near(max_batch_size, timing, costs)
    rates = [run["acceptance_rate"] for run in timing["runs"] if run["draft"] == DISTILLED]
    known = [rate for rate in rates if rate is not None]
    return AdaptiveDraftLength(
        SpeedModel(draft_cost_ratio, verify_cost_ratio),
        max(verify_cost_ratio) - 1 if num_draft_tokens is None else num_draft_tokens,
        prior_acceptance_rate=(
            statistics.fmean(known) if known else AdaptiveDraftLength.prior_acceptance_rate
        ),
    )


def _costs_near(
    max_batch_size: int, timing: Mapping[str, Any], draft_costs: Sequence[Mapping[str, Any]]
) -> tuple[float, dict[int, float]]:
    """c and v(n) of the measured batch size nearest to this one; of two as near, the larger."""
    single = {
        "batch_size": 1,
        "draft_cost_ratio": statistics.fmean(c["draft_cost_ratio"] for c in draft_costs),
        "verify_cost_ratio": timing["verify_cost_ratio"],
    }
    nearest = min(
        (single, *timing.get("batches", ())),
        key=lambda row: (abs(row["batch_size"] - max_batch_size), -row["batch_size"]),
    )
    verify_cost_ratio = {int(width): cost for width, cost in nearest["verify_cost_ratio"].items()}
    return nearest["draft_cost_ratio"], verify_cost_ratio


def settings_of(policy: AdaptiveDraftLength) -> dict[str, Any]:
    """What of a policy came from the measurement, for the serving record."""
    return {
        "max_draft_tokens": policy.max_draft_tokens,
        "draft_cost_ratio": policy.speed_model.draft_cost_ratio,
        "verify_cost_ratio": {str(n): v for n, v in policy.speed_model.verify_cost_ratio.items()},
        "prior_acceptance_rate": policy.prior_acceptance_rate,
    }


def drafting_revisions(
    draft_length: str,
    num_draft_tokens: int | None,
    measure: Artifact | str | None,
    *,
    max_batch_size: int,
) -> dict[str, str]:
    """The resolved draft length as parts of a key, "unmeasured" where only a fingerprint is known.

    They belong there because they come from a clock, see ``draft_tokens.depth_revision``.

    Raises:
        ConfigError: from :func:`adaptive_draft_length`.
    """
    if draft_length == "fixed":
        return {"num_draft_tokens": depth_revision(num_draft_tokens, measure)}
    if isinstance(measure, str):
        return {"num_draft_tokens": UNMEASURED}
    policy = adaptive_draft_length(measure, num_draft_tokens, max_batch_size=max_batch_size)
    return {
        "num_draft_tokens": str(policy.max_draft_tokens),
        "draft_length": json.dumps(settings_of(policy), sort_keys=True),
    }
