"""Distill: a draft is built, trained on the target's answers and saved with its best weights.

Refuses to know how answers are made, how the draft is measured and how it is served.

Payload:

``draft/``
    the draft as transformers loads it: config, safetensors in the dtype it started with (the
    target's, unless it is an existing model), tokenizer.
``draft_vocabulary.json`` (with ``vocabulary_size``)
    ``token_ids``, the ids the draft may propose, ascending, and ``coverage``, their share of the
    target's own output tokens. Outside them its probability is zero by decree, not by its head.
``training_log.jsonl``
    one line an optimiser step (``loss``, ``grad_norm``, ...) and one a held-out evaluation
    (``held_out``), from step 0, the undistilled draft. No times: those are in the metrics.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import model_validator

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore, atomic_write
from distill.config import setting
from distill.errors import ArtifactError, ConfigError
from distill.initialization import (
    ExistingConfig,
    InitializationConfig,
    PrunedConfig,
    ScratchConfig,
    initialize,
)
from distill.lineage import check_same_target, fingerprints_of
from distill.losses.head import head_of
from distill.models import LoadedModel, ModelConfig, load_target, model_revision, save_model
from distill.training.config import LossPhase, TrainingConfig
from distill.training.data import TargetStates, read_rows
from distill.training.loop import OnStep, TrainingData, TrainingResult, train
from distill.training.vocabulary import (
    DraftVocabulary,
    choose_vocabulary,
    read_vocabulary,
    write_vocabulary,
)

__all__ = [
    "CODE_VERSION",
    "DistillConfig",
    "ExistingConfig",
    "LossPhase",
    "PrunedConfig",
    "ScratchConfig",
    "build_undistilled",
    "distill_draft",
    "distill_key",
    "read_vocabulary",
]

logger = logging.getLogger(__name__)

STAGE = "distill"
CODE_VERSION = 1
LOG_FILE = "training_log.jsonl"

_LOG_EVERY_S = 10.0


class DistillConfig(TrainingConfig):
    """Which draft, and how it is trained."""

    target: ModelConfig
    initialization: InitializationConfig = setting(PrunedConfig(num_layers=2))
    vocabulary_size: int | None = setting(
        None, gt=0, description="propose only the target's most frequent tokens; null: all"
    )

    @model_validator(mode="after")
    def _check_losses(self) -> DistillConfig:
        if self.vocabulary_size is not None:
            self.check_for_subset()
        return self


def distill_key(
    config: DistillConfig, store: ArtifactStore, *, inputs: Mapping[str, Artifact | str]
) -> ArtifactKey:
    """The key of what :func:`distill_draft` would build; ``inputs``: artifacts or fingerprints.

    Raises:
        ArtifactError: ``inputs`` is not exactly {"generate": ...}.
        ModelNotFoundError: a model is a path, and nothing is there.
    """
    if set(inputs) != {"generate"}:
        raise ArtifactError(
            f"distill reads one artifact, 'generate', but was given: {', '.join(inputs) or 'none'}"
        )
    revisions = {"target": model_revision(config.target)}
    if isinstance(config.initialization, ExistingConfig):
        revisions["initialization"] = model_revision(config.initialization.model)
    return store.key(
        STAGE, CODE_VERSION, config, inputs=fingerprints_of(inputs), revisions=revisions
    )


def distill_draft(
    config: DistillConfig,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact],
    rebuild: bool = False,
) -> Artifact:
    """Train a draft on what generate stored. Resumes what was killed; returns what is built.

    Raises:
        ArtifactError: ``inputs["generate"]`` is missing, of another stage or another target's.
        ConfigError: settings that do not fit the target or the answers.
        PairMismatchError: an existing draft that reads token ids differently from the target.
        TrainingError: nothing to train on, or a loss that is not a number.
    """
    key = distill_key(config, store, inputs=inputs)
    generated = inputs["generate"].expect("generate")
    check_same_target(
        generated,
        name="generate",
        reference=config.target.model,
        revision=key.parts["revisions"]["target"],
    )
    return store.get_or_build(
        key, lambda directory: _build(config, generated, directory), rebuild=rebuild
    )


def build_undistilled(
    config: DistillConfig, inputs: Mapping[str, Artifact] | None = None
) -> LoadedModel:
    """Return the draft as it is before training, what ``measure`` compares with.

    It follows from the config alone; ``inputs`` is accepted because every stage function has it.
    """
    return _initialize(config, load_target(config.target))


def _initialize(config: DistillConfig, target: LoadedModel) -> LoadedModel:
    draft = initialize(config.initialization, target, seed=config.seed)
    if (
        isinstance(config.initialization, ScratchConfig)
        and not config.train_embeddings
        and draft.shape.hidden_size != target.shape.hidden_size
    ):
        raise ConfigError(
            f"distill.train_embeddings is false, but a draft of width {draft.shape.hidden_size} "
            f"cannot take over the embedding of a target of width {target.shape.hidden_size}, and "
            f"its own is random. Set train_embeddings: true, or leave hidden_size out."
        )
    return draft


def _build(config: DistillConfig, generated: Artifact, directory: Path) -> dict[str, Any]:
    import torch

    started = time.perf_counter()
    target = load_target(config.target)
    draft = _initialize(config, target)
    num_tokens = min(len(target.tokenizer), target.shape.vocab_size, draft.shape.vocab_size)
    vocabulary = _vocabulary(config, generated, num_tokens, target)
    max_length = draft.shape.max_position_embeddings
    data = TrainingData(
        rows=read_rows(generated, "train", max_length=max_length),
        held_out_rows=read_rows(generated, "held_out", max_length=max_length),
        states=TargetStates(generated),
        token_ids_V=None if vocabulary is None else torch.tensor(vocabulary.token_ids),
    )
    logger.info(
        "training %s (%.1fM parameters) on %d answers",
        draft.resolved.reference,
        draft.shape.num_parameters / 1e6,
        len(data.rows),
    )
    target_head = head_of(target.model).first(num_tokens)
    del target  # only its head is needed from here on
    with _progress(config.max_steps) as on_step:
        result = train(
            draft.model,
            target_head=target_head,
            data=data,
            config=config,
            work_dir=directory / "work",
            on_step=on_step,
        )
    save_model(draft.model, draft.tokenizer, directory / "draft")
    if vocabulary is not None:
        write_vocabulary(directory, vocabulary)
    lines = "".join(json.dumps(record) + "\n" for record in result.log)
    atomic_write(directory / LOG_FILE, lines)
    metrics = _metrics(result, draft, vocabulary)
    metrics["wall_s"] = time.perf_counter() - started
    return metrics


def _vocabulary(
    config: DistillConfig, generated: Artifact, num_tokens: int, target: LoadedModel
) -> DraftVocabulary | None:
    if config.vocabulary_size is None:
        return None
    vocabulary = choose_vocabulary(
        generated, config.vocabulary_size, num_tokens=num_tokens, always=target.stop_token_ids
    )
    logger.info(
        "the draft proposes %d of %d tokens: %.2f%% of the target's output",
        len(vocabulary.token_ids),
        num_tokens,
        100 * vocabulary.coverage,
    )
    return vocabulary


def _metrics(
    result: TrainingResult, draft: LoadedModel, vocabulary: DraftVocabulary | None
) -> dict[str, Any]:
    return {
        "held_out_before": asdict(result.before),
        "held_out_after": asdict(result.best.score),
        "best_step": result.best.step,
        "num_steps": max(record["step"] for record in result.log),
        "num_tokens": result.num_tokens,
        "num_epochs": result.num_epochs,
        "num_parameters": draft.shape.num_parameters,
        "vocabulary_coverage": None if vocabulary is None else vocabulary.coverage,
        "train_s": result.seconds,
        "tokens_per_s": result.num_tokens / result.seconds if result.seconds else 0.0,
    }


@contextmanager
def _progress(max_steps: int) -> Iterator[OnStep]:
    """A bar on a terminal, else a line in the log every few seconds; evaluations always logged."""
    from rich.console import Console
    from rich.progress import Progress

    last = time.perf_counter()
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task("distill", total=max_steps)

    def on_step(step: int, record: dict[str, Any]) -> None:
        nonlocal last
        bar.update(task, completed=step)
        now = time.perf_counter()
        if (score := record.get("held_out")) is not None:
            logger.info(
                "step %d of %d: held-out acceptance %.3f, greedy agreement %.3f",
                step,
                max_steps,
                score["acceptance"],
                score["greedy_agreement"],
            )
            last = now
        elif now - last >= _LOG_EVERY_S:
            logger.info(
                "step %d of %d: %s %.4f", step, max_steps, record["loss_name"], record["loss"]
            )
            last = now

    with bar:
        yield on_step
