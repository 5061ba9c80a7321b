"""Owns the shape a draft will have, before any weight is loaded.

Refuses to know how it starts beyond its settings, and where shapes are looked up.
"""

from __future__ import annotations

from collections.abc import Callable

from distill.initialization.existing import ExistingConfig
from distill.initialization.pruned import PrunedConfig
from distill.initialization.scratch import ScratchConfig
from distill.models import ModelConfig, ModelShape, read_shape

ShapeOf = Callable[[ModelConfig], ModelShape | None]


def started_shape(
    start: ExistingConfig | PrunedConfig | ScratchConfig,
    target: ModelShape | None,
    shape_of: ShapeOf = read_shape,
) -> ModelShape | None:
    """The shape of a draft that starts so, or None where it follows from an unknown one."""
    if isinstance(start, ExistingConfig):
        own = shape_of(start.model)
        return None if own is None else start.shape_from(own, target)
    return None if target is None else start.shape_from(target)
