"""Owns what can be said against a measurement before anything is built, from settings and sizes.

Refuses to know prompts and weights: what only they can show is refused when the stage has them.
"""

from __future__ import annotations

from collections.abc import Callable

from distill.errors import ConfigError
from distill.models import ModelConfig, ModelShape, read_shape
from distill.stages.measure_config import GIVEN_DRAFT, MeasureConfig


def check_before_measuring(
    config: MeasureConfig,
    target: ModelShape | None,
    *,
    shape_of: Callable[[ModelConfig], ModelShape | None] = read_shape,
) -> None:
    """Refuse a measurement that could only fail, so that a pipeline does not train for it first.

    ``target``: the target's shape; None where it is not known: what follows from it is not checked.
    ``shape_of`` looks up a draft's.

    Raises:
        ConfigError: more layers than the target has, or an answer longer than its context.
        ModelNotFoundError: a draft whose config.json cannot be read.
    """
    drafts = dict(config.drafts)
    if config.draft is not None:
        drafts[GIVEN_DRAFT] = config.draft
    for model in drafts.values():
        shape_of(model)
    if target is None:
        return
    deepest = max(config.early_exit, default=0)
    if deepest > target.num_hidden_layers:
        raise ConfigError(
            f"measure.early_exit has {deepest} layers, the target has {target.num_hidden_layers}; "
            "choose at most as many."
        )
    lengths = {"measure.max_new_tokens": config.max_new_tokens}
    if config.timing.enabled:
        lengths["measure.timing.max_new_tokens"] = config.timing.max_new_tokens
    for name, length in lengths.items():
        if length >= target.max_position_embeddings:
            raise ConfigError(
                f"{name} is {length}, and the target's context of {target.max_position_embeddings} "
                f"tokens has to hold the prompt as well; lower {name}."
            )
