"""Owns putting measured runs side by side: the same numbers in columns, and paired differences.

Refuses to measure, and to read files: ``measured`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from distill.artifacts import ArtifactStore
from distill.errors import ArtifactError
from distill.metrics import summary
from distill.report.measured import SERVED_FILE, MeasuredRun, pooled, read_run
from distill.report.render import MISSING, estimate, few_notes, times

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["SERVED_FILE", "compare_runs", "comparison_table", "served_table"]

SCHEMA_VERSION = 2

_MAX_VALUE_CHARS = 24

_RATES = (
    ("analytic_acceptance_rate", "acceptance rate, analytic", "percent"),
    ("acceptance_rate", "acceptance rate, decoded", "percent"),
    ("draft_acceptance_rate", "accepted / proposed", "percent"),
    ("block_efficiency", "block efficiency", "number"),
)


@dataclass(frozen=True)
class _Condition:
    """Something two runs have to share for their numbers to differ by the draft alone."""

    label: str
    read: Callable[[MeasuredRun], Any]
    consequence: str


def _timed_under(name: str) -> Callable[[MeasuredRun], Any]:
    """Reads a condition of a run's timing; None where nothing was timed."""

    def read(run: MeasuredRun) -> Any:
        conditions: Mapping[str, Any] = run.timing.get("conditions", {})
        return conditions.get(name, run.timing.get(name))

    return read


_NOT_THE_DRAFTS = "a difference is not the draft's alone"
_CONDITIONS = (
    _Condition("target", lambda run: (run.target or {}).get("revision"), _NOT_THE_DRAFTS),
    _Condition("target.dtype", lambda run: (run.target or {}).get("dtype"), _NOT_THE_DRAFTS),
    _Condition("target.quantize", lambda run: (run.target or {}).get("quantize"), _NOT_THE_DRAFTS),
    _Condition(
        "max_new_tokens",
        lambda run: run.max_new_tokens,
        "later tokens of an answer are accepted more or less often than its first",
    ),
    _Condition(
        "num_draft_tokens",
        lambda run: run.num_draft_tokens,
        "compare acceptance rates, not accepted / proposed or block efficiency",
    ),
    *(
        _Condition(f"timing.{name}", _timed_under(name), "the speedups are not of the drafts alone")
        for name in ("device_name", "num_threads", "dtype", "torch", "max_new_tokens")
    ),
)


def compare_runs(store: ArtifactStore, references: Sequence[str], *, seed: int = 0) -> Any:
    """The runs side by side, and each pair's differences on the prompts they share.

    Runs on other prompts have no differences: equal ids are no equal texts. What else keeps a
    difference from being the draft's alone is in ``notes``.

    A reference is a run's name (its report lies under the store), a report directory or its
    report.json, a measure artifact (directory or leading digits of its fingerprint), or the JSON of
    a served measurement.

    Raises:
        ArtifactError: fewer than two runs, or one that holds no measurement that can be read.
    """
    if len(references) < 2:
        raise ArtifactError(
            f"{len(references)} run was given; a comparison needs at least two, such as "
            "`distill compare run-a run-b`."
        )
    runs = _named([read_run(store, reference) for reference in references])
    records = [replace(record, draft=run.name) for run in runs for record in run.records]
    differences = []
    for first, second in combinations(runs, 2):
        if _has_same_prompts(first, second) is False:
            continue  # an id that both have need not name one text
        rows = summary.compare(records, draft=second.name, baseline=first.name, seed=seed)
        differences += [{"draft": second.name, "baseline": first.name, **row} for row in rows]
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": [_row(run) for run in runs],
        "differences": differences,
        "notes": _notes(runs, differences),
    }


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """The comparison on one terminal screen."""
    from rich.table import Table
    from rich.text import Text

    runs = comparison["runs"]
    table = Table(title="comparison", title_justify="left", caption_justify="left")
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(Text(run["name"]), justify="right")
    rows: list[tuple[str, list[str]]] = []
    temperatures = list(dict.fromkeys(c["temperature"] for run in runs for c in run["cells"]))
    for temperature in temperatures:
        cells = [_at(run["cells"], temperature) for run in runs]
        for metric, label, unit in _RATES:
            texts = [estimate(cell and cell[metric], unit) for cell in cells]
            rows.append((f"{label}, temperature {temperature:g}", texts))
        timed = [_at(run["timed"], temperature) for run in runs]
        if any(timed):
            texts = [estimate(run and run["speedup"], "times") for run in timed]
            rows.append((f"measured speedup, temperature {temperature:g}", texts))
            texts = [MISSING if run is None else times(run["predicted_speedup"]) for run in timed]
            rows.append((f"predicted speedup, temperature {temperature:g}", texts))
    rows.append(("draft tokens per call (acceptance)", [str(r["num_draft_tokens"]) for r in runs]))
    verdicts = {True: "ship", False: "do not ship", None: MISSING}
    rows.append(("verdict", [verdicts[run["ship"]] for run in runs]))
    for label, texts in rows:
        table.add_row(label, *texts)
    few = few_notes([text for _, texts in rows for text in texts])
    said = [row["sentence"] for row in comparison["differences"] if row["task"] is None]
    table.caption = Text("\n".join([*few, *said, *comparison["notes"]]), overflow="fold")
    return table


def served_table(report: Mapping[str, Any]) -> Table:
    """A served measurement on one terminal screen."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(f"{report['name']}: {report['url']}"),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    cells = pooled(report["cells"], report["primary"])
    for cell in cells:
        table.add_column(f"temperature {cell['temperature']:g}", justify="right")
    rows = [(label, [estimate(c[metric], unit) for c in cells]) for metric, label, unit in _RATES]
    for label, texts in rows[1:]:  # a server tells no distributions
        table.add_row(label, *texts)
    notes = few_notes([text for _, texts in rows for text in texts])
    notes += [
        f"{report['num_prompts']} prompts, {report['num_draft_tokens']} draft tokens per call, "
        "from the server's counters",
        "approximate: a round that ends at an accepted end of text counts one tested (of vLLM: "
        "and one emitted) token too many, at most once an answer",
    ]
    if report["num_foreign_tokens"]:
        notes.append(
            f"{report['num_foreign_tokens']} tokens went to other clients meanwhile, so the "
            "numbers are not of these prompts alone: measure when nobody else asks"
        )
    if report["num_unanswered"]:
        notes.append(f"{report['num_unanswered']} prompts got no answer")
    table.caption = Text("\n".join(notes), overflow="fold")
    return table


def _row(run: MeasuredRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "target": run.target,
        "draft": run.draft,
        "max_new_tokens": run.max_new_tokens,
        "corpus": run.corpus,
        "num_draft_tokens": run.num_draft_tokens,
        "num_prompts": len({record.prompt_id for record in run.records}),
        "ship": run.ship,
        "cells": [
            {"temperature": cell["temperature"], **{name: cell[name] for name, _, _ in _RATES}}
            for cell in run.cells
        ],
        "timed": [
            {
                name: timed[name]
                for name in ("temperature", "num_draft_tokens", "speedup", "predicted_speedup")
            }
            for timed in run.timing.get("runs", ())
        ],
    }


def _named(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Equal names told apart by a number: two columns must not be taken for one."""
    names = [run.name for run in runs]
    return [
        run
        if names.count(run.name) == 1
        else replace(run, name=f"{run.name} ({names[: index + 1].count(run.name)})")
        for index, run in enumerate(runs)
    ]


def _has_same_prompts(first: MeasuredRun, second: MeasuredRun) -> bool | None:
    """Whether an id names the same text in both; None where one of them does not tell."""
    if first.generated is not None and first.generated == second.generated:
        return True
    if first.corpus is None or second.corpus is None:
        return None
    return first.corpus == second.corpus


def _notes(runs: Sequence[MeasuredRun], differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know before believing a difference."""
    notes = []
    for condition in _CONDITIONS:
        told = [(run.name, value) for run in runs if (value := condition.read(run)) is not None]
        if len({value for _, value in told}) > 1:
            values = ", ".join(f"{name} {_cut(value)}" for name, value in told)
            notes.append(
                f"note: {condition.label} is not the same ({values}); {condition.consequence}"
            )
    for first, second in combinations(runs, 2):
        pair, names = (second.name, first.name), f"{first.name} and {second.name}"
        is_compared = any((row["draft"], row["baseline"]) == pair for row in differences)
        has_same = _has_same_prompts(first, second)
        if has_same is False:
            notes.append(
                f"note: {names} were asked the prompts of different corpora ({_cut(first.corpus)} "
                f"and {_cut(second.corpus)}), so nothing is paired; measure both on one corpus"
            )
        elif not is_compared:
            notes.append(f"note: {names} share no prompt and temperature")
        elif has_same is None:
            notes.append(
                f"note: {names} are paired by the ids of their prompts; whether the texts are the "
                "same is not known"
            )
    return notes


def _cut(value: Any) -> str:
    """A value as a note has room for it: of a hash its beginning."""
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _at(rows: Sequence[Mapping[str, Any]], temperature: float) -> Mapping[str, Any] | None:
    return next((row for row in rows if row["temperature"] == temperature), None)
