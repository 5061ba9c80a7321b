"""Owns putting measured runs side by side: the same numbers in columns, and paired differences.

Refuses to measure: it reads measure artifacts, or the JSON of a served measurement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from distill.artifacts import Artifact, ArtifactStore
from distill.errors import ArtifactError, ArtifactMissingError
from distill.metrics import summary
from distill.metrics.acceptance import RULES
from distill.metrics.summary import PromptRecord
from distill.report.render import MISSING, estimate, times

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1
SERVED_FILE = "served.json"

_RATES = (
    ("analytic_acceptance_rate", "acceptance rate, analytic", "percent"),
    ("acceptance_rate", "acceptance rate, decoded", "percent"),
    ("draft_acceptance_rate", "accepted / proposed", "percent"),
    ("block_efficiency", "block efficiency", "number"),
)


@dataclass(frozen=True)
class MeasuredRun:
    """One run as it is compared: its judged draft under the run's own name."""

    name: str
    target_revision: str | None
    num_draft_tokens: int
    cells: Sequence[Mapping[str, Any]]
    records: Sequence[PromptRecord]
    timing: Mapping[str, Any]
    ship: bool | None


def compare_runs(store: ArtifactStore, references: Sequence[str], *, seed: int = 0) -> Any:
    """The runs side by side, and each pair's differences on the prompts they share.

    A reference is a run's name (its report lies under the store), a report directory or its
    report.json, a measure artifact (directory or leading digits of its fingerprint), or the JSON of
    a served measurement.

    Raises:
        ArtifactError: fewer than two runs, or one that holds no measurement.
    """
    if len(references) < 2:
        raise ArtifactError(
            f"{len(references)} run was given; a comparison needs at least two, such as "
            "`distill compare run-a run-b`."
        )
    runs = _named([_load(store, reference) for reference in references])
    records = [replace(record, draft=run.name) for run in runs for record in run.records]
    differences = []
    for first, second in combinations(runs, 2):
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
        table.add_column(run["name"], justify="right")
    temperatures = list(dict.fromkeys(c["temperature"] for run in runs for c in run["cells"]))
    for temperature in temperatures:
        cells = [_at(run["cells"], temperature) for run in runs]
        for metric, label, unit in _RATES:
            texts = [estimate(cell and cell[metric], unit) for cell in cells]
            table.add_row(f"{label}, temperature {temperature:g}", *texts)
        timed = [_at(run["timed"], temperature) for run in runs]
        if any(timed):
            texts = [estimate(run and run["speedup"], "times") for run in timed]
            table.add_row(f"measured speedup, temperature {temperature:g}", *texts)
            texts = [MISSING if run is None else times(run["predicted_speedup"]) for run in timed]
            table.add_row(f"predicted speedup, temperature {temperature:g}", *texts)
    table.add_row("draft tokens per call (acceptance)", *(str(r["num_draft_tokens"]) for r in runs))
    verdicts = {True: "ship", False: "do not ship", None: MISSING}
    table.add_row("verdict", *(verdicts[run["ship"]] for run in runs))
    said = [row["sentence"] for row in comparison["differences"] if row["task"] is None]
    table.caption = Text("\n".join([*said, *comparison["notes"]]), overflow="fold")
    return table


def served_table(report: Mapping[str, Any]) -> Table:
    """A served measurement on one terminal screen."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{report['name']}: {report['url']}", title_justify="left", caption_justify="left"
    )
    table.add_column("", no_wrap=True)
    cells = _pooled(report["cells"], report["primary"])
    for cell in cells:
        table.add_column(f"temperature {cell['temperature']:g}", justify="right")
    for metric, label, unit in _RATES[1:]:
        table.add_row(label, *(estimate(cell[metric], unit) for cell in cells))
    notes = [
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
        "target_revision": run.target_revision,
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


def _load(store: ArtifactStore, reference: str) -> MeasuredRun:
    path = Path(reference).expanduser()
    if not path.exists() and (named := store.root / "reports" / reference).is_dir():
        path = named
    if path.is_dir():
        path = next((path / n for n in ("report.json", SERVED_FILE) if (path / n).is_file()), path)
    if path.is_file():
        return _from_file(store, path)
    try:
        artifact = store.load(path if path.is_dir() else reference)
    except ArtifactMissingError as error:
        raise ArtifactMissingError(
            f"{reference!r} is neither a run with a report under {store.root / 'reports'}, nor a "
            f"report, nor a measure artifact ({error})"
        ) from error
    return _measured(artifact, artifact.fingerprint[:12])


def _from_file(store: ArtifactStore, path: Path) -> MeasuredRun:
    """A report or a served measurement; whatever else the file holds is refused."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the text's encoding as well
        raise ArtifactError(
            f"{path} is not JSON ({error}); give the report.json of a measured run."
        ) from error
    is_table = isinstance(content, Mapping)
    if is_table and {"records", "cells", "primary", "name", "num_draft_tokens"} <= content.keys():
        return _served(content)
    artifacts = content.get("artifacts") if is_table else None
    measure = artifacts.get("measure") if isinstance(artifacts, Mapping) else None
    if not isinstance(measure, Mapping) or "path" not in measure or "name" not in content:
        raise ArtifactError(
            f"{path} is no report of a measured run: it names no measure artifact. Give the run's "
            f"report.json, or the {SERVED_FILE} of a served measurement."
        )
    return _measured(store.load(measure["path"]), content["name"])


def _measured(artifact: Artifact, name: str) -> MeasuredRun:
    artifact.expect("measure")
    content = json.loads(artifact.file("acceptance.json").read_text(encoding="utf-8"))
    primary = content.get("primary", "distilled")
    rows = pq.read_table(artifact.file("records.parquet")).to_pylist()
    timing = artifact.metrics.get("timing", {})
    runs = [run for run in timing.get("runs", ()) if run["draft"] == primary]
    return MeasuredRun(
        name=name,
        target_revision=artifact.manifest.revisions.get("target"),
        num_draft_tokens=content["num_draft_tokens"],
        cells=_pooled(content["cells"], primary),
        records=[_record(row) for row in rows if row["draft"] == primary],
        timing={"runs": runs},
        ship=artifact.metrics["verdict"]["ship"],
    )


def _served(content: Mapping[str, Any]) -> MeasuredRun:
    return MeasuredRun(
        name=content["name"],
        target_revision=None,
        num_draft_tokens=content["num_draft_tokens"],
        cells=_pooled(content["cells"], content["primary"]),
        records=[_record(row) for row in content["records"]],
        timing={},
        ship=None,
    )


def _pooled(cells: Sequence[Mapping[str, Any]], draft: str) -> list[Mapping[str, Any]]:
    return [cell for cell in cells if cell["draft"] == draft and cell["task"] is None]


def _record(row: Mapping[str, Any]) -> PromptRecord:
    sums = {rule: row.get(f"analytic_{rule}") for rule in RULES}
    return PromptRecord(
        draft=row["draft"],
        temperature=row["temperature"],
        prompt_id=row["prompt_id"],
        task=row["task"],
        counts=row,
        num_positions=row.get("num_positions", 0),
        acceptance_sums={rule: value for rule, value in sums.items() if value is not None},
    )


def _named(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Equal names told apart by a number: two columns must not be taken for one."""
    names = [run.name for run in runs]
    return [
        run
        if names.count(run.name) == 1
        else replace(run, name=f"{run.name} ({names[: index + 1].count(run.name)})")
        for index, run in enumerate(runs)
    ]


def _notes(runs: Sequence[MeasuredRun], differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know before believing a difference."""
    notes = []
    targets = {run.target_revision for run in runs if run.target_revision is not None}
    if len(targets) > 1:
        notes.append("note: the runs have different targets; a difference is not the draft's alone")
    if len({run.num_draft_tokens for run in runs}) > 1:
        notes.append(
            "note: the runs drafted different numbers of tokens a call; compare acceptance rates, "
            "not accepted / proposed or block efficiency"
        )
    for first, second in combinations(runs, 2):
        pair = (second.name, first.name)
        if not any((row["draft"], row["baseline"]) == pair for row in differences):
            notes.append(f"note: {first.name} and {second.name} share no prompt and temperature")
    return notes


def _at(rows: Sequence[Mapping[str, Any]], temperature: float) -> Mapping[str, Any] | None:
    return next((row for row in rows if row["temperature"] == temperature), None)
