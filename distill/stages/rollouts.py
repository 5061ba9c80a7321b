"""Rollouts: a draft in training answers the target's prompts, and the target says what it thinks.

Refuses to know what the text trains and how often this is done (``pipelines/on_policy.py``).

Payload: ``completions.parquet``, ``vocabulary.parquet`` and ``hidden-00000.safetensors``, ... as
generate writes them (``completions.py``), except that the completions are the draft's, and the
states are the target's on that text. Every row is of the train split.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore
from distill.config import Config, setting
from distill.errors import ArtifactError, TrainingError
from distill.lineage import check_same_target, fingerprints_of
from distill.models import LoadedModel, ModelConfig, load_draft, load_target, model_revision
from distill.sampling import SamplingConfig
from distill.stages import completions as storage
from distill.stages.progress import answering_progress
from distill.target_store.files import file_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CODE_VERSION", "RolloutConfig", "rollouts_key", "write_rollouts"]

logger = logging.getLogger(__name__)

STAGE = "rollouts"
CODE_VERSION = 1
INPUTS = ("distill", "generate")


class RolloutConfig(Config):
    """What a draft in training writes, and how often: a round is text and a training on it."""

    target: ModelConfig
    rounds: int = setting(3, ge=1, in_fingerprint=False, description="after the first training")
    steps_per_round: int = setting(
        100, gt=0, in_fingerprint=False, description="optimiser steps of each round's training"
    )
    num_prompts: int = setting(256, gt=0, description="answered by the draft in a round")
    sampling: SamplingConfig = SamplingConfig()
    max_new_tokens: int = setting(64, ge=1)
    batch_size: int = setting(32, ge=1, description="rows decoded, and scored, at once")
    chunk_size: int = setting(128, ge=1, description="rows a kill can cost")
    seed: int = setting(0, ge=0, description="of the first round; each later one counts on")

    def for_round(self, number: int) -> RolloutConfig:
        """Itself, as the round of this number (from 1) draws prompts and text."""
        assert number >= 1, "the first round is number 1"
        return self.model_copy(update={"seed": self.seed + number - 1})


@dataclass(frozen=True)
class _Prompt:
    row_id: str
    prompt_id: str
    task: str
    token_ids: tuple[int, ...]


def rollouts_key(
    config: RolloutConfig, store: ArtifactStore, *, inputs: Mapping[str, Artifact | str]
) -> ArtifactKey:
    """The key of what :func:`write_rollouts` would build; ``inputs``: artifacts or fingerprints.

    Raises:
        ArtifactError: ``inputs`` is not exactly {"generate": ..., "distill": ...}.
    """
    if set(inputs) != set(INPUTS):
        raise ArtifactError(
            f"rollouts reads 'generate' and 'distill', but was given: "
            f"{', '.join(sorted(inputs)) or 'none'}"
        )
    return store.key(
        STAGE,
        CODE_VERSION,
        config,
        inputs=fingerprints_of(inputs),
        revisions={"target": model_revision(config.target)},
    )


def write_rollouts(
    config: RolloutConfig,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact],
    rebuild: bool = False,
) -> Artifact:
    """Let a draft answer prompts the target answered, and the target score its text.

    Resumes what was killed; returns at once what is built.

    Raises:
        ArtifactError: an input is missing, of another stage, or another target's.
        TrainingError: no prompt leaves room for an answer.
    """
    key = rollouts_key(config, store, inputs=inputs)
    for name in INPUTS:
        check_same_target(
            inputs[name].expect(name),
            name=name,
            reference=config.target.model,
            revision=key.parts["revisions"]["target"],
        )
    return store.get_or_build(
        key,
        lambda directory: _build(config, inputs, directory, key.parts),
        rebuild=rebuild,
    )


def _build(
    config: RolloutConfig,
    inputs: Mapping[str, Artifact],
    directory: Path,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    started = time.perf_counter()
    (directory / "work").mkdir(exist_ok=True)
    target = load_target(config.target)
    draft = load_draft(inputs["distill"], dtype=config.target.dtype, device=config.target.device)
    context = min(target.shape.max_position_embeddings, draft.shape.max_position_embeddings)
    prompts = _prompts(inputs["generate"], config, context)
    writer = _Writer(config, target, draft)
    shards = []
    for index, chunk in enumerate(_cut(prompts, config.chunk_size)):
        shard = storage.shard_path(directory, index)
        shards.append(shard)
        if not storage.is_shard_whole(shard, directory):
            writer.write(chunk, index, directory, settings)
    counts = storage.merge(shards, directory)
    return {**dict(sorted(counts.items())), "wall_s": time.perf_counter() - started}


def _prompts(generated: Artifact, config: RolloutConfig, context: int) -> list[_Prompt]:
    """A seeded sample of what the target was asked for training, sorted by length."""
    columns = ["row_id", "prompt_id", "task", "split", "status", "turn_index", "prompt_token_ids"]
    table = pq.read_table(generated.file(storage.COMPLETIONS_FILE), columns=columns)
    found: dict[tuple[str, int | None], _Prompt] = {}
    for row in table.to_pylist():
        ids = row["prompt_token_ids"]
        is_asked = row["split"] == "train" and row["status"] in ("completed", "truncated")
        if is_asked and 0 < len(ids) < context:
            prompt = _Prompt(row["row_id"], row["prompt_id"], row["task"], tuple(ids))
            found.setdefault((row["prompt_id"], row["turn_index"]), prompt)
    if not found:
        raise TrainingError(
            f"{generated.path} has no prompt of the train split shorter than the context of "
            f"{context} tokens; generate with other prompts"
        )
    everything = list(found.values())
    order = np.random.default_rng([config.seed]).permutation(len(everything))
    chosen = [everything[index] for index in order[: config.num_prompts].tolist()]
    return sorted(chosen, key=lambda prompt: (len(prompt.token_ids), prompt.row_id))


def _cut(prompts: Sequence[_Prompt], size: int) -> Iterator[Sequence[_Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


class _Subset:
    """A logits processor: what a draft cannot propose when it serves, it does not write either."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)

    def __call__(self, _: Tensor, scores_1V: Tensor) -> Tensor:
        kept_1V = scores_1V.new_full(scores_1V.shape, float("-inf"))
        kept_1V[:, self._token_ids] = scores_1V[:, self._token_ids]
        return kept_1V


class _Writer:
    """Answers chunks with the draft and scores them with the target."""

    def __init__(
        self,
        config: RolloutConfig,
        target: LoadedModel,
        draft: LoadedModel,
    ) -> None:
        from distill.losses.head import head_of
        from distill.training.live_target import LiveTarget

        self._config, self._target, self._draft = config, target, draft
        token_ids = draft.vocabulary_token_ids
        self._processors = () if token_ids is None else (_Subset(token_ids),)
        head = head_of(target.model).first(min(len(target.tokenizer), target.shape.vocab_size))
        self._scorer = LiveTarget(target.model, target_head=head, needs_logsumexp=True)

    def write(
        self, chunk: Sequence[_Prompt], index: int, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        """Write one chunk's rows and states."""
        answers = self._answer(chunk)
        name = file_name("final_hidden", index)
        assert name is not None
        storage.write_tensors(directory / name, self._scored(chunk, answers))
        rows, offset = [], 0
        for prompt, (completion, finish_reason, seed) in zip(chunk, answers, strict=True):
            rows.append(
                {
                    "row_id": f"rollout-{self._config.seed}-{prompt.row_id}",
                    "prompt_id": prompt.prompt_id,
                    "task": prompt.task,
                    "split": "train",
                    "prompt_token_ids": list(prompt.token_ids),
                    "completion_token_ids": completion,
                    "loss_mask": [0] * len(prompt.token_ids) + [1] * len(completion),
                    "status": "completed" if finish_reason == "stop" else "truncated",
                    "finish_reason": finish_reason,
                    "sampling_index": 0,
                    "temperature": self._config.sampling.temperature,
                    "sample_index": 0,
                    "seed": seed,
                    "target_file": name,
                    "target_offset": offset,
                }
            )
            offset += len(completion)
        path = storage.shard_path(directory, index)
        storage.write_shard(path, rows, settings, directory / name)

    def _answer(self, chunk: Sequence[_Prompt]) -> list[tuple[list[int], str, int]]:
        """(completion, finish reason, seed) of each prompt; a row's seed is its own."""
        from distill.backends.base import stable_seed
        from distill.runtime.decode import DecodeEngine, DecodeRequest

        config = self._config
        engine = DecodeEngine(
            self._draft.model,
            None,
            num_draft_tokens=0,
            max_batch_size=config.batch_size,
            max_length=max(len(p.token_ids) for p in chunk) + config.max_new_tokens,
            tokenizer=self._target.tokenizer,
        )
        seeds = [stable_seed(config.seed, prompt.row_id) for prompt in chunk]
        handles = [
            engine.add(
                DecodeRequest(
                    prompt.token_ids,
                    max_new_tokens=config.max_new_tokens,
                    sampling=config.sampling,
                    seed=seed,
                    stop_token_ids=self._target.stop_token_ids,
                    logits_processors=self._processors,
                )
            )
            for prompt, seed in zip(chunk, seeds, strict=True)
        ]
        with answering_progress(len(chunk)) as progress:
            while engine.has_work:
                for update in engine.step():
                    progress.add_tokens(len(update.new_token_ids))
                    if (reason := update.finish_reason) is not None:
                        progress.add_answer("completed" if reason == "stop" else "truncated")
        results = [engine.result(handle) for handle in handles]
        return [
            (result.token_ids, result.finish_reason or "length", seed)
            for result, seed in zip(results, seeds, strict=True)
        ]

    def _scored(
        self, chunk: Sequence[_Prompt], answers: Sequence[tuple[list[int], str, int]]
    ) -> dict[str, Tensor]:
        """The target's states at the positions that predict each id of the completions."""
        import torch

        from distill.training.data import Row

        rows = []
        for prompt, (completion, _, _) in zip(chunk, answers, strict=True):
            ids_T = np.array([*prompt.token_ids, *completion][:-1], dtype=np.int64)
            positions_N = np.arange(len(prompt.token_ids) - 1, len(ids_T))
            rows.append(Row(prompt.row_id, ids_T, positions_N, "", positions_N))
        hidden, logsumexp = [], []
        for start in range(0, len(rows), self._config.batch_size):
            known = self._scorer.of(rows[start : start + self._config.batch_size])
            assert known.logsumexp_N is not None
            hidden.append(known.hidden_ND.to(torch.bfloat16).cpu())
            logsumexp.append(known.logsumexp_N.cpu())
        return {"hidden_ND": torch.cat(hidden), "logsumexp_N": torch.cat(logsumexp)}
