"""Owns how a draft starts: from an existing model, from the target's own layers, or from scratch.

Refuses to know how it is trained afterwards.
"""

from __future__ import annotations

from typing import Annotated

import pydantic

from distill.initialization.base import Samples, Start, initialize, model_of_shape, start_draft
from distill.initialization.existing import ExistingConfig
from distill.initialization.pruned import PrunedConfig
from distill.initialization.samples import read_samples, stored_samples, write_samples
from distill.initialization.scratch import ScratchConfig
from distill.initialization.shapes import ShapeOf, started_shape

InitializationConfig = Annotated[
    ExistingConfig | PrunedConfig | ScratchConfig, pydantic.Field(discriminator="kind")
]

__all__ = [
    "ExistingConfig",
    "InitializationConfig",
    "PrunedConfig",
    "Samples",
    "ScratchConfig",
    "ShapeOf",
    "Start",
    "initialize",
    "model_of_shape",
    "read_samples",
    "start_draft",
    "started_shape",
    "stored_samples",
    "write_samples",
]
