"""The standard pipeline: generate, distill, measure, export, each on the last one's artifact.

Refuses to know how any stage works; deleting this file must break no single-stage call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore
from distill.draft_tokens import UNMEASURED
from distill.errors import ConfigError
from distill.export import export_draft, export_key
from distill.initialization import ShapeOf
from distill.models import UNRESOLVED, read_shape
from distill.stages.distill_draft import check_before_building, distill_draft, distill_key
from distill.stages.generate import UNREAD, generate, generate_key
from distill.stages.measure import check_before_measuring, measure_acceptance, measure_key
from distill.stages.plan_shapes import known_shapes
from distill.stages.run_config import RunConfig

logger = logging.getLogger(__name__)

STAGES = ("generate", "distill", "measure", "export")

NOT_RESOLVED = (UNREAD, UNRESOLVED, UNMEASURED)

# What each stage reads. The keys follow from fingerprints, and that of the export from a measured
# number of draft tokens, so a plan needs no weights.
INPUTS: Mapping[str, tuple[str, ...]] = {
    "generate": (),
    "distill": ("generate",),
    "measure": ("generate", "distill"),
    "export": ("distill", "measure"),
}


@dataclass(frozen=True)
class StageState:
    """One stage of a plan: its key, whether it is built, and why not.

    ``is_provisional``: a model or a dataset could not be reached, or the number of draft tokens to
    export is not measured yet, so the key is not the one a run will have.
    """

    name: str
    key: ArtifactKey
    artifact: Artifact | None
    is_started: bool
    is_provisional: bool
    miss: str | None


@dataclass(frozen=True)
class PipelineResult:
    """The artifacts of a run by stage name, and the stages that were found built."""

    artifacts: Mapping[str, Artifact]
    hits: Collection[str] = field(default_factory=tuple)


def _key(
    config: RunConfig,
    store: ArtifactStore,
    name: str,
    given: Mapping[str, Artifact | str],
    *,
    may_be_provisional: bool = False,
) -> ArtifactKey:
    inputs = {source: given[source] for source in INPUTS[name]}
    if name == "generate":
        return generate_key(config.generate, store, may_be_provisional=may_be_provisional)
    if name == "distill":
        return distill_key(config.distill, store, inputs=inputs)
    if name == "measure":
        return measure_key(config.measure, store, inputs=inputs)
    return export_key(config.export, store, inputs=inputs)


def _is_unresolved(key: ArtifactKey) -> bool:
    return any(value.startswith(NOT_RESOLVED) for value in key.parts["revisions"].values())


def plan(
    config: RunConfig, store: ArtifactStore, *, shape_of: ShapeOf = read_shape
) -> list[StageState]:
    """The state of every stage, without loading a weight or writing a byte.

    ``shape_of`` looks up a model's shape.

    Raises:
        ConfigError: the draft could not be trained, or measured, as the config has it.
        ModelNotFoundError: a model is a path, and nothing is there.
    """
    for name in STAGES:
        _check_settings(config, name, shape_of)
    states: list[StageState] = []
    given: dict[str, Artifact | str] = {}
    provisional: set[str] = set()
    for name in STAGES:
        key = _key(config, store, name, given, may_be_provisional=True)
        if _is_unresolved(key) or provisional.intersection(INPUTS[name]):
            provisional.add(name)
        artifact = store.find(key)
        given[name] = artifact or key.fingerprint
        states.append(
            StageState(
                name=name,
                key=key,
                artifact=artifact,
                is_started=store.partial_dir(key).exists(),
                is_provisional=name in provisional,
                miss=None if artifact else store.explain_miss(key),
            )
        )
    return states


def _check_settings(config: RunConfig, name: str, shape_of: ShapeOf) -> None:
    if name == "distill":
        check_before_building(config.distill, shape_of(config.target), shape_of=shape_of)
    if name == "measure":
        check_before_measuring(config.measure, shape_of(config.target), shape_of=shape_of)


def _check_reached(config: RunConfig, store: ArtifactStore, until: str) -> None:
    """Refuse before the first stage what the settings of a later one make impossible."""
    shape_of = known_shapes()
    given: dict[str, Artifact | str] = {}
    for name in STAGES[: STAGES.index(until) + 1]:
        _check_settings(config, name, shape_of)
        given[name] = _key(config, store, name, given, may_be_provisional=True).fingerprint


def _check_stage_names(names: Collection[str]) -> None:
    for name in names:
        if name not in STAGES:
            raise ConfigError(f"unknown stage {name!r}; the stages are: {', '.join(STAGES)}")


def run(
    config: RunConfig,
    store: ArtifactStore,
    *,
    until: str = "export",
    rerun: Collection[str] = (),
    on_stage: Callable[[str], None] = lambda name: None,
) -> PipelineResult:
    """Build every stage up to ``until``; what is already built is taken as it is.

    ``rerun`` names stages to build again although they are there. ``on_stage`` is called
    with a stage's name before it starts.

    Raises:
        ConfigError: ``until`` or ``rerun`` names no stage, or ``rerun`` one after ``until``, or
            a stage that is reached cannot do as the config says; refused before any work.
        DistillError: whatever a stage raises; what was built before stays.
    """
    _check_stage_names([until, *rerun])
    for name in rerun:
        if STAGES.index(name) > STAGES.index(until):
            raise ConfigError(
                f"{name} is to be built again, but the run ends before it, after {until}; "
                f"leave out one of the two"
            )
    _check_reached(config, store, until)
    artifacts: dict[str, Artifact] = {}
    hits: list[str] = []
    for name in STAGES:
        inputs = {source: artifacts[source] for source in INPUTS[name]}
        rebuild = name in rerun
        on_stage(name)
        if not rebuild and store.path(_key(config, store, name, inputs)).is_dir():
            hits.append(name)
        artifacts[name] = _build(config, store, name, inputs, rebuild)
        if name == until:
            break
    return PipelineResult(artifacts=artifacts, hits=tuple(hits))


def _build(
    config: RunConfig,
    store: ArtifactStore,
    name: str,
    inputs: Mapping[str, Artifact],
    rebuild: bool,
) -> Artifact:
    if name == "generate":
        return generate(config.generate, store, inputs=inputs, rebuild=rebuild)
    if name == "distill":
        return distill_draft(config.distill, store, inputs=inputs, rebuild=rebuild)
    if name == "measure":
        return measure_acceptance(config.measure, store, inputs=inputs, rebuild=rebuild)
    return export_draft(config.export, store, inputs=inputs, rebuild=rebuild)


def report_directory(config: RunConfig, store: ArtifactStore) -> Path:
    """Where a run's report is written: beside the artifacts, under the run's name."""
    return store.root / "reports" / config.name
