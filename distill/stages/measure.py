"""Measure: how often the target accepts the draft, what that is worth in time, whether to ship it.

Refuses to know how drafts are trained and how numbers are shown.

Payload (equal bytes for equal inputs):

``acceptance.json``
    ``cells``: one per draft, temperature and task (null: all tasks) with every rate and its 95%
    interval over prompts. ``differences``: distilled minus undistilled, paired by prompt.
    ``lossless``: greedy speculative answers against plain ones.
``records.parquet``
    one row per draft, temperature and prompt: the counts and sums the cells come from, and the
    token ids that were emitted.

Metrics (differ from run to run): ``timing``, see ``measure_timing``; ``verdict`` with ``ship``,
``reasons``, ``num_draft_tokens`` (the K to serve with) and ``num_draft_tokens_by_temperature`` (0
where plain decoding is faster).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import model_validator

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore
from distill.config import Config, setting
from distill.errors import ArtifactError, ConfigError
from distill.files import atomic_write
from distill.lineage import check_same_target, fingerprints_of
from distill.metrics import summary
from distill.metrics.summary import PromptRecord
from distill.metrics.verdict import DISTILLED, PROMPT_LOOKUP, UNDISTILLED, decide
from distill.models import LoadedModel, ModelConfig, load_draft, load_target, model_revision
from distill.stages.distill_draft import DistillConfig, build_undistilled, read_vocabulary
from distill.stages.measure_runs import Contestant, read_held_out
from distill.stages.measure_timing import TimingConfig, time_pair
from distill.stages.measure_units import Bench, Units, compare_greedy
from distill.vocab import check_pair

__all__ = ["CODE_VERSION", "MeasureConfig", "TimingConfig", "measure_acceptance", "measure_key"]

STAGE = "measure"
CODE_VERSION = 2
INPUTS = ("distill", "generate")


class MeasureConfig(Config):
    """What is measured, on how much, and what it takes to ship."""

    target: ModelConfig
    temperatures: tuple[float, ...] = setting((0.0, 1.0), min_length=1)
    num_draft_tokens: int = setting(4, ge=1, description="K of the acceptance runs")
    max_new_tokens: int = setting(96, ge=1)
    max_prompts_per_task: int | None = setting(
        None, ge=1, description="held-out prompts per task; null: all"
    )
    batch_size: int = setting(32, ge=1, description="prompts decoded together: the unit of resume")
    undistilled: bool = setting(
        True, description="also measure the draft as it was before training"
    )
    prompt_lookup: bool = setting(True, description="also measure drafting by copying")
    seed: int = setting(0, ge=0)
    min_speedup: float = setting(
        1.0, ge=0, description="ship only when the speedup exceeds this at every temperature"
    )
    timing: TimingConfig = TimingConfig()

    @model_validator(mode="after")
    def _check_temperatures(self) -> MeasureConfig:
        if len(set(self.temperatures)) < len(self.temperatures) or min(self.temperatures) < 0:
            raise ConfigError(
                f"temperatures {list(self.temperatures)}: each once, and none below 0."
            )
        return self


def measure_key(
    config: MeasureConfig, store: ArtifactStore, *, inputs: Mapping[str, Artifact | str]
) -> ArtifactKey:
    """The key of what :func:`measure_acceptance` would build.

    ``inputs`` are artifacts or their fingerprints.

    Raises:
        ArtifactError: ``inputs`` is not exactly {"generate": ..., "distill": ...}.
        ModelNotFoundError: the target is a path, and nothing is there.
    """
    if sorted(inputs) != list(INPUTS):
        raise ArtifactError(
            "measure reads two artifacts, 'generate' and 'distill', but was given: "
            f"{', '.join(inputs) or 'none'}."
        )
    fingerprints = fingerprints_of(inputs)
    revisions = {"target": model_revision(config.target)}
    return store.key(STAGE, CODE_VERSION, config, inputs=fingerprints, revisions=revisions)


def measure_acceptance(
    config: MeasureConfig,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact],
    rebuild: bool = False,
) -> Artifact:
    """Measure the distilled draft on held-out prompts. Resumes what was killed.

    Raises:
        ArtifactError: an input is missing, of another stage, or made with another target.
        CorpusError: no held-out prompt was answered.
        PairMismatchError: target and draft do not share a vocabulary.
    """
    key = measure_key(config, store, inputs=inputs)
    for name, artifact in inputs.items():
        artifact.expect(name)
        check_same_target(
            artifact,
            name=name,
            reference=config.target.model,
            revision=key.parts["revisions"]["target"],
        )
    return store.get_or_build(
        key, lambda directory: _build(config, inputs, directory), rebuild=rebuild
    )


def _build(
    config: MeasureConfig, inputs: Mapping[str, Artifact], directory: Path
) -> dict[str, Any]:
    started = time.perf_counter()
    prompts = read_held_out(
        inputs["generate"], config.temperatures, max_prompts_per_task=config.max_prompts_per_task
    )
    target = load_target(config.target)
    contestants = _contestants(config, inputs["distill"], target)
    bench = Bench(
        target=target,
        contestants=contestants,
        units=Units(directory / "work"),
        num_draft_tokens=config.num_draft_tokens,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    answers = bench.plain_answers(prompts, config.temperatures)
    records, emitted = bench.records(prompts, config.temperatures, answers)
    cells = summary.summarize(records, num_draft_tokens=config.num_draft_tokens, seed=config.seed)
    content: dict[str, Any] = {
        "schema_version": 1,
        "num_draft_tokens": config.num_draft_tokens,
        "max_new_tokens": config.max_new_tokens,
        "temperatures": list(config.temperatures),
        "drafts": [c.name for c in contestants],
        "num_prompts": len(prompts),
        "cells": cells,
        "differences": summary.compare(
            records, draft=DISTILLED, baseline=UNDISTILLED, seed=config.seed
        ),
        "lossless": compare_greedy(
            target, prompts, answers, records, emitted, max_new_tokens=config.max_new_tokens
        ),
    }
    _write_records(directory / "records.parquet", records, emitted)
    atomic_write(directory / "acceptance.json", json.dumps(content, indent=1) + "\n")
    acceptance_s = time.perf_counter() - started
    timing: dict[str, Any] = {}
    if config.timing.enabled:
        timing = time_pair(
            target,
            contestants,
            prompts,
            cells,
            temperatures=config.temperatures,
            config=config.timing,
            seed=config.seed,
        )
    return {
        "timing": timing,
        "verdict": decide(content["lossless"], timing, min_speedup=config.min_speedup),
        "num_units_resumed": bench.units.num_resumed,
        "acceptance_s": acceptance_s,
        "wall_s": time.perf_counter() - started,
    }


def _contestants(
    config: MeasureConfig, distilled: Artifact, target: LoadedModel
) -> list[Contestant]:
    # As serve loads it: another precision would be another draft, faster or slower, right or wrong.
    draft = load_draft(distilled, dtype=config.target.dtype, device=config.target.device)
    check_pair(target.tokenizer, target.shape, draft.tokenizer, draft.shape)
    vocabulary = read_vocabulary(distilled)
    # The same subset for both, so that what differs is the training and not the head.
    token_ids = None if vocabulary is None else vocabulary.token_ids
    contestants = [Contestant(DISTILLED, draft, token_ids)]
    if config.undistilled:
        # Fields outside the fingerprint cannot change the draft, so their defaults will do.
        settings = {**distilled.manifest.config, "target": config.target}
        undistilled = build_undistilled(DistillConfig.model_validate(settings))
        # The device alone: .to(dtype) would round the rotary frequencies, which stay float32.
        undistilled.model.to(draft.device)
        contestants.append(Contestant(UNDISTILLED, undistilled, token_ids))
    if config.prompt_lookup:
        contestants.append(Contestant(PROMPT_LOOKUP))
    return contestants


def _write_records(
    path: Path, records: Sequence[PromptRecord], emitted: Sequence[list[int]]
) -> None:
    rows = [
        {
            "draft": r.draft,
            "temperature": r.temperature,
            "prompt_id": r.prompt_id,
            "task": r.task,
            **r.counts,
            "num_positions": r.num_positions,
            **{f"analytic_{rule}": value for rule, value in r.acceptance_sums.items()},
            "token_ids": token_ids,
        }
        for r, token_ids in zip(records, emitted, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
