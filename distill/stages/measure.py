"""Measure: how often the target accepts the draft, what that is worth in time, whether to ship it.

Refuses to know how drafts are trained and how numbers are shown.

Payload (equal bytes for equal inputs); every number is defined in docs/definitions.md:

``acceptance.json``
    ``num_skipped``: prompts left out because the target has no room to answer them. ``cells``: one
    per draft, temperature and task (null: all tasks) with every rate and its 95% interval over
    prompts. ``primary``: the draft the verdict is about. ``differences``: it minus ``baseline``,
    paired by prompt. ``lossless``: greedy answers against plain ones, and ``laws``, tests of
    sampled tokens against the target's law. ``self_tests``: what must come out, and whether it did.
    ``diagnosis``: where acceptance is lost. ``examples``: answers token by token.
``records.parquet``
    one row per draft, temperature and prompt: the counts and sums the cells come from, and the
    token ids that were emitted.
``positions.parquet``
    one row per draft, temperature and prompt: the target's text, and what each position says.

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

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore
from distill.corpus import read_corpus
from distill.errors import ArtifactError
from distill.files import atomic_write
from distill.lineage import check_same_quantization, check_same_target, fingerprints_of
from distill.metrics import self_tests, summary
from distill.metrics.summary import PromptRecord
from distill.metrics.verdict import DISTILLED, UNDISTILLED, decide
from distill.models import LoadedModel, load_draft, load_target, model_revision, read_shape
from distill.stages.distill_draft import DistillConfig, build_undistilled
from distill.stages.measure_audit import Answers, Audited, compare_greedy
from distill.stages.measure_config import GIVEN_DRAFT, GateConfig, MeasureConfig, TimingConfig
from distill.stages.measure_diagnosis import diagnose_draft, examples
from distill.stages.measure_pair import beside, check_lengths, corpus_prompts, load_contestant
from distill.stages.measure_runs import Contestant, HeldOutPrompt, read_held_out
from distill.stages.measure_sizes import check_before_measuring
from distill.stages.measure_timing import check_timed, time_pair
from distill.stages.measure_units import Bench, Scored, Units
from distill.vocab import check_pair

__all__ = [
    "CODE_VERSION",
    "GateConfig",
    "MeasureConfig",
    "TimingConfig",
    "check_before_measuring",
    "measure_acceptance",
    "measure_key",
]

STAGE = "measure"
CODE_VERSION = 6
INPUTS = ("distill", "generate")
SCHEMA_VERSION = 2


def measure_key(
    config: MeasureConfig, store: ArtifactStore, *, inputs: Mapping[str, Artifact | str]
) -> ArtifactKey:
    """The key of what :func:`measure_acceptance` would build.

    ``inputs`` are artifacts or their fingerprints: "generate" and "distill", or none for a pair
    that was not trained here (``config.draft``).

    Raises:
        ArtifactError: ``inputs`` is not exactly what this config reads.
        CorpusError: ``config.corpus`` cannot be read.
        ModelNotFoundError: a model is a path, and nothing is there.
    """
    expected = [] if config.draft is not None else list(INPUTS)
    if sorted(inputs) != expected:
        wanted = "two artifacts, 'generate' and 'distill'"
        if not expected:
            wanted = (
                "no artifact, because measure.draft names a draft that exists (to measure one that "
                "was trained here, remove measure.draft and measure.corpus)"
            )
        raise ArtifactError(
            f"measure reads {wanted}, but was given: {', '.join(inputs) or 'none'}."
        )
    fingerprints = fingerprints_of(inputs)
    revisions = {"target": model_revision(config.target)}
    models = dict(config.drafts)
    if config.draft is not None and config.corpus is not None:
        models[GIVEN_DRAFT] = config.draft
        revisions["corpus"] = f"sha256:{read_corpus(config.corpus).sha256}"
    revisions |= {f"draft/{name}": model_revision(model) for name, model in models.items()}
    return store.key(STAGE, CODE_VERSION, config, inputs=fingerprints, revisions=revisions)


def measure_acceptance(
    config: MeasureConfig,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact],
    rebuild: bool = False,
) -> Artifact:
    """Measure a draft on prompts that neither its training nor its selection has seen.

    Resumes what was killed. ``inputs``: "generate" and "distill"; none when ``config.draft`` names
    a draft that was not trained here.

    Raises:
        ArtifactError: an input is missing, of another stage, or made with another target.
        ConfigError: the settings ask for what the target's sizes do not allow.
        ContextLengthError: the target's context has room for no prompt and an answer.
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
    if "generate" in inputs:
        check_same_quantization(
            inputs["generate"], name="generate", quantize=config.target.quantize
        )
    return store.get_or_build(
        key, lambda directory: _build(config, inputs, directory), rebuild=rebuild
    )


def _build(
    config: MeasureConfig, inputs: Mapping[str, Artifact], directory: Path
) -> dict[str, Any]:
    started = time.perf_counter()
    check_before_measuring(config, read_shape(config.target))
    askable = _prompts(config, inputs)
    target = load_target(config.target)
    prompts = check_lengths(askable, target, config.max_new_tokens)
    timed = check_timed(prompts, target, config.timing)
    contestants = _contestants(config, inputs, target)
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
    scored = bench.scored(prompts, config.temperatures, answers)
    records, emitted = bench.records(prompts, config.temperatures, scored)
    content = _content(config, bench, prompts, answers, scored, records, emitted)
    content["num_skipped"] = len(askable) - len(prompts)
    _write_records(directory / "records.parquet", records, emitted)
    _write_positions(directory / "positions.parquet", prompts, answers, scored)
    text = json.dumps(content, indent=1, allow_nan=False)
    atomic_write(directory / "acceptance.json", text + "\n")
    acceptance_s = time.perf_counter() - started
    timing: dict[str, Any] = {}
    if config.timing.enabled:
        timing = time_pair(
            target,
            contestants,
            timed,
            content["cells"],
            temperatures=config.temperatures,
            config=config.timing,
            seed=config.seed,
        )
    verdict = decide(
        content["lossless"],
        timing,
        draft=config.primary,
        faults=self_tests.failures(content["self_tests"]),
    )
    return {
        "timing": timing,
        "verdict": verdict,
        "num_units_resumed": bench.units.num_resumed,
        "acceptance_s": acceptance_s,
        "wall_s": time.perf_counter() - started,
    }


def _content(
    config: MeasureConfig,
    bench: Bench,
    prompts: Sequence[HeldOutPrompt],
    answers: Answers,
    scored: Scored,
    records: Sequence[PromptRecord],
    emitted: Sequence[list[int]],
) -> dict[str, Any]:
    """What acceptance.json holds."""
    differences = []
    if config.baseline is not None:
        differences = summary.compare(
            records, draft=config.primary, baseline=config.baseline, seed=config.seed
        )
    greedy = compare_greedy(
        bench.target,
        prompts,
        answers,
        records,
        emitted,
        draft=config.primary,
        decoded=Audited(config.num_draft_tokens, config.max_new_tokens, config.batch_size),
    )
    laws = bench.laws(prompts, config.temperatures, config.law_samples)
    return {
        "schema_version": SCHEMA_VERSION,
        "num_draft_tokens": config.num_draft_tokens,
        "max_new_tokens": config.max_new_tokens,
        "temperatures": list(config.temperatures),
        "drafts": [c.name for c in bench.contestants],
        "primary": config.primary,
        "baseline": config.baseline,
        "num_prompts": len(prompts),
        "cells": summary.summarize(
            records, num_draft_tokens=config.num_draft_tokens, seed=config.seed
        ),
        "differences": differences,
        "lossless": greedy | {"laws": laws},
        "self_tests": bench.self_tests(prompts, config.temperatures, answers, scored, records),
        "diagnosis": diagnose_draft(bench, prompts, config.temperatures, answers, scored),
        "examples": examples(bench, prompts, config.temperatures, answers, scored),
    }


def _prompts(config: MeasureConfig, inputs: Mapping[str, Artifact]) -> list[HeldOutPrompt]:
    most = config.max_prompts_per_task
    if config.corpus is not None:
        return corpus_prompts(config.corpus, config.target, max_prompts_per_task=most)
    return read_held_out(
        inputs["generate"],
        config.temperatures,
        max_prompts_per_task=most,
        max_new_tokens=config.max_new_tokens,
    )


def _contestants(
    config: MeasureConfig, inputs: Mapping[str, Artifact], target: LoadedModel
) -> list[Contestant]:
    """The primary draft first, then what it is measured beside."""
    if config.draft is not None:
        given = load_contestant(GIVEN_DRAFT, config.draft, config.target, target)
        return [given, *beside(config, target)]
    distilled = inputs["distill"]
    # As serve loads it: another precision would be another draft, faster or slower, right or wrong.
    draft = load_draft(distilled, dtype=config.target.dtype, device=config.target.device)
    check_pair(target.tokenizer, target.shape, draft.tokenizer, draft.shape)
    contestants = [Contestant(DISTILLED, draft)]
    if config.undistilled:
        # Fields outside the fingerprint cannot change the draft, so their defaults will do.
        settings = {**distilled.manifest.config, "target": config.target}
        undistilled = build_undistilled(DistillConfig.model_validate(settings), inputs)
        # The device alone: .to(dtype) would round the rotary frequencies, which stay float32.
        undistilled.model.to(draft.device)
        # The same subset for both, so that what differs is the training and not the head.
        contestants.append(Contestant(UNDISTILLED, undistilled, draft.vocabulary_token_ids))
    return [*contestants, *beside(config, target)]


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
            "num_draftable_calls": r.num_draftable_calls,
            "num_positions": r.num_positions,
            **{f"analytic_{rule}": value for rule, value in r.acceptance_sums.items()},
            "token_ids": token_ids,
        }
        for r, token_ids in zip(records, emitted, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")


def _write_positions(
    path: Path, prompts: Sequence[HeldOutPrompt], answers: Answers, scored: Scored
) -> None:
    tasks = {prompt.prompt_id: prompt.task for prompt in prompts}
    rows = [
        {
            "draft": draft,
            "temperature": temperature,
            "prompt_id": prompt_id,
            "task": tasks[prompt_id],
            "token_ids": answers[temperature, prompt_id],
            "entropy": found["target"]["entropy"],
            **one["columns"],
        }
        for (temperature, prompt_id), found in scored.items()
        for draft, one in found["drafts"].items()
        if one["columns"]
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
