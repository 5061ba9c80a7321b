"""Estimate: what each stage of a run would cost in tokens, disk, memory and time, before it runs.

Refuses to load a weight; every number follows from shapes, settings and the stated hardware.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from distill.artifacts import ArtifactKey
from distill.corpus import is_local, read_corpus, stated_size
from distill.held_out import reporting_half
from distill.initialization import ExistingConfig, ShapeOf
from distill.models import ModelShape, read_shape
from distill.stages.distill_sources import needs_target
from distill.stages.estimate_table import size_text
from distill.stages.generate_size import (
    CHARACTERS_PER_TOKEN,
    TABLE_BYTES_PER_TOKEN,
    WRITTEN_BYTES_PER_TOKEN,
    AnswersSize,
    size_of_prompt,
    total,
)
from distill.stages.plan_shapes import (
    WEIGHT_BYTES,
    body_parameters,
    draft_shape,
    weight_bytes,
)
from distill.stages.run_config import HardwareConfig, RunConfig
from distill.target_store.config import bytes_per_token, kind_of

_STATE_BYTES = 2
LATER_ROUND = "distill, later round"
"""The estimate of the trainings that follow the first, on what the draft wrote itself."""

# float32 weights, gradients, two AdamW moments and the best weights so far.
_TRAINING_BYTES_PER_PARAMETER = 20
# A state is float32 weights and two moments (12 bytes), beside it lie the best weights (4); while
# one is replaced the old and the new of both are there.
_CHECKPOINT_BYTES_PER_PARAMETER = 32
# A prompt's length when it is not known before its tokenizer is loaded.
_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class StageEstimate:
    """Upper estimates of one stage; None where a model's shape is not known.

    ``num_tokens`` counts the tokens emitted (generate, measure) or trained on (distill).
    ``memory_bytes`` is of the device that computes: weights, gradients, keys and values.
    ``mapped_bytes`` is of main memory, for files that are mapped into it: the system drops pages it
    has no room for, and reads them again.
    """

    num_tokens: int
    disk_bytes: int | None
    memory_bytes: int | None
    duration_s: float | None
    note: str = ""
    mapped_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-able dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class _Prompts:
    num_prompts: int
    num_reported: int  # held out, and in the half that measure decodes
    answers: AnswersSize  # one sample for one sampling
    note: str
    num_written_tokens: int = 0  # by the target itself, as prompts


def estimate_run(config: RunConfig, shape_of: ShapeOf = read_shape) -> dict[str, StageEstimate]:
    """Estimate every stage from shapes alone; see ``estimate_of`` for the steps of a pipeline.

    Tokens are upper bounds: every answer is taken to reach ``max_new_tokens``. Time is the larger
    of arithmetic and weight traffic at ``hardware.utilization`` of the stated peaks. A stage that
    needs more than ``hardware.memory_bytes`` says so in its note.
    """
    target = shape_of(config.target)
    draft = draft_shape(config, target, shape_of)
    prompts = _prompts(config)
    found = {
        "generate": _generate(config, target, prompts),
        "distill": _distill(config, target, draft, prompts, shape_of),
        LATER_ROUND: _distill(_later_round(config), target, draft, prompts, shape_of),
        "rollouts": _rollouts(config, target, draft),
        "measure": _measure(config, target, draft, prompts),
        "export": _export(config, draft),
    }
    return {name: _with_warning(one, config.hardware) for name, one in found.items()}


def estimate_of(estimates: Mapping[str, StageEstimate], key: ArtifactKey) -> StageEstimate:
    """The estimate of one step of a pipeline: a training on rollouts has a length of its own."""
    is_later = key.stage == "distill" and "rollouts" in key.parts["inputs"]
    return estimates[LATER_ROUND if is_later else key.stage]


def _later_round(config: RunConfig) -> RunConfig:
    steps = {"max_steps": config.rollouts.steps_per_round}
    return config.model_copy(update={"distill": config.distill.model_copy(update=steps)})


def _with_warning(estimate: StageEstimate, hardware: HardwareConfig) -> StageEstimate:
    if estimate.memory_bytes is None or estimate.memory_bytes <= hardware.memory_bytes:
        return estimate
    warning = f"MORE than hardware.memory_bytes, {size_text(hardware.memory_bytes)}"
    return replace(estimate, note="; ".join(filter(None, (warning, estimate.note))))


def _prompts(config: RunConfig) -> _Prompts:
    corpus_config, max_new = config.generate.corpus, config.generate.max_new_tokens
    if not is_local(corpus_config):
        # Reading it would download it, or run the target; a plan must do neither.
        size = stated_size(corpus_config)
        if size is None:
            note = "size of the dataset unknown: set corpus.limit"
            return _Prompts(0, 0, AnswersSize(), note)
        held_out = math.ceil(size * corpus_config.held_out_fraction)
        held_out -= held_out // 2  # weights are chosen on the other half
        written = 0
        if corpus_config.kind == "self_synthesis":
            written = size * corpus_config.synthesis.max_new_tokens
        answers = AnswersSize(1, max_new, _PROMPT_TOKENS).times(size)
        return _Prompts(size, held_out, answers, "", written)
    prompts = read_corpus(corpus_config).prompts
    answers = total(
        size_of_prompt(prompt, len(prompt.first_text) // CHARACTERS_PER_TOKEN, max_new)
        for prompt in prompts
    )
    reported = reporting_half(p.prompt_id for p in prompts if p.split == "held_out")
    per_task = Counter(prompt.task for prompt in prompts if prompt.prompt_id in reported)
    most = config.measure.max_prompts_per_task
    num_reported = sum(count if most is None else min(count, most) for count in per_task.values())
    return _Prompts(len(prompts), num_reported, answers, "")


def _draft_weights(config: RunConfig, draft: ModelShape) -> int:
    """Bytes of the draft as it is saved: in its own dtype if it existed, else in the target's."""
    start = config.distill.initialization
    return weight_bytes(start.model if isinstance(start, ExistingConfig) else config.target, draft)


def _cache_bytes_per_token(shape: ModelShape) -> int:
    head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_dim * _STATE_BYTES


def _decode_s(
    shape: ModelShape, read_bytes: int, rows: int, num_tokens: int, hardware: HardwareConfig
) -> float:
    """Seconds for ``num_tokens`` decoded ``rows`` at a time: compute- or bandwidth-bound."""
    arithmetic = rows * 2 * shape.num_parameters / (hardware.peak_flops * hardware.utilization)
    traffic = read_bytes / (hardware.memory_bandwidth * hardware.utilization)
    return num_tokens / rows * max(arithmetic, traffic)


def _answers(config: RunConfig, prompts: _Prompts) -> AnswersSize:
    settings = config.generate
    return prompts.answers.times(len(settings.samplings) * settings.num_samples)


def _kept_bytes(config: RunConfig, target: ModelShape) -> int:
    return bytes_per_token(
        config.generate.target_store, hidden_size=target.hidden_size, vocab_size=target.vocab_size
    )


def _states_bytes(config: RunConfig, target: ModelShape, prompts: _Prompts) -> int:
    """The most that generate keeps of the target, and distill maps into memory."""
    return _answers(config, prompts).num_new_tokens * _kept_bytes(config, target)


def _scoring_flops(config: RunConfig, target: ModelShape, answers: AnswersSize) -> float:
    """A forward pass along prompt and answer, where the store keeps what only that gives."""
    if kind_of(config.generate.target_store) not in ("top_k", "sampled"):
        return 0.0
    return 2.0 * target.num_parameters * (answers.num_prompt_tokens + answers.num_new_tokens)


def _store_note(config: RunConfig, target: ModelShape, prompts: _Prompts) -> str:
    """What the target store costs, for the table."""
    kind = kind_of(config.generate.target_store)
    if kind == "none":
        return "target_store none: distill runs the target again"
    each = _kept_bytes(config, target)
    whole = size_text(_states_bytes(config, target, prompts))
    return f"target_store {kind}: up to {each:,} B a token, {whole}"


def _generate(config: RunConfig, shape: ModelShape | None, prompts: _Prompts) -> StageEstimate:
    settings = config.generate
    answers, written = _answers(config, prompts), prompts.num_written_tokens
    num_tokens = answers.num_new_tokens + written
    if shape is None:
        return StageEstimate(num_tokens, None, None, None, _unknown("target"))
    weights = weight_bytes(config.target, shape)
    context = settings.max_new_tokens + answers.num_prompt_tokens // max(1, answers.num_answers)
    cache = settings.batch_size * context * _cache_bytes_per_token(shape)
    flops = 2.0 * shape.num_parameters * answers.num_prompt_tokens
    flops += _scoring_flops(config, shape, answers)
    hardware = config.hardware
    return StageEstimate(
        num_tokens=num_tokens,
        disk_bytes=answers.disk_bytes(_kept_bytes(config, shape))
        + written * WRITTEN_BYTES_PER_TOKEN,
        memory_bytes=weights + cache,
        duration_s=flops / (hardware.peak_flops * hardware.utilization)
        + _decode_s(shape, weights, settings.batch_size, num_tokens, hardware),
        note="; ".join(filter(None, (prompts.note, _store_note(config, shape, prompts)))),
    )


def _distill(
    config: RunConfig,
    target: ModelShape | None,
    draft: ModelShape | None,
    prompts: _Prompts,
    shape_of: ShapeOf,
) -> StageEstimate:
    settings = config.distill
    num_tokens = settings.max_steps * settings.batch_tokens
    if target is None or draft is None:
        return StageEstimate(num_tokens, None, None, None, _unknown("draft"))
    head_rows = settings.vocabulary_size or draft.vocab_size
    body = body_parameters(draft)
    table = draft.vocab_size * draft.hidden_size
    num_tables = 1 if draft.tie_word_embeddings else 2
    num_trained = min(settings.trains_embedding + settings.trains_head, num_tables)
    trained = body + num_trained * table
    # The layers read prompts too, the heads only what carries loss.
    answers = prompts.answers
    read = 1.0 + answers.num_prompt_tokens / max(1, answers.num_new_tokens)
    ours = body * read + head_rows * draft.hidden_size
    # Forward and backward: 6 FLOP a weight; the target's head is one more product.
    flops = 6.0 * ours + 2.0 * head_rows * target.hidden_size
    kind = kind_of(config.generate.target_store)
    if kind == "none":
        flops += 2.0 * target.num_parameters * read
    reference, reference_bytes = _reference(config, draft, shape_of)
    if reference is None:
        return StageEstimate(num_tokens, None, None, None, _unknown("reference"))
    # Where tokens are chosen, draft and reference read the step once more, forward only.
    theirs = body_parameters(reference) * read + head_rows * reference.hidden_size
    flops += _selecting_share(config) * 2.0 * (ours + theirs)
    hardware = config.hardware
    whole = weight_bytes(config.target, target)
    head = target.vocab_size * target.hidden_size * WEIGHT_BYTES[config.target.dtype]
    training = (
        (whole if needs_target(settings, kind) else head)
        + reference_bytes
        + 4 * (draft.num_parameters - trained)
        + trained * _TRAINING_BYTES_PER_PARAMETER
    )
    return StageEstimate(
        num_tokens=num_tokens,
        disk_bytes=_draft_weights(config, draft) + trained * _CHECKPOINT_BYTES_PER_PARAMETER,
        # the draft starts from the whole target, which may leave afterwards
        memory_bytes=max(whole + _draft_weights(config, draft), training),
        duration_s=num_tokens * flops / (hardware.peak_flops * hardware.utilization),
        note=prompts.note,
        mapped_bytes=_states_bytes(config, target, prompts),
    )


def _selecting_share(config: RunConfig) -> float:
    """The share of a training's steps that choose tokens by a reference."""
    return sum(phase.fraction for phase in config.distill.phases if phase.keep_fraction < 1)


def _reference(
    config: RunConfig, draft: ModelShape, shape_of: ShapeOf
) -> tuple[ModelShape | None, int]:
    """The reference's shape and bytes: a model, or a copy of the draft as it starts.

    Bytes are 0 where nothing is chosen; the shape is None where a named model's is not known.
    """
    settings = config.distill
    if not settings.is_selecting:
        return draft, 0
    if settings.reference is None:
        return draft, _draft_weights(config, draft)
    shape = shape_of(settings.reference)
    return shape, 0 if shape is None else weight_bytes(settings.reference, shape)


def _rollouts(
    config: RunConfig, target: ModelShape | None, draft: ModelShape | None
) -> StageEstimate:
    """One round of the on-policy pipeline: the draft writes, the target reads it once."""
    settings, hardware = config.rollouts, config.hardware
    num_tokens = settings.num_prompts * settings.max_new_tokens
    if target is None or draft is None:
        return StageEstimate(num_tokens, None, None, None, _unknown("target or draft"))
    weights, drafts = weight_bytes(config.target, target), _draft_weights(config, draft)
    state_bytes = _STATE_BYTES * target.hidden_size + 4 + TABLE_BYTES_PER_TOKEN
    context = settings.max_new_tokens + _PROMPT_TOKENS
    flops = 2.0 * target.num_parameters * settings.num_prompts * context
    return StageEstimate(
        num_tokens=num_tokens,
        disk_bytes=num_tokens * state_bytes,
        memory_bytes=weights
        + drafts
        + settings.batch_size * context * _cache_bytes_per_token(draft),
        duration_s=flops / (hardware.peak_flops * hardware.utilization)
        + _decode_s(draft, drafts, settings.batch_size, num_tokens, hardware),
    )


def _measure(
    config: RunConfig, target: ModelShape | None, draft: ModelShape | None, prompts: _Prompts
) -> StageEstimate:
    settings = config.measure
    num_drafts = 1 + settings.undistilled + settings.prompt_lookup
    num_drafts += len(settings.early_exit) + len(settings.drafts)
    # Plain answers once, then one speculative run for each draft.
    runs = len(settings.temperatures) * (1 + num_drafts)
    num_tokens = prompts.num_reported * settings.max_new_tokens * runs
    timing = settings.timing
    timed = 0
    if timing.enabled:
        timed = timing.num_prompts * timing.max_new_tokens * timing.repeats
        timed *= len(settings.temperatures) * (1 + num_drafts)
    num_tokens += timed
    if target is None or draft is None:
        return StageEstimate(num_tokens, None, None, None, _unknown("target or draft"))
    weights = weight_bytes(config.target, target)
    hardware = config.hardware
    batched = _decode_s(target, weights, settings.batch_size, num_tokens - timed, hardware)
    return StageEstimate(
        num_tokens=num_tokens,
        disk_bytes=num_tokens * TABLE_BYTES_PER_TOKEN,
        memory_bytes=weights
        + _draft_weights(config, draft) * num_drafts
        + settings.batch_size * settings.max_new_tokens * _cache_bytes_per_token(target),
        duration_s=batched + _decode_s(target, weights, 1, timed, hardware),
        note=prompts.note,
    )


def _export(config: RunConfig, draft: ModelShape | None) -> StageEstimate:
    if draft is None:
        return StageEstimate(0, None, None, None, _unknown("draft"))
    weights = _draft_weights(config, draft)
    return StageEstimate(0, weights, 2 * weights, weights / config.hardware.memory_bandwidth)


def _unknown(which: str) -> str:
    return f"shape of the {which} unknown: its config.json cannot be read; set `shape:`"
