"""Owns what scripts/bench_distill prints, and the goals its figures are held against.
Refuses to know how anything is measured: it reads the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.metrics.timing import Spread
from scripts.benchmarks import measuring
from scripts.benchmarks.measuring import megabytes, number, table

GKD, ON_POLICY, PLAIN = "trl GKDTrainer", "trl DistillationTrainer", "plain full-logit KL"
THEIRS = (GKD, ON_POLICY, PLAIN)
COLUMNS = (
    "system",
    "store",
    "tokens/s [min, max]",
    "one epoch",
    "x best rival",
    "all epochs",
    "x best rival",
    "peak memory",
)
GOAL_SPEED, GOAL_MEMORY = 4.0, 0.5
# it starts a draft and cannot finish one, so its speed is no goal
WARM_START_ONLY = "hidden_regression"


def goals(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Our best against the fastest rival, and our memory against that of the thriftiest."""
    ours = [
        row
        for row in report["rows"]
        if row["system"] not in THEIRS and row["loss"] != WARM_START_ONLY
    ]
    rivals = [row for row in report["rows"] if row["system"] in THEIRS]
    if not ours or not rivals:
        return []
    met = []
    for key, epochs in (("one_epoch", "one epoch"), ("all_epochs", "all epochs")):
        fastest = max(ours, key=lambda row: row[f"{key}_tokens_per_s"])
        name = f"tokens/s, scoring included, {epochs}: {fastest['system']}"
        met.append((name, fastest[f"{key}_ratio"], GOAL_SPEED, 1))
    peaks = [row["peak_bytes"] for row in rivals if row["system"] != PLAIN and row["peak_bytes"]]
    if peaks and fastest["peak_bytes"]:
        met.append(
            ("its peak memory / that of TRL", fastest["peak_bytes"] / min(peaks), GOAL_MEMORY, -1)
        )
    return [
        {"goal": name, "value": value, "bound": bound, "is_met": sign * value >= sign * bound}
        for name, value, bound, sign in met
    ]


def text(report: Mapping[str, Any]) -> str:
    """The whole report for a terminal."""
    conditions, settings = report["conditions"], report["settings"]
    results = [
        [g["goal"], number(g["value"]), number(g["bound"]), "met" if g["is_met"] else "NOT met"]
        for g in goals(report)
    ]
    return "\n".join(
        [
            f"target  {report['target']}",
            f"draft   {report['draft']}",
            f"on      {conditions['device_name']}, {conditions['num_threads']} threads, torch "
            f"{conditions['torch']}, load {number(conditions['load_average'])}",
            f"run     {settings['rounds']} interleaved rounds of {settings['steps']} steps on "
            f"{settings['batch_rows']} rows, {report['tokens_a_step']} completion tokens a step; "
            f"all epochs: {number(settings['epochs'], 1)}, as the config has",
            "",
            table(COLUMNS, [_table_row(row) for row in report["rows"]]),
            "",
            *([table(("goal", "value", "bound", "result"), results), ""] if results else []),
            "tokens are completion tokens trained on. one epoch, all epochs: the target's forward "
            "pass included, once for each answer; the rivals and @live pay it in every step",
            "peak memory: resident memory of a process that trains with this system alone, the "
            "libraries included",
        ]
    )


def _table_row(row: Mapping[str, Any]) -> list[str]:
    return [
        row["system"].partition(" @")[0],
        row["store"],
        measuring.with_range(Spread(**row["tokens_per_s"])),
        number(row["one_epoch_tokens_per_s"], 1),
        number(row["one_epoch_ratio"]),
        number(row["all_epochs_tokens_per_s"], 1),
        number(row["all_epochs_ratio"]),
        megabytes(row["peak_bytes"]),
    ]
