"""Owns the answer to "should this draft be shipped, and with how many draft tokens?".

Refuses to measure: it reads the acceptance tables and the timing, and gives its reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DISTILLED, UNDISTILLED, PROMPT_LOOKUP = "distilled", "undistilled", "prompt_lookup"
"""The drafts that are compared, by the names they have in every table."""


def decide(
    lossless: Mapping[str, Any], timing: Mapping[str, Any], *, min_speedup: float
) -> dict[str, Any]:
    """Ship only what is faster than plain decoding at EVERY temperature, and never wrong.

    Args:
        lossless: counts of greedy answers; ``num_broken`` differ from plain decoding, and no tie
            of the target's logits explains it. Nothing compared is no ground to ship on.
        timing: ``runs`` (measured) and ``plans`` (predicted) per draft and temperature; empty
            when nothing was timed, which is no ground to ship on.

    Returns:
        ``ship``, ``reasons``, ``num_draft_tokens`` (the K whose worst predicted speedup over the
        temperatures is best, 0 when plain decoding is; None when nothing was timed) and
        ``num_draft_tokens_by_temperature`` (0 where plain decoding is predicted to be faster).
    """
    ship = True
    reasons: list[str] = []
    if lossless["num_broken"]:
        ship = False
        reasons.append(
            f"not lossless: {lossless['num_broken']} of {lossless['num_compared']} greedy answers "
            "differ from plain decoding without a tie"
        )
    if not lossless["num_compared"]:
        ship = False
        reasons.append("losslessness was not checked: add temperature 0")
    ours = [run for run in timing.get("runs", []) if run["draft"] == DISTILLED]
    if not ours:
        ship = False
        reasons.append("speed was not measured: measure.timing.enabled is false")
    for run in ours:
        is_faster = run["speedup"]["value"] > min_speedup
        ship = ship and is_faster
        reasons.append(_speed_reason(run, is_faster, min_speedup))
        reasons += _rival_reason(run, timing["runs"])
    return {"ship": ship, "reasons": reasons, **_depths(timing)}


def _speed_reason(run: Mapping[str, Any], is_faster: bool, min_speedup: float) -> str:
    speedup = run["speedup"]
    interval = ""
    if speedup["low"] is not None:
        interval = f" ({speedup['low']:.2f} to {speedup['high']:.2f})"
    depth = run["num_draft_tokens"]
    return (
        f"temperature {run['temperature']:g}: {speedup['value']:.2f}x measured{interval} with "
        f"{depth} draft token{'' if depth == 1 else 's'}, {'above' if is_faster else 'not above'} "
        f"{min_speedup:g}x; {run['predicted_speedup']:.2f}x predicted"
    )


def _rival_reason(run: Mapping[str, Any], runs: list[Mapping[str, Any]]) -> list[str]:
    """A rival that is faster is said to be so; it does not stand in the way of shipping."""
    rivals = [r for r in runs if r["draft"] != DISTILLED and r["temperature"] == run["temperature"]]
    best = max(rivals, key=lambda r: float(r["speedup"]["value"]), default=run)
    if best["speedup"]["value"] <= run["speedup"]["value"]:
        return []
    return [
        f"temperature {run['temperature']:g}: {best['draft']} is faster, "
        f"{best['speedup']['value']:.2f}x"
    ]


def _depths(timing: Mapping[str, Any]) -> dict[str, Any]:
    plans = [plan for plan in timing.get("plans", []) if plan["draft"] == DISTILLED]
    curves = [[point["speedup"] for point in plan["curve"]] for plan in plans]
    worst = [1.0, *(min(column) for column in zip(*curves, strict=True))]  # K = 0: plain decoding
    return {
        "num_draft_tokens": worst.index(max(worst)) if plans else None,
        "num_draft_tokens_by_temperature": {
            f"{plan['temperature']:g}": plan["num_draft_tokens"] for plan in plans
        },
    }
