"""The pipeline a config names, behind the calls all pipelines share.

Refuses to know stages and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import ModuleType

from distill.artifacts import ArtifactStore
from distill.initialization import ShapeOf
from distill.models import read_shape
from distill.stages.run_config import RunConfig
from pipelines import on_policy, standard
from pipelines.standard import INPUTS, PipelineResult, StageState, report_directory

__all__ = ["INPUTS", "plan", "report_directory", "run"]


def _pipeline(config: RunConfig) -> ModuleType:
    return on_policy if config.pipeline == "on_policy" else standard


def plan(
    config: RunConfig, store: ArtifactStore, *, shape_of: ShapeOf = read_shape
) -> list[StageState]:
    """The state of every step; see :func:`pipelines.standard.plan`."""
    states: list[StageState] = _pipeline(config).plan(config, store, shape_of=shape_of)
    return states


def run(
    config: RunConfig,
    store: ArtifactStore,
    *,
    until: str = "export",
    rerun: Collection[str] = (),
    on_stage: Callable[[str], None] = lambda name: None,
) -> PipelineResult:
    """Build every step up to ``until``; see :func:`pipelines.standard.run`."""
    result: PipelineResult = _pipeline(config).run(
        config, store, until=until, rerun=rerun, on_stage=on_stage
    )
    return result
