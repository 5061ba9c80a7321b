"""The on-policy pipeline: after a first training, rounds of draft writes, target scores, distill.

Refuses to know how any stage works; deleting this file must break no single-stage call.

generate -> distill -> (rollouts -> distill) x rounds -> measure -> export. Each training starts
from the last one's draft and reads the target's text beside what that draft wrote (DistillSpec,
arXiv 2310.08461; GKD, arXiv 2306.13649). Every round is two artifacts, so a killed run goes on
where it was, and one more round costs one more round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore
from distill.errors import ConfigError
from distill.export import export_draft, export_key
from distill.initialization import ShapeOf
from distill.models import read_shape
from distill.stages.distill_draft import (
    DistillConfig,
    check_before_building,
    distill_draft,
    distill_key,
)
from distill.stages.generate import generate, generate_key
from distill.stages.measure import check_before_measuring, measure_acceptance, measure_key
from distill.stages.plan_shapes import known_shapes
from distill.stages.rollouts import RolloutConfig, rollouts_key, write_rollouts
from distill.stages.run_config import RunConfig
from pipelines.standard import NOT_RESOLVED, PipelineResult, StageState, report_directory

__all__ = ["INPUTS", "STAGES", "plan", "report_directory", "run"]

STAGES = ("generate", "rollouts", "distill", "measure", "export")

# What the last stages read, under the names the steps before leave their artifacts by.
INPUTS: Mapping[str, tuple[str, ...]] = {
    "measure": ("generate", "distill"),
    "export": ("distill", "measure"),
}


@dataclass(frozen=True)
class _Step:
    """One call of a stage. ``label`` tells rounds apart; ``round`` is 0 before the first."""

    stage: str
    label: str
    round: int = 0
    inputs: tuple[str, ...] = ()


def _steps(config: RunConfig) -> Iterator[_Step]:
    if config.distill.engine == "trl":
        raise ConfigError(
            "pipeline is on_policy and distill.engine trl, which reads no rollouts: what each "
            "round writes would be thrown away. Set distill.engine: own, or pipeline: standard "
            "(TRL writes text of the draft's in every step)."
        )
    yield _Step("generate", "generate")
    yield _Step("distill", "distill round 0", inputs=("generate",))
    for number in range(1, config.rollouts.rounds + 1):
        yield _Step("rollouts", f"rollouts round {number}", number, ("generate", "distill"))
        inputs = ("generate", "rollouts", "distill")
        yield _Step("distill", f"distill round {number}", number, inputs)
    yield _Step("measure", "measure", inputs=INPUTS["measure"])
    yield _Step("export", "export", inputs=INPUTS["export"])


def _rollouts_of(config: RunConfig, step: _Step) -> RolloutConfig:
    return config.rollouts.for_round(step.round)


def _distill_of(config: RunConfig, step: _Step) -> DistillConfig:
    if step.round == 0:
        return config.distill
    return config.distill.for_round(config.rollouts.steps_per_round)


def _check_settings(config: RunConfig, steps: Sequence[_Step], shape_of: ShapeOf) -> None:
    """Refuse before the first step what the settings of a later one make impossible."""
    for step in steps:
        if step.stage == "distill":
            given = _distill_of(config, step)
            check_before_building(given, shape_of(config.target), shape_of=shape_of)
        if step.stage == "measure":
            check_before_measuring(config.measure, shape_of(config.target), shape_of=shape_of)


def _check_reached(config: RunConfig, store: ArtifactStore, steps: Sequence[_Step]) -> None:
    _check_settings(config, steps, known_shapes())
    given: dict[str, Artifact | str] = {}
    for step in steps:
        given[step.stage] = _key(config, store, step, given).fingerprint


def _key(
    config: RunConfig, store: ArtifactStore, step: _Step, given: Mapping[str, Artifact | str]
) -> ArtifactKey:
    inputs = {name: given[name] for name in step.inputs}
    if step.stage == "generate":
        return generate_key(config.generate, store, may_be_provisional=True)
    if step.stage == "rollouts":
        return rollouts_key(_rollouts_of(config, step), store, inputs=inputs)
    if step.stage == "distill":
        return distill_key(_distill_of(config, step), store, inputs=inputs)
    if step.stage == "measure":
        return measure_key(config.measure, store, inputs=inputs)
    return export_key(config.export, store, inputs=inputs)


def _build(
    config: RunConfig,
    store: ArtifactStore,
    step: _Step,
    inputs: Mapping[str, Artifact],
    rebuild: bool,
) -> Artifact:
    if step.stage == "generate":
        return generate(config.generate, store, inputs=inputs, rebuild=rebuild)
    if step.stage == "rollouts":
        return write_rollouts(_rollouts_of(config, step), store, inputs=inputs, rebuild=rebuild)
    if step.stage == "distill":
        return distill_draft(_distill_of(config, step), store, inputs=inputs, rebuild=rebuild)
    if step.stage == "measure":
        return measure_acceptance(config.measure, store, inputs=inputs, rebuild=rebuild)
    return export_draft(config.export, store, inputs=inputs, rebuild=rebuild)


def plan(
    config: RunConfig, store: ArtifactStore, *, shape_of: ShapeOf = read_shape
) -> list[StageState]:
    """The state of every step, without loading a weight or writing a byte.

    ``shape_of`` looks up a model's shape.

    Raises:
        ConfigError: the engine of distill is trl, or a round could not be trained as the config
            has it.
        ModelNotFoundError: a model is a path, and nothing is there.
    """
    steps = list(_steps(config))
    _check_settings(config, steps, shape_of)
    states: list[StageState] = []
    given: dict[str, Artifact | str] = {}
    is_provisional = False  # everything after the prompts follows from them
    for step in steps:
        key = _key(config, store, step, given)
        revisions = key.parts["revisions"].values()
        is_provisional = is_provisional or any(r.startswith(NOT_RESOLVED) for r in revisions)
        artifact = store.find(key)
        given[step.stage] = artifact or key.fingerprint
        states.append(
            StageState(
                name=step.label,
                key=key,
                artifact=artifact,
                is_started=store.partial_dir(key).exists(),
                is_provisional=is_provisional,
                miss=None if artifact else store.explain_miss(key),
            )
        )
    return states


def run(
    config: RunConfig,
    store: ArtifactStore,
    *,
    until: str = "export",
    rerun: Collection[str] = (),
    on_stage: Callable[[str], None] = lambda name: None,
) -> PipelineResult:
    """Build every step up to the last one of the stage ``until``; what is built stays as it is.

    The result has the artifacts of the last round under their stage's name. ``rerun`` names stages
    to build again, in every round.

    Raises:
        ConfigError: ``until`` or ``rerun`` names no stage, or ``rerun`` one that is not reached,
            or the engine of distill is trl, or a step that is reached cannot do as the config
            says; refused before any work.
        DistillError: whatever a stage raises; what was built before stays.
    """
    for name in (until, *rerun):
        if name not in STAGES:
            raise ConfigError(f"unknown stage {name!r}; the stages are: {', '.join(STAGES)}")
    steps = list(_steps(config))
    last = max(index for index, step in enumerate(steps) if step.stage == until)
    reached = {step.stage for step in steps[: last + 1]}
    for name in rerun:
        if name not in reached:
            raise ConfigError(
                f"{name} is to be built again, but the run ends before it, after {until}; "
                f"leave out one of the two"
            )
    _check_reached(config, store, steps[: last + 1])
    artifacts: dict[str, Artifact] = {}
    hits: list[str] = []
    for step in steps[: last + 1]:
        inputs = {name: artifacts[name] for name in step.inputs}
        rebuild = step.stage in rerun
        on_stage(step.label)
        if not rebuild and store.path(_key(config, store, step, inputs)).is_dir():
            hits.append(step.label)
        artifacts[step.stage] = _build(config, store, step, inputs, rebuild)
    return PipelineResult(artifacts=artifacts, hits=tuple(hits))
