"""Owns what can be said against a training before anything is built, from settings and shapes.

Refuses to know weights and answers: what only they can show is refused when the stage has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distill.errors import ConfigError
from distill.initialization import ScratchConfig, ShapeOf, started_shape
from distill.models import ModelShape, read_shape
from distill.training.config import loss_schedule, require_equal_widths
from distill.training.processes import require_whole_draft
from distill.training.trackers import require_package
from distill.training.trl_engine import check_for_trl, require_equal_rows

if TYPE_CHECKING:
    from distill.stages.distill_draft import DistillConfig


def check_before_building(
    config: DistillConfig,
    target: ModelShape | None,
    *,
    shape_of: ShapeOf = read_shape,
) -> None:
    """Refuse a training that could only fail, so that a pipeline does not generate for it first.

    `target`: the target's shape; None, where it is not known: what follows from it is not checked.
    `shape_of` looks up an existing draft's.

    Raises:
        ConfigError: a tracker's package that is missing, a launch the engine cannot use, sizes of
            the draft that do not fit the target's, or that a loss or TRL cannot compare.
        ModelNotFoundError: an existing draft whose config.json cannot be read.
    """
    for name in config.trackers:
        require_package(name)
    if config.engine == "trl":
        check_for_trl(config, vocabulary_size=config.vocabulary_size)
    else:
        require_whole_draft()
    if target is None:
        return
    draft = started_shape(config.initialization, target, shape_of)
    if draft is None:
        return
    check_tables(config, target)
    require_equal_widths(loss_schedule(config), draft.hidden_size, target.hidden_size)
    if config.engine == "trl":
        require_equal_rows(draft.vocab_size, target.vocab_size)
    num_shared = min(draft.vocab_size, target.vocab_size)
    if config.vocabulary_size is not None and config.vocabulary_size > num_shared:
        raise ConfigError(
            f"distill.vocabulary_size is {config.vocabulary_size}, but target and draft share at "
            f"most {num_shared} tokens; set it lower, or to null for the whole vocabulary"
        )


def check_tables(config: DistillConfig, target: ModelShape) -> None:
    """Refuse random tables that stay as they are.

    Raises:
        ConfigError: they would, or the target cannot give the tables that are asked for.
    """
    start = config.initialization
    if not isinstance(start, ScratchConfig) or start.tables_for(target) != "random":
        return
    untrained = [
        name
        for name, is_trained in (
            ("embedding", config.trains_embedding),
            ("head", config.trains_head),
        )
        if not is_trained
    ]
    if untrained:
        raise ConfigError(
            f"distill.train_embeddings is {str(config.train_embeddings).lower()}, but the draft's "
            f"{' and '.join(untrained)} would be random: its width is "
            f"{start.hidden_size or target.hidden_size}, the target's {target.hidden_size}. Set "
            f"train_embeddings: true, or initialization.embeddings to copied (equal widths) or "
            f"projected (a smaller one)."
        )
