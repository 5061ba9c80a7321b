"""Estimate: what each stage of a run would cost in tokens, disk, memory and time, before it runs.

Refuses to load a weight; every number follows from shapes, settings and the stated hardware.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from distill.initialization import ExistingConfig, PrunedConfig
from distill.models import ModelConfig, ModelShape, read_shape
from distill.stages.corpus import read_corpus
from distill.stages.run_config import HardwareConfig, RunConfig

if TYPE_CHECKING:
    from rich.table import Table

_WEIGHT_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
_STATE_BYTES = 2
# float32 weights, gradients, two AdamW moments and the best weights so far.
_TRAINING_BYTES_PER_PARAMETER = 20
# A state is float32 weights and two moments (12 bytes), beside it lie the best weights (4); while
# one is replaced the old and the new of both are there.
_CHECKPOINT_BYTES_PER_PARAMETER = 32
# Beside a token's hidden state: its log-sum-exp, ids, mask and parquet overhead.
_TABLE_BYTES_PER_TOKEN = 16
# A prompt's length when it is not known before its tokenizer is loaded.
_PROMPT_TOKENS = 128
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class StageEstimate:
    """Upper estimates of one stage; None where a model's shape is not known.

    ``num_tokens`` counts the tokens emitted (generate, measure) or trained on (distill).
    """

    num_tokens: int
    disk_bytes: int | None
    memory_bytes: int | None
    duration_s: float | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-able dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class _Prompts:
    num_prompts: int
    num_held_out: int
    mean_tokens: int
    note: str


def estimate_run(config: RunConfig) -> dict[str, StageEstimate]:
    """Estimate every stage from shapes alone.

    Tokens are upper bounds: every answer is taken to reach ``max_new_tokens``. Time is the larger
    of arithmetic and weight traffic at ``hardware.utilization`` of the stated peaks.
    """
    target = read_shape(config.target)
    draft = draft_shape(config, target)
    prompts = _prompts(config)
    return {
        "generate": _generate(config, target, prompts),
        "distill": _distill(config, target, draft, prompts),
        "measure": _measure(config, target, draft, prompts),
        "export": _export(config, draft),
    }


def draft_shape(config: RunConfig, target: ModelShape | None) -> ModelShape | None:
    """The shape the draft will have, or None where it follows from an unknown one."""
    start = config.distill.initialization
    if isinstance(start, ExistingConfig):
        return read_shape(start.model)
    if target is None:
        return None
    if isinstance(start, PrunedConfig):
        layers = start.chosen_layers(target.num_hidden_layers)
        return target.model_copy(update={"num_hidden_layers": len(layers)})
    return start.shape_from(target)


def _prompts(config: RunConfig) -> _Prompts:
    corpus_config = config.generate.corpus
    if corpus_config.kind == "datasets":
        # Reading it would download it; a plan must stay offline.
        if corpus_config.limit is None:
            return _Prompts(0, 0, _PROMPT_TOKENS, "size of the dataset unknown: set corpus.limit")
        held_out = math.ceil(corpus_config.limit * corpus_config.held_out_fraction)
        return _Prompts(corpus_config.limit, held_out, _PROMPT_TOKENS, "")
    prompts = read_corpus(corpus_config).prompts
    characters = sum(len(prompt.text) for prompt in prompts)
    mean = characters // max(1, len(prompts)) // _CHARACTERS_PER_TOKEN
    per_task = Counter(prompt.task for prompt in prompts if prompt.split == "held_out")
    most = config.measure.max_prompts_per_task
    num_held_out = sum(count if most is None else min(count, most) for count in per_task.values())
    return _Prompts(len(prompts), num_held_out, mean, "")


def _weights(config: ModelConfig, shape: ModelShape) -> int:
    return shape.num_parameters * _WEIGHT_BYTES[config.dtype]


def _draft_weights(config: RunConfig, draft: ModelShape) -> int:
    """Bytes of the draft as it is saved: in its own dtype if it existed, else in the target's."""
    start = config.distill.initialization
    return _weights(start.model if isinstance(start, ExistingConfig) else config.target, draft)


def _cache_bytes_per_token(shape: ModelShape) -> int:
    head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_dim * _STATE_BYTES


def _decode_s(
    shape: ModelShape, weight_bytes: int, rows: int, num_tokens: int, hardware: HardwareConfig
) -> float:
    """Seconds for ``num_tokens`` decoded ``rows`` at a time: compute- or bandwidth-bound."""
    arithmetic = rows * 2 * shape.num_parameters / (hardware.peak_flops * hardware.utilization)
    traffic = weight_bytes / (hardware.memory_bandwidth * hardware.utilization)
    return num_tokens / rows * max(arithmetic, traffic)


def _num_answers(config: RunConfig, prompts: _Prompts) -> int:
    settings = config.generate
    return prompts.num_prompts * len(settings.samplings) * settings.num_samples


def _states_bytes(config: RunConfig, target: ModelShape, prompts: _Prompts) -> int:
    """The target's final hidden states that generate stores and distill maps into memory."""
    if config.generate.target_store != "final_hidden":
        return 0
    num_tokens = _num_answers(config, prompts) * config.generate.max_new_tokens
    return num_tokens * target.hidden_size * _STATE_BYTES


def _generate(config: RunConfig, shape: ModelShape | None, prompts: _Prompts) -> StageEstimate:
    settings = config.generate
    answers = _num_answers(config, prompts)
    num_tokens = answers * settings.max_new_tokens
    if shape is None:
        return StageEstimate(num_tokens, None, None, None, _unknown("target"))
    weights = _weights(config.target, shape)
    context = settings.max_new_tokens + prompts.mean_tokens
    cache = settings.batch_size * context * _cache_bytes_per_token(shape)
    prefill_flops = 2.0 * shape.num_parameters * answers * prompts.mean_tokens
    hardware = config.hardware
    return StageEstimate(
        num_tokens=num_tokens,
        disk_bytes=_states_bytes(config, shape, prompts) + num_tokens * _TABLE_BYTES_PER_TOKEN,
        memory_bytes=weights + cache,
        duration_s=prefill_flops / (hardware.peak_flops * hardware.utilization)
        + _decode_s(shape, weights, settings.batch_size, num_tokens, hardware),
        note=prompts.note,
    )


def _distill(
    config: RunConfig, target: ModelShape | None, draft: ModelShape | None, prompts: _Prompts
) -> StageEstimate:
    settings = config.distill
    num_tokens = settings.max_steps * settings.batch_tokens
    if target is None or draft is None:
        return StageEstimate(num_tokens, None, None, None, _unknown("draft"))
    head_rows = settings.vocabulary_size or draft.vocab_size
    tables = draft.vocab_size * draft.hidden_size * (1 if draft.tie_word_embeddings else 2)
    body = draft.num_parameters - tables
    trained = draft.num_parameters if settings.train_embeddings else body
    # Forward and backward: 6 FLOP a weight; the target's head is one more product.
    flops = 6.0 * (body + head_rows * draft.hidden_size) + 2.0 * head_rows * target.hidden_size
    hardware = config.hardware
    return StageEstimate(
        num_tokens=num_tokens,
        disk_bytes=_draft_weights(config, draft) + trained * _CHECKPOINT_BYTES_PER_PARAMETER,
        memory_bytes=_weights(config.target, target)
        + 4 * (draft.num_parameters - trained)
        + trained * _TRAINING_BYTES_PER_PARAMETER
        + _states_bytes(config, target, prompts),
        duration_s=num_tokens * flops / (hardware.peak_flops * hardware.utilization),
        note=prompts.note,
    )


def _measure(
    config: RunConfig, target: ModelShape | None, draft: ModelShape | None, prompts: _Prompts
) -> StageEstimate:
    settings = config.measure
    num_drafts = 1 + settings.undistilled + settings.prompt_lookup
    # Plain answers once, then one speculative run for each draft.
    runs = len(settings.temperatures) * (1 + num_drafts)
    num_tokens = prompts.num_held_out * settings.max_new_tokens * runs
    timing = settings.timing
    timed = 0
    if timing.enabled:
        timed = timing.num_prompts * timing.max_new_tokens * timing.repeats
        timed *= len(settings.temperatures) * (1 + num_drafts)
    num_tokens += timed
    if target is None or draft is None:
        return StageEstimate(num_tokens, None, None, None, _unknown("target or draft"))
    weights = _weights(config.target, target)
    hardware = config.hardware
    batched = _decode_s(target, weights, settings.batch_size, num_tokens - timed, hardware)
    return StageEstimate(
        num_tokens=num_tokens,
        disk_bytes=num_tokens * _TABLE_BYTES_PER_TOKEN,
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


def estimate_table(config: RunConfig, rows: Sequence[Mapping[str, Any]]) -> Table:
    """The plan as a table for the terminal: one row a stage, then what it adds up to."""
    from rich.table import Table

    table = Table(title=f"plan of {config.name} on: {config.hardware.name}", title_justify="left")
    for column in ("stage", "fingerprint", "state", "tokens", "disk", "memory", "time", "note"):
        is_number = column in ("tokens", "disk", "memory", "time")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=column != "note")
    for row in rows:
        table.add_row(
            row["stage"],
            row["fingerprint"][:12] + ("?" if row["is_provisional"] else ""),
            row["state"],
            f"{row['num_tokens']:,}",
            _size(row["disk_bytes"]),
            _size(row["memory_bytes"]),
            _time(row["duration_s"]),
            row["note"] or row["miss"] or "",
        )
    todo = [row for row in rows if row["state"] != "cached"]
    doubt = (
        "; ?: not known before a model, a dataset or a measurement is at hand, so it will change"
    )
    table.caption = (
        f"to do: {sum(row['num_tokens'] for row in todo):,} tokens, "
        f"{_size(_total(todo, 'disk_bytes'))} of disk, {_time(_total(todo, 'duration_s'))}; "
        "upper estimates, from shapes and the config's `hardware`"
        + (doubt if any(row["is_provisional"] for row in rows) else "")
    )
    return table


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows]
    return None if any(value is None for value in values) else sum(values)


def _size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "?"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.1f} min"


__all__ = ["StageEstimate", "draft_shape", "estimate_run", "estimate_table"]
