"""Distill: a draft is built, trained on the target's answers and saved with its best weights.

Refuses to know how answers are made, how the draft is measured and how it is served.

Payload:

``draft/``
    the draft as transformers loads it: config, safetensors in the dtype it started with (the
    target's, unless it is an existing model), tokenizer.
``draft_vocabulary.json`` (with ``vocabulary_size``)
    ``token_ids``, the ids the draft may propose, ascending, and ``coverage``, their share of the
    target's own output tokens. Outside them its probability is zero by decree, not by its head.
``importance_samples.json`` (where layers or widths were chosen by importance)
    ``token_ids``, the rows of the target's answers it was measured on.
``training_log.jsonl``
    one line an optimiser step (``loss``, ``grad_norm``, ...) and one a held-out evaluation
    (``held_out``, and ``decoded`` where a real decode was due), from step 0, the undistilled draft.
    No times: those are in the metrics.

Under a launcher every process trains; the first alone writes. What follows a run while it trains
(``trackers``) is beside the artifacts, in ``logs/``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import model_validator

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore, atomic_write
from distill.config import setting
from distill.errors import ArtifactError
from distill.initialization import (
    ExistingConfig,
    InitializationConfig,
    PrunedConfig,
    Samples,
    ScratchConfig,
    Start,
    read_samples,
    start_draft,
    stored_samples,
    write_samples,
)
from distill.lineage import check_same_quantization, check_same_target, fingerprints_of
from distill.losses.head import head_of
from distill.models import (
    DraftVocabulary,
    LoadedModel,
    ModelConfig,
    load_draft,
    load_target,
    model_revision,
    save_model,
    write_vocabulary,
)
from distill.models.quantization import quantize_model
from distill.stages.distill_checks import check_before_building, check_tables
from distill.stages.distill_run import Asked, Live, run_training
from distill.stages.distill_sources import (
    check_heads,
    check_losses,
    load_reference,
    needs_target,
    open_sources,
)
from distill.target_store.files import kind_in
from distill.training.config import LossPhase, TrainingConfig
from distill.training.data import read_rows
from distill.training.held_out_rows import read_selection_rows
from distill.training.mixture import check_mixable, mix_rollouts
from distill.training.processes import device_of_rank
from distill.training.run import TrainingData, TrainingResult
from distill.training.trackers import require_package
from distill.training.trl_engine import check_for_trl, check_settings_for_trl
from distill.training.vocabulary import choose_vocabulary

__all__ = [
    "CODE_VERSION",
    "DistillConfig",
    "ExistingConfig",
    "LossPhase",
    "PrunedConfig",
    "ScratchConfig",
    "build_undistilled",
    "check_before_building",
    "distill_draft",
    "distill_key",
]

logger = logging.getLogger(__name__)

STAGE = "distill"
CODE_VERSION = 3
LOG_FILE = "training_log.jsonl"
LOGS_DIR = "logs"


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
        if self.engine == "trl":
            check_settings_for_trl(self, vocabulary_size=self.vocabulary_size)
        return self


def distill_key(
    config: DistillConfig, store: ArtifactStore, *, inputs: Mapping[str, Artifact | str]
) -> ArtifactKey:
    """The key of what :func:`distill_draft` would build; ``inputs``: artifacts or fingerprints.

    Raises:
        ArtifactError: ``inputs`` has no "generate", or what is neither "rollouts" nor "distill".
        ModelNotFoundError: a model is a path, and nothing is there.
    """
    if "generate" not in inputs or not set(inputs) <= {"generate", "rollouts", "distill"}:
        raise ArtifactError(
            f"distill reads 'generate', and may read 'rollouts' and an earlier 'distill', but was "
            f"given: {', '.join(inputs) or 'none'}"
        )
    revisions = {"target": model_revision(config.target)}
    if isinstance(config.initialization, ExistingConfig):
        revisions["initialization"] = model_revision(config.initialization.model)
    if config.reference is not None:
        revisions["reference"] = model_revision(config.reference)
    used = config.as_used(has_rollouts="rollouts" in inputs)
    return store.key(STAGE, CODE_VERSION, used, inputs=fingerprints_of(inputs), revisions=revisions)


def distill_draft(
    config: DistillConfig,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact],
    rebuild: bool = False,
) -> Artifact:
    """Train a draft on what generate stored. Resumes what was killed; returns what is built.

    With ``inputs["rollouts"]``, text the draft wrote makes up ``rollout_fraction`` of the training
    text; with ``inputs["distill"]`` the draft starts as that training left it.

    Raises:
        ArtifactError: ``inputs["generate"]`` is missing, of another stage or another target's, or
            text in ``inputs`` was scored with the target's weights held in another way.
        ConfigError: settings that do not fit the target or the answers, such as a loss that
            cannot be taken from what generate kept of the target.
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
    check_same_quantization(generated, name="generate", quantize=config.target.quantize)
    check_losses(config, generated)
    for name in set(inputs) - {"generate"}:
        check_same_target(
            inputs[name].expect(name),
            name=name,
            reference=config.target.model,
            revision=key.parts["revisions"]["target"],
        )
    if "rollouts" in inputs:
        check_same_quantization(
            inputs["rollouts"], name="rollouts", quantize=config.target.quantize
        )
        check_mixable(generated)
    if config.engine == "trl":
        check_for_trl(
            config, vocabulary_size=config.vocabulary_size, has_rollouts="rollouts" in inputs
        )
    for name in config.trackers:
        require_package(name)
    device = device_of_rank(config.target.device)
    config = config.model_copy(
        update={"target": config.target.model_copy(update={"device": device})}
    )
    live = Live(store.root / LOGS_DIR, f"{STAGE}-{key.fingerprint[:12]}")
    return store.get_or_build(
        key,
        lambda directory: _build(config, inputs, directory, live),
        rebuild=rebuild,
        every_rank=True,
    )


def build_undistilled(
    config: DistillConfig, inputs: Mapping[str, Artifact] | None = None
) -> LoadedModel:
    """Return the draft as it is before training, what ``measure`` compares with.

    It follows from the config alone, and where importance was measured, from the rows kept in
    ``inputs["distill"]``.
    """
    samples = stored_samples(inputs["distill"]) if inputs and "distill" in inputs else []
    target = load_target(config.target.unquantized)
    return _initialize(config, target, samples).draft


def _start(
    config: DistillConfig, target: LoadedModel, samples: Samples, before: Artifact | None
) -> Start:
    """The draft as the config begins it, or as an earlier training left it."""
    if before is None:
        return _initialize(config, target, samples)
    device = str(target.device)
    draft = load_draft(before, device=device)
    return Start(draft, {"kind": "distill", "fingerprint": before.fingerprint})


def _initialize(config: DistillConfig, target: LoadedModel, samples: Samples) -> Start:
    check_tables(config, target.shape)
    return start_draft(config.initialization, target, seed=config.seed, samples=samples)


@dataclass(frozen=True)
class _Prepared:
    asked: Asked
    vocabulary: DraftVocabulary | None
    samples: list[list[int]]
    report: Mapping[str, Any]


def _prepare(config: DistillConfig, inputs: Mapping[str, Artifact], live: Live) -> _Prepared:
    """All a training needs; the target itself only where something still runs it."""
    import torch

    generated = inputs["generate"]
    target = load_target(config.target.unquantized)  # a draft starts from what was not rounded
    samples: list[list[int]] = []
    if num_sample_tokens := config.initialization.num_sample_tokens:
        samples = read_samples(generated, num_sample_tokens)
    start = _start(config, target, samples, inputs.get("distill"))
    draft = start.draft
    logger.info("started from: %s", json.dumps(start.report))
    quantize_model(target.model, config.target.quantize)  # and learns from what answered
    num_tokens = min(len(target.tokenizer), target.shape.vocab_size, draft.shape.vocab_size)
    vocabulary = _vocabulary(config, generated, num_tokens, target)
    max_length = draft.shape.max_position_embeddings
    target_head = head_of(target.model).first(num_tokens)
    check_heads(config, head_of(draft.model).first(num_tokens), target_head)
    source, held_out_source = open_sources(generated, target, target_head, vocabulary)
    rows = read_rows(generated, "train", max_length=max_length)
    if "rollouts" in inputs:
        rows, source = mix_rollouts(
            rows,
            source,
            inputs["rollouts"],
            fraction=config.rollout_fraction,
            max_length=max_length,
            seed=int(inputs["rollouts"].fingerprint[:8], 16),  # another sample every round
        )
    data = TrainingData(
        rows=rows,
        held_out_rows=read_selection_rows(generated, max_length=max_length),
        source=source,
        held_out_source=held_out_source,
        token_ids_V=None if vocabulary is None else torch.tensor(vocabulary.token_ids),
    )
    is_run = needs_target(config, kind_in(generated))
    return _Prepared(
        Asked(
            config=config,
            target=target if is_run else None,
            draft=draft,
            target_head=target_head,
            data=data,
            live=live,
            reference=load_reference(config.reference, target),
        ),
        vocabulary=vocabulary,
        samples=samples,
        report=start.report,
    )


def _build(
    config: DistillConfig, inputs: Mapping[str, Artifact], directory: Path, live: Live
) -> dict[str, Any]:
    started = time.perf_counter()
    prepared = _prepare(config, inputs, live)
    draft, vocabulary = prepared.asked.draft, prepared.vocabulary
    logger.info(
        "training %s (%.1fM parameters) on %d answers",
        draft.resolved.reference,
        draft.shape.num_parameters / 1e6,
        len(prepared.asked.data.rows),
    )
    result = run_training(prepared.asked, work_dir=directory / "work")
    if not result.is_main:
        return {}
    save_model(draft.model, draft.tokenizer, directory / "draft")
    if vocabulary is not None:
        write_vocabulary(directory, vocabulary)
    if prepared.samples:
        write_samples(directory, prepared.samples)
    lines = "".join(json.dumps(record) + "\n" for record in result.log)
    atomic_write(directory / LOG_FILE, lines)
    metrics = _metrics(result, draft, vocabulary)
    metrics["initialization"] = prepared.report
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
        "is_stopped_early": result.is_stopped_early,
        "num_steps": max(record["step"] for record in result.log),
        "num_tokens": result.num_tokens,
        "num_epochs": result.num_epochs,
        "num_parameters": draft.shape.num_parameters,
        "vocabulary_coverage": None if vocabulary is None else vocabulary.coverage,
        "train_s": result.seconds,
        "tokens_per_s": result.num_tokens / result.seconds if result.seconds else 0.0,
    }
