"""Owns reading a measured run back: from its report, its measure artifact, or a server's counts.

Refuses to compare: it hands over the numbers, and under which conditions they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from distill.artifacts import Artifact, ArtifactStore
from distill.errors import ArtifactError, ArtifactMissingError
from distill.manifest import MANIFEST_NAME, neighbour
from distill.metrics.acceptance import RULES
from distill.metrics.summary import PromptRecord
from distill.report.models import drafts_of, target_of

REPORT_FILE = "report.json"
SERVED_FILE = "served.json"

_MIN_DIGITS = 4
_MAX_LISTED = 12


class _Read(BaseModel):
    """What a comparison reads of a file; a value of another kind is refused, by name."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Estimate(_Read):
    value: float | None
    low: float | None
    high: float | None
    num_prompts: NonNegativeInt


class _Cell(_Read):
    draft: str
    temperature: float
    task: str | None
    analytic_acceptance_rate: _Estimate
    acceptance_rate: _Estimate
    draft_acceptance_rate: _Estimate
    block_efficiency: _Estimate


class _Record(_Read):
    draft: str
    temperature: float
    prompt_id: str
    task: str
    num_accepted: NonNegativeInt
    num_tested: NonNegativeInt
    num_proposed: NonNegativeInt
    num_emitted: NonNegativeInt
    num_target_calls: NonNegativeInt


class _Served(_Read):
    name: str
    primary: str
    num_draft_tokens: NonNegativeInt
    cells: list[_Cell]
    records: list[_Record]


class _Measure(_Read):
    path: str
    fingerprint: str


class _Artifacts(_Read):
    measure: _Measure


class _Report(_Read):
    name: str
    artifacts: _Artifacts


class _Lossless(_Read):
    dtype: str


class _Acceptance(_Read):
    primary: str
    num_draft_tokens: NonNegativeInt
    max_new_tokens: NonNegativeInt
    drafts: list[str]
    cells: list[_Cell]
    lossless: _Lossless


R = TypeVar("R", bound=_Read)


@dataclass(frozen=True)
class MeasuredRun:
    """One run as it is compared: its judged draft under the run's own name.

    ``target`` and ``draft`` are as in report.json; null where a server ran the pair, and of a
    draft without weights. ``corpus`` is the hash of the prompts' texts, ``generated`` the
    fingerprint of the answers they came with; None where it is not known.
    """

    name: str
    num_draft_tokens: int
    cells: Sequence[Mapping[str, Any]]
    records: Sequence[PromptRecord]
    target: Mapping[str, Any] | None = None
    draft: Mapping[str, Any] | None = None
    max_new_tokens: int | None = None
    corpus: str | None = None
    generated: str | None = None
    timing: Mapping[str, Any] = field(default_factory=dict)
    ship: bool | None = None


def read_run(store: ArtifactStore, reference: str) -> MeasuredRun:
    """What a reference names: a run, a report (directory or file), or a measure artifact.

    Raises:
        ArtifactError: it names none, or what it names is damaged; says what it may be.
    """
    path, run = Path(reference).expanduser(), store.root / "reports" / reference
    # A run's name is taken for one although a folder here is called so too: ./NAME is the folder.
    is_name = bool(reference.strip(". ")) and Path(reference).name == reference
    if is_name and _exists(run):
        path = run
    if not reference.strip() or not _exists(path):
        return _of_artifact(_by_digits(store, reference))
    if path.is_dir():
        inside = (path / name for name in (REPORT_FILE, SERVED_FILE, MANIFEST_NAME))
        found = next((entry for entry in inside if entry.is_file()), None)
        if found is None:
            raise ArtifactMissingError(
                f"{path} holds neither {REPORT_FILE} nor {SERVED_FILE} nor {MANIFEST_NAME}, so it "
                f"is no measured run. {_known(store)}"
            )
        if found.name == MANIFEST_NAME:
            return _of_artifact(store.load(path))
        path = found
    return _of_file(store, path)


def pooled(cells: Sequence[Mapping[str, Any]], draft: str) -> list[Mapping[str, Any]]:
    """A draft's cells over all tasks, one per temperature."""
    return [cell for cell in cells if cell["draft"] == draft and cell["task"] is None]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that no file can have: too long
        return False


def _by_digits(store: ArtifactStore, reference: str) -> Artifact:
    """The one measure artifact whose fingerprint begins like that."""
    digits = reference.removeprefix("measure/")
    found = []
    if len(digits) >= _MIN_DIGITS:
        found = [path for path in _built(store) if path.name.startswith(digits[: len(path.name)])]
    if len(found) == 1:
        artifact = store.load(found[0])
        if artifact.fingerprint.startswith(digits):
            return artifact
    raise ArtifactMissingError(
        f"{reference!r} is neither a run with a report under {store.root / 'reports'}, nor a "
        f"report, nor a measure artifact. {_known(store)}"
    )


def _built(store: ArtifactStore) -> list[Path]:
    folders = sorted(path.parent for path in (store.root / "measure").glob(f"*/{MANIFEST_NAME}"))
    return [path for path in folders if "." not in path.name]  # with a dot: not finished


def _known(store: ArtifactStore) -> str:
    """What can be compared here: the runs with a report, and the measure artifacts."""
    files = (store.root / "reports").glob("*/*.json")
    runs = sorted({path.parent.name for path in files if path.name in (REPORT_FILE, SERVED_FILE)})
    built = [f"measure/{path.name}" for path in _built(store)]
    return f"Runs: {_listed(runs)}. Measure artifacts: {_listed(built)}."


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_LISTED
    shown = ", ".join(names[:_MAX_LISTED]) or "none yet"
    return f"{shown} and {rest} more" if rest > 0 else shown


def _of_file(store: ArtifactStore, path: Path) -> MeasuredRun:
    """A report or a served measurement; whatever else the file holds is refused."""
    content = _json(path)
    is_table = isinstance(content, Mapping)
    if is_table and "artifacts" not in content and {"records", "cells"} <= content.keys():
        _check(_Served, content, f"{path} is no served measurement")
        return _served(content)
    report = _check(
        _Report,
        content,
        f"{path} is no report of a measured run: it names no measure artifact. Give the run's "
        f"{REPORT_FILE}, or the {SERVED_FILE} of a served measurement",
    )
    return _of_artifact(_artifact_of(store, path, report.artifacts.measure), name=report.name)


def _artifact_of(store: ArtifactStore, path: Path, measure: _Measure) -> Artifact:
    """The artifact of a report: where it was, or where the report's folder was moved to.

    Raises:
        ArtifactMissingError: it is in none of these places.
    """
    name = Path(measure.path).name
    stores = [store.root, *path.absolute().parents[2:3]]
    places = [Path(measure.path), *(root / "measure" / name for root in stores)]
    for place in dict.fromkeys(places):
        if not _exists(place / MANIFEST_NAME):
            continue
        artifact = store.load(place)
        if artifact.fingerprint == measure.fingerprint:
            return artifact
    raise ArtifactMissingError(
        f"{path} names the measure artifact {measure.fingerprint[:12]}, which is not at "
        f"{', nor at '.join(str(place) for place in dict.fromkeys(places))}. Give --artifacts, the "
        "folder it was moved to, or measure the run again."
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of the text's encoding, and of its depth
        raise ArtifactError(
            f"{path} is not JSON ({error}); give the {REPORT_FILE} of a measured run."
        ) from error


def _check(kind: type[R], content: Any, complaint: str) -> R:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ArtifactError(f"{complaint} ({place}: {first['msg']}).") from error


def _of_artifact(artifact: Artifact, name: str | None = None) -> MeasuredRun:
    artifact.expect("measure")
    path = artifact.file("acceptance.json")
    content = _json(path)
    complaint = f"{path} is not what this version reads; measure the run again"
    read = _check(_Acceptance, content, complaint)
    rows = pq.read_table(artifact.file("records.parquet")).to_pylist()
    timing = artifact.metrics.get("timing") or {}
    judged = [run for run in timing.get("runs", ()) if run["draft"] == read.primary]
    drafts = drafts_of(artifact, read.drafts, primary=read.primary)
    corpus, generated = _prompts_of(artifact)
    return MeasuredRun(
        name=artifact.fingerprint[:12] if name is None else name,
        num_draft_tokens=read.num_draft_tokens,
        cells=pooled(content["cells"], read.primary),
        records=[_record(row) for row in rows if row["draft"] == read.primary],
        # The precision it was held in, also where the settings leave that to the weights.
        target=target_of(artifact) | {"dtype": read.lossless.dtype},
        draft=next((draft for draft in drafts if draft["draft"] == read.primary), None),
        max_new_tokens=read.max_new_tokens,
        corpus=corpus,
        generated=generated,
        timing={**timing, "runs": judged} if timing else {},
        ship=artifact.metrics.get("verdict", {}).get("ship"),
    )


def _prompts_of(measure: Artifact) -> tuple[str | None, str | None]:
    """The hash of the prompts' texts, and the fingerprint of the answers they came with.

    What a target made up for itself follows from more than its settings: no hash is theirs.
    """
    revisions = measure.manifest.revisions
    generated = measure.manifest.inputs.get("generate")
    if generated is not None and (answers := neighbour(measure, "generate", generated)):
        revisions = answers.revisions
    corpus = revisions.get("corpus", "")
    return (corpus if corpus.startswith("sha256:") else None), generated


def _served(content: Mapping[str, Any]) -> MeasuredRun:
    return MeasuredRun(
        name=content["name"],
        num_draft_tokens=content["num_draft_tokens"],
        cells=pooled(content["cells"], content["primary"]),
        records=[_record(row) for row in content["records"]],
    )


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
