"""Owns the answer to "should this draft be shipped, and with how many draft tokens?".

Refuses to measure: it reads the acceptance tables and the timing, and gives its reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distill.metrics.planner_tables import serving_depth
from distill.metrics.sentences import exact, few_prompts

DISTILLED, UNDISTILLED, PROMPT_LOOKUP = "distilled", "undistilled", "prompt_lookup"
"""The drafts that are compared, by the names they have in every table."""

PLAIN_SPEED = 1.0


def decide(
    lossless: Mapping[str, Any],
    timing: Mapping[str, Any],
    *,
    draft: str = DISTILLED,
    faults: Sequence[str] = (),
) -> dict[str, Any]:
    """Ship only what is shown to be faster than plain decoding at EVERY temperature, never wrong.

    Args:
        lossless: counts of the judged draft's greedy answers; ``num_broken`` differ from plain
            decoding, and no tie of the target's logits explains it. ``by_draft`` has every draft's
            counts; those of others are told and change nothing. ``laws`` are tests of sampled
            tokens against the target's law. What was not checked is no ground to ship on.
        timing: ``runs`` (measured) and ``plans`` (predicted) per draft and temperature; empty
            when nothing was timed, which is no ground to ship on.
        draft: the draft that is judged.
        faults: self-tests of the measurement that failed.

    Returns:
        ``ship``, ``reasons``, ``num_draft_tokens`` (the K to serve with, see ``serving_depth``; the
        draft has to be timed at it; 0 is never shipped; None when nothing was timed) and
        ``num_draft_tokens_by_temperature`` (0 where plain decoding is predicted to be faster).
    """
    ours = [run for run in timing.get("runs", []) if run["draft"] == draft]
    plans = [plan for plan in timing.get("plans", []) if plan["draft"] == draft]
    depth = serving_depth(plans)
    reasons = [*faults, *lossless_faults(lossless, draft=draft)]
    if not lossless["num_compared"]:
        reasons.append(f"losslessness was not checked: {_why_not_compared(lossless, draft)}")
    reasons += _unjudged_laws(lossless, [run["temperature"] for run in ours], draft)
    if not ours:
        reasons.append("speed was not measured: measure.timing.enabled is false")
    elif depth == 0:
        reasons.append(
            "no number of draft tokens is predicted to be faster than plain decoding at every "
            "temperature: serve the target alone"
        )
    reasons += [
        f"temperature {exact(run['temperature'])}: {run['num_draft_tokens']} draft tokens were "
        f"timed, not the {depth} to serve with"
        for run in ours
        if depth and run["num_draft_tokens"] != depth
    ]
    ship = not reasons
    for run in ours:
        ship = ship and _is_shown_faster(run["speedup"])
        reasons.append(_speed_reason(run))
        reasons += _rival_reason(run, timing["runs"])
    return {
        "ship": ship,
        "reasons": [*reasons, *_broken_rivals(lossless, draft)],
        "num_draft_tokens": depth,
        "num_draft_tokens_by_temperature": {
            exact(plan["temperature"]): plan["num_draft_tokens"] for plan in plans
        },
    }


def lossless_faults(lossless: Mapping[str, Any], *, draft: str) -> list[str]:
    """What shows that the draft's answers are not the target's own; empty when nothing does."""
    faults = []
    if lossless["num_broken"]:
        faults.append(f"not lossless: {_broken(lossless)}")
    faults += [
        f"not lossless: at temperature {exact(law['temperature'])} {law['draft']} draws tokens "
        f"that do not follow the target's law ({_evidence(law)})"
        for law in lossless.get("laws", ())
        if law["draft"] == draft and law["is_same_law"] is False
    ]
    return faults


def _evidence(law: Mapping[str, Any]) -> str:
    p_value, degrees = f"p = {law['p_value']:.2g}", law["degrees_of_freedom"]
    if not degrees:
        return f"too many of {law['num_samples']} draws are none of the likeliest token, {p_value}"
    return f"chi-square {law['statistic']:.1f} at {degrees} degrees of freedom, {p_value}"


def _why_not_compared(lossless: Mapping[str, Any], draft: str) -> str:
    """A draft is listed as soon as it has a greedy answer, compared or not."""
    if any(row["draft"] == draft for row in lossless.get("by_draft", ())):
        return (
            "not one draft token was tested in the greedy answers; give longer answers "
            "(measure.max_new_tokens), or prompts that fit the draft's context"
        )
    return "no greedy answer was compared; add temperature 0"


def _broken(counts: Mapping[str, Any]) -> str:
    return (
        f"{counts['num_broken']} of {counts['num_compared']} greedy answers differ from plain "
        "decoding without a tie"
    )


def _broken_rivals(lossless: Mapping[str, Any], draft: str) -> list[str]:
    """Broken answers of drafts that are not judged: a fault worth knowing, but not this draft's."""
    return [
        f"not judged: {row['draft']} is not lossless: {_broken(row)}"
        for row in lossless.get("by_draft", ())
        if row["draft"] != draft and row["num_broken"]
    ]


def _unjudged_laws(
    lossless: Mapping[str, Any], temperatures: Sequence[float], draft: str
) -> list[str]:
    """The temperatures above 0 at which no test said yes or no to the law of sampled tokens."""
    laws = {law["temperature"]: law for law in lossless.get("laws", ()) if law["draft"] == draft}
    faults = []
    for temperature in [t for t in temperatures if t > 0.0]:
        law = laws.get(temperature)
        if law is not None and law["is_same_law"] is not None:
            continue
        reason = "no token was drawn for it: raise measure.law_samples"
        if law is not None and law["num_samples"]:
            reason = (
                f"{law['num_samples']} draws are too few to expect any token 5 times: raise "
                "measure.law_samples"
            )
        elif law is not None:
            reason = "not one draft token was tested while drawing; give prompts that fit the draft"
        faults.append(f"losslessness was not checked at temperature {exact(temperature)}: {reason}")
    return faults


def gate_failures(
    bounds: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    lossless: Mapping[str, Any],
    timing: Mapping[str, Any],
    *,
    draft: str,
    faults: Sequence[str] = (),
) -> list[str]:
    """The bounds of ``measure.gate`` that a draft does not reach, each with both values.

    ``min_speedup`` is compared with the measured speedup, ``min_alpha`` with the analytic
    acceptance rate (the decoded one where there is none), at every temperature; ``lossless`` wants
    greedy answers compared at temperature 0 and a judged law at every other. What was not measured
    does not pass. ``faults`` are failed self-tests: numbers that are wrong pass no bound.
    """
    failed = [f"measure.gate cannot be judged: {fault}" for fault in faults]
    runs = [run for run in timing.get("runs", []) if run["draft"] == draft]
    pooled = [c for c in cells if c["draft"] == draft and c["task"] is None]
    if bounds["min_speedup"] is not None:
        bound = bounds["min_speedup"]
        failed += [
            f"measure.gate.min_speedup is {bound:g}, the speedup at temperature "
            f"{exact(run['temperature'])} is {_with_interval(run['speedup'])}"
            for run in runs
            if run["speedup"]["value"] is None or run["speedup"]["value"] < bound
        ]
        if not runs:
            failed.append(f"measure.gate.min_speedup is {bound:g}, and no speed was measured")
    if bounds["min_alpha"] is not None:
        bound = bounds["min_alpha"]
        for cell in pooled:
            name = "analytic_acceptance_rate"
            rate = cell[name] if cell[name]["value"] is not None else cell["acceptance_rate"]
            if rate["value"] is None or rate["value"] < bound:
                failed.append(
                    f"measure.gate.min_alpha is {bound:g}, the acceptance rate at temperature "
                    f"{exact(cell['temperature'])} is {_with_interval(rate)}"
                )
    if bounds["lossless"]:
        temperatures = [cell["temperature"] for cell in pooled]
        found = lossless_faults(lossless, draft=draft)
        found += _unjudged_laws(lossless, temperatures, draft)
        if not lossless["num_compared"] and (0.0 in temperatures or not temperatures):
            found.append(f"losslessness was not checked: {_why_not_compared(lossless, draft)}")
        failed += [f"measure.gate.lossless is true, and {fault}" for fault in found]
    return failed


def _with_interval(estimate: Mapping[str, Any]) -> str:
    if estimate["value"] is None:
        return "unknown"
    text = f"{estimate['value']:.3f}"
    if estimate["low"] is None:
        return text
    caveat = few_prompts(estimate["num_prompts"])
    said = "" if caveat is None else f"; {caveat}"
    return f"{text} (95%: {estimate['low']:.3f} to {estimate['high']:.3f}{said})"


def _is_shown_faster(speedup: Mapping[str, Any]) -> bool:
    """Whether the whole interval lies above plain decoding; a point alone shows nothing."""
    return speedup["low"] is not None and speedup["low"] > PLAIN_SPEED


def _speed_reason(run: Mapping[str, Any]) -> str:
    speedup = run["speedup"]
    interval = ""
    if speedup["low"] is not None:
        interval = f" ({speedup['low']:.2f} to {speedup['high']:.2f})"
    depth = run["num_draft_tokens"]
    judged = f"not shown to be faster than {PLAIN_SPEED:g}x"
    if speedup["value"] <= PLAIN_SPEED:
        judged = f"not above {PLAIN_SPEED:g}x"
    elif _is_shown_faster(speedup):
        judged = f"above {PLAIN_SPEED:g}x"
    caveat = run.get("caveat")
    return (
        f"temperature {exact(run['temperature'])}: {speedup['value']:.2f}x measured{interval} with "
        f"{depth} draft token{'' if depth == 1 else 's'}, {judged}; "
        f"{run['predicted_speedup']:.2f}x predicted{f'; {caveat}' if caveat else ''}"
    )


def _rival_reason(run: Mapping[str, Any], runs: list[Mapping[str, Any]]) -> list[str]:
    """A rival that is faster is said to be so; it does not stand in the way of shipping."""
    rivals = [
        r for r in runs if r["draft"] != run["draft"] and r["temperature"] == run["temperature"]
    ]
    best = max(rivals, key=lambda r: float(r["speedup"]["value"]), default=run)
    if best["speedup"]["value"] <= run["speedup"]["value"]:
        return []
    return [
        f"temperature {exact(run['temperature'])}: {best['draft']} is faster, "
        f"{best['speedup']['value']:.2f}x"
    ]
