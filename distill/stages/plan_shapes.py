"""Owns what a plan knows of models: the shapes of target and draft, and what their weights take.

Refuses to load a weight, and to know what a stage does with them.
"""

from __future__ import annotations

import functools

from distill.initialization import ShapeOf, started_shape
from distill.models import ModelConfig, ModelShape, read_shape
from distill.stages.run_config import RunConfig

WEIGHT_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}


def known_shapes() -> ShapeOf:
    """``read_shape`` that looks each model up once, and so says once what it did not find."""
    return functools.cache(read_shape)


def draft_shape(
    config: RunConfig, target: ModelShape | None, shape_of: ShapeOf = read_shape
) -> ModelShape | None:
    """The shape the draft will have, or None where it follows from an unknown one."""
    return started_shape(config.distill.initialization, target, shape_of)


def body_parameters(shape: ModelShape) -> int:
    """The weights of the layers and norms: all but embedding and head."""
    num_tables = 1 if shape.tie_word_embeddings else 2
    return shape.num_parameters - num_tables * shape.vocab_size * shape.hidden_size


def weight_bytes(config: ModelConfig, shape: ModelShape) -> int:
    """Bytes of a model's weights as its config holds them."""
    return shape.num_parameters * WEIGHT_BYTES[config.dtype]
