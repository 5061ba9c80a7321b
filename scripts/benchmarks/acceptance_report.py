"""Owns what bench_acceptance says of its numbers: the goals, and the whole report for a terminal.
Refuses to know how a number came to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scripts.benchmarks.measuring import number, table

FORWARD_KL, TRL = "forward_kl", "trl on-policy"
COLUMNS = (
    "system",
    "T",
    "alpha [95%]",
    "- forward_kl",
    "- trl on-policy",
    "analytic",
    "steps",
    "train s",
)
GOALS = {FORWARD_KL: 0.05, TRL: 0.10}


def goals(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """At each temperature, the system named beforehand against each yardstick that ran.

    ``low`` and ``high``: of the difference itself, paired by prompt; over prompts, not over seeds.
    """
    named = [row for row in report["rows"] if row["system"] == report["settings"]["ours"]]
    return [
        {
            "goal": f"T = {row['temperature']:g}: {row['system']} - {other}",
            **{name: row["differences"][other][name] for name in ("value", "low", "high")},
            "bound": bound,
            "is_met": (row["differences"][other]["value"] or 0.0) >= bound,
        }
        for row in named
        for other, bound in GOALS.items()
        if other in row["differences"]
    ]


def text(report: Mapping[str, Any]) -> str:
    """The whole report for a terminal."""
    conditions, settings = report["conditions"], report["settings"]
    results = [
        [g["goal"], _interval(g), number(g["bound"]), "met" if g["is_met"] else "NOT met"]
        for g in goals(report)
    ]
    return "\n".join(
        [
            f"target  {report['target']}",
            f"on      {conditions['device_name']}, {conditions['num_threads']} threads, torch "
            f"{conditions['torch']}, load {number(conditions['load_average'])}",
            f"run     {settings['seeds']} seeds of {settings['minutes']:g} minutes each; "
            f"{report['num_prompts']} reported prompts, {settings['new_tokens']} new tokens, "
            f"K = {settings['num_draft_tokens']}",
            "",
            table(COLUMNS, [_table_row(row) for row in report["rows"]]),
            "",
            *([table(("goal", "value [95%]", "bound", "result"), results), ""] if results else []),
            "alpha: accepted / tested in a real decode, all seeds, on held-out prompts that no "
            "weights were chosen on; differences paired by prompt, intervals over prompts",
            "ours keep the best weights on the other held-out half; TRL keeps its last",
            "analytic: on the target's text of that half; at T = 0 the share of equal choices",
            "train s: of the optimiser steps, and for TRL of its whole training; steps follow from "
            "a step's time, the difference of two pilots, so TRL is given its beginning on top",
        ]
    )


def _table_row(row: Mapping[str, Any]) -> list[str]:
    times = [seconds for seconds in row["train_s"] if seconds is not None]
    steps = [count for count in row["num_steps"] if count is not None]
    return [
        row["system"],
        f"{row['temperature']:g}",
        _interval(row["acceptance_rate"]),
        *(_interval(row["differences"].get(other)) for other in GOALS),
        number(row["analytic"], 3),
        number(float(np.mean(steps)), 0) if steps else "-",
        number(float(np.mean(times)), 1) if times else "-",
    ]


def _interval(found: Mapping[str, float | None] | None) -> str:
    if found is None or found["value"] is None:
        return "-"
    low, high = found["low"], found["high"]
    spread = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    return f"{found['value']:.3f}{spread}"
