"""Owns a tiny training run: settings, data and one call.

Refuses to know what a test looks for in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from distill.artifacts import Artifact
from distill.initialization import PrunedConfig, initialize
from distill.losses.head import head_of
from distill.models import LoadedModel
from distill.training.config import TrainingConfig
from distill.training.data import TargetFiles, read_rows
from distill.training.loop import train
from distill.training.processes import Processes
from distill.training.run import Followers, TrainingData, TrainingResult


def training_config(**changes: Any) -> TrainingConfig:
    """Six steps of a few micro-batches each, in float32."""
    defaults: dict[str, Any] = {
        "max_steps": 6,
        "batch_tokens": 40,
        "micro_batch_tokens": 40,
        "warmup_steps": 2,
        "eval_every": 3,
        "checkpoint_every": 2,
        "compute_dtype": "float32",
    }
    return TrainingConfig(**(defaults | changes))


def make_draft(target: LoadedModel, *, dropout: float = 0.0) -> Any:
    """Two of the target's four layers; dropout draws random numbers in training mode."""
    model = initialize(PrunedConfig(layers=(0, 3)), target, seed=0).model
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    return model


def training_data(generated: Artifact) -> TrainingData:
    """All rows of a stand-in for generate."""
    return TrainingData(
        rows=read_rows(generated, "train", max_length=512),
        held_out_rows=read_rows(generated, "held_out", max_length=512),
        source=TargetFiles(generated),
    )


def train_draft(
    target: LoadedModel,
    generated: Artifact,
    config: TrainingConfig,
    work_dir: Path,
    *,
    draft: Any = None,
    followers: Followers | None = None,
    processes: Processes | None = None,
) -> tuple[dict[str, Tensor], TrainingResult]:
    """The trained weights, and what came of the run."""
    draft = make_draft(target) if draft is None else draft
    result = train(
        draft,
        target_head=head_of(target.model),
        data=training_data(generated),
        config=config,
        work_dir=work_dir,
        followers=followers,
        processes=processes,
    )
    return draft.state_dict(), result
