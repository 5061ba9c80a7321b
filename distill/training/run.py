"""Owns what goes into a training run, what comes out of it, and who looks on.

Refuses to know how a run goes.

V vocabulary or its subset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distill.training.data import Row, TargetSource
from distill.training.probe import DecodeProbe
from distill.training.select import Best, HeldOutScore
from distill.training.trackers import Tracker

OnStep = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True)
class TrainingData:
    """What a draft learns from and is judged by. `token_ids_V`: its vocabulary subset, or None.

    `held_out_source` knows the target in full; None: `source` does.
    """

    rows: Sequence[Row]
    held_out_rows: Sequence[Row]
    source: TargetSource
    token_ids_V: Tensor | None = None
    held_out_source: TargetSource | None = None


@dataclass(frozen=True)
class TrainingResult:
    """`seconds` is the wall clock of the optimiser steps alone, over all resumed parts.

    `is_stopped_early`: the best acceptance was `patience` evaluations old before the last step.
    """

    best: Best
    before: HeldOutScore
    log: list[dict[str, Any]]
    num_tokens: int
    num_epochs: float
    seconds: float
    is_stopped_early: bool = False
    is_main: bool = True


@dataclass(frozen=True)
class Followers:
    """Who looks on: `on_step` hears each line of the log, `probe` decodes, `trackers` are told.

    Only the main process of a run calls them, and only there are `probe` and `trackers` needed.
    """

    on_step: OnStep = lambda step, record: None
    probe: DecodeProbe | None = None
    trackers: Sequence[Tracker] = ()
