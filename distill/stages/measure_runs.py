"""Owns what measure runs on: held-out prompts, the drafts that are compared, and their decoding.

Refuses to know tables, files, clocks and the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from distill.artifacts import Artifact
from distill.backends.base import stable_seed
from distill.drafters.base import Drafter
from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.early_exit import EarlyExitDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.errors import CorpusError
from distill.held_out import answered_held_out, reporting_half
from distill.models import LoadedModel
from distill.runtime import lossless
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult, RowUpdate
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig

TIE_ULPS = lossless.TIE_ULPS


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt the draft was not trained on, and the target's answers to it by temperature."""

    prompt_id: str
    task: str
    token_ids: tuple[int, ...]
    answers: Mapping[float, tuple[int, ...]]


@dataclass(frozen=True)
class Contestant:
    """A draft to measure.

    ``model`` is None for one without a model of its own: ``num_layers`` of the target (early exit),
    or a lookup in the text so far. ``vocabulary_token_ids`` are the model's own unless given.
    """

    name: str
    model: LoadedModel | None = None
    vocabulary_token_ids: tuple[int, ...] | None = None
    num_layers: int | None = None

    def __post_init__(self) -> None:
        if self.vocabulary_token_ids is None and self.model is not None:
            object.__setattr__(self, "vocabulary_token_ids", self.model.vocabulary_token_ids)

    @property
    def is_lookup(self) -> bool:
        """Whether it copies, and computes nothing."""
        return self.model is None and self.num_layers is None

    def make_drafter(self) -> Drafter:
        """A drafter with no rows: each engine has its own."""
        if self.num_layers is not None:
            return EarlyExitDrafter(num_layers=self.num_layers)
        if self.model is None:
            return PromptLookupDrafter()
        return CausalLMDrafter.of(self.model, vocabulary_token_ids=self.vocabulary_token_ids)


@dataclass
class CountedResult(DecodeResult):
    """An answer, and how many of its target calls had room for a draft.

    A call on the last token of the budget has none: that token is the target's own.
    """

    num_draftable_calls: int = 0


def read_held_out(
    generate: Artifact,
    temperatures: Sequence[float],
    *,
    max_prompts_per_task: int | None,
    max_new_tokens: int,
) -> list[HeldOutPrompt]:
    """The held-out prompts to report on, shortest first, with every answer sampled as we would.

    Half of the held-out prompts are left to the choice of the best weights, see ``held_out``. Of a
    conversation the first turn is measured. An answer counts for a temperature only when that was
    its whole sampling (no top-k, no penalty), this library's own engine wrote it, and it ended by
    itself or has the ``max_new_tokens`` that are measured; otherwise the stage decodes one itself.

    Raises:
        CorpusError: no held-out prompt was answered.
    """
    config = generate.manifest.config
    samplings = [SamplingConfig.model_validate(s) for s in config["samplings"]]
    is_ours = config["backend"] == "local"
    temperature_of = {
        index: t
        for index, sampling in enumerate(samplings)
        for t in temperatures
        if is_ours and sampling == SamplingConfig(temperature=t)
    }
    rows = answered_held_out(pq.read_table(generate.file("completions.parquet")).to_pylist())
    reported = reporting_half(row["prompt_id"] for row in rows)
    prompts: dict[str, dict[str, Any]] = {}
    per_task: dict[str, int] = {}
    for row in rows:
        if row["prompt_id"] not in reported:
            continue
        if row["prompt_id"] not in prompts:
            if per_task.get(row["task"], 0) == max_prompts_per_task:
                continue
            per_task[row["task"]] = per_task.get(row["task"], 0) + 1
            prompts[row["prompt_id"]] = {**row, "answers": {}}
        temperature = temperature_of.get(row["sampling_index"])
        # Cut off earlier than here, it is a part of the answer and not the answer.
        is_whole = row["status"] == "completed"
        is_whole = is_whole or len(row["completion_token_ids"]) >= max_new_tokens
        if temperature is not None and is_whole:
            answers = prompts[row["prompt_id"]]["answers"]
            answers.setdefault(temperature, tuple(row["completion_token_ids"]))
    if not prompts:
        raise CorpusError(
            f"{generate.path}: no held-out prompt was answered, so there is nothing to measure on. "
            "Raise generate.corpus.held_out_fraction, or give rows a split of 'held_out'."
        )
    held_out = [
        HeldOutPrompt(i, r["task"], tuple(r["prompt_token_ids"]), r["answers"])
        for i, r in prompts.items()
    ]
    return sorted(held_out, key=lambda p: (len(p.token_ids), p.prompt_id))


def decode(
    target: LoadedModel,
    contestant: Contestant | None,
    prompts: Sequence[HeldOutPrompt],
    sampling: SamplingConfig,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    seed: int,
) -> list[CountedResult]:
    """Answer the prompts together; ``contestant`` None decodes plainly, in the same engine."""
    engine = make_engine(
        target,
        contestant,
        num_draft_tokens=num_draft_tokens,
        max_batch_size=len(prompts),
        max_length=max(len(p.token_ids) for p in prompts) + max_new_tokens,
    )
    left = [max_new_tokens] * len(prompts)
    num_draftable = [0] * len(prompts)

    def count(index: int, update: RowUpdate) -> None:
        num_draftable[index] += left[index] > 1
        left[index] -= len(update.new_token_ids)

    requests = [
        request_of(target, p, sampling, max_new_tokens=max_new_tokens, seed=seed) for p in prompts
    ]
    results = decode_batch(engine, requests, on_update=count)
    return [
        CountedResult(**vars(result), num_draftable_calls=number)
        for result, number in zip(results, num_draftable, strict=True)
    ]


def make_engine(
    target: LoadedModel,
    contestant: Contestant | None,
    *,
    num_draft_tokens: int,
    max_batch_size: int,
    max_length: int,
) -> DecodeEngine:
    """A decode engine for the pair, or for the target alone."""
    return engine_with(
        target,
        None if contestant is None else contestant.make_drafter(),
        num_draft_tokens=num_draft_tokens if contestant else 0,
        max_batch_size=max_batch_size,
        max_length=max_length,
    )


def engine_with(
    target: LoadedModel,
    drafter: Drafter | None,
    *,
    num_draft_tokens: int,
    max_batch_size: int,
    max_length: int,
) -> DecodeEngine:
    """A decode engine around any drafter."""
    return DecodeEngine(
        target.model,
        drafter,
        num_draft_tokens=num_draft_tokens,
        max_batch_size=max_batch_size,
        max_length=max_length,
        tokenizer=target.tokenizer,
    )


def request_of(
    target: LoadedModel,
    prompt: HeldOutPrompt,
    sampling: SamplingConfig,
    *,
    max_new_tokens: int,
    seed: int,
) -> DecodeRequest:
    """A prompt as a request; its seed depends on the prompt alone, not on its place in a batch."""
    return DecodeRequest(
        prompt_token_ids=prompt.token_ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=stable_seed(seed, prompt.prompt_id),
        stop_token_ids=target.stop_token_ids,
        request_id=prompt.prompt_id,
    )


def find_divergence(
    target: LoadedModel,
    prompt: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    *,
    max_new_tokens: int,
) -> dict[str, Any] | None:
    """Where two greedy answers part, and whether the target's logits tie there; None: nowhere.

    :func:`distill.runtime.lossless.find_divergence` as a table's row. ``speculative_token`` is
    None where the speculative answer ended for no reason; the margin is then the plain token's.
    """
    request = DecodeRequest(
        prompt, max_new_tokens, SamplingConfig(temperature=0.0), 0, target.stop_token_ids
    )
    found = lossless.find_divergence(
        target, request, plain, speculative, tie_ulps=TIE_ULPS[target.dtype]
    )
    if found is None:
        return None
    return {
        "position": found.position,
        "plain_token": found.plain_token,
        "speculative_token": found.other_token,
        "margin": found.margin,
        "margin_ulps": found.margin_ulps,
        "is_tie": found.is_tie,
    }
