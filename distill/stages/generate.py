"""Generate: the target answers the prompts, and what it computed on the way is kept.

Refuses to know what the answers train, who runs the target (a backend) and how answers are stored
(``completions.py``, which describes the payload).

The unit of work and of resume is a chunk: rows of one sampling setting, sorted by prompt length,
run by one call of the backend. A chunk's bits depend on the config alone, so a build that was
killed and resumed equals one that was not.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import model_validator

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore, require_free_bytes
from distill.backends.base import BACKENDS, Backend, Completion, sample_seed, stable_seed
from distill.config import Config, setting
from distill.errors import ArtifactError, ConfigError, CorpusError
from distill.models import ModelConfig, ModelShape, load_tokenizer, model_revision, read_shape
from distill.sampling import SamplingConfig
from distill.stages import completions as storage
from distill.stages.corpus import (
    Corpus,
    CorpusConfig,
    Prompt,
    is_reachable,
    prompt_token_ids,
    read_corpus,
)
from distill.stages.progress import Progress, answering_progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CODE_VERSION", "CorpusConfig", "GenerateConfig", "generate", "generate_key"]

logger = logging.getLogger(__name__)

STAGE = "generate"
CODE_VERSION = 1
UNREAD = "unread:"

# Beside the states: ids, mask, parquet overhead.
_TABLE_BYTES_PER_TOKEN = 16


class GenerateConfig(Config):
    """What is asked, how it is answered, and what is kept.

    Each prompt is answered ``num_samples`` times for each entry of ``samplings``. ``batch_size``
    and ``chunk_size`` belong to the fingerprint: the shapes of matrix products change last bits.
    """

    target: ModelConfig
    corpus: CorpusConfig
    samplings: tuple[SamplingConfig, ...] = setting((SamplingConfig(),), min_length=1)
    num_samples: int = setting(1, ge=1)
    max_new_tokens: int = setting(256, ge=1)
    max_prompt_tokens: int | None = setting(
        None, ge=1, description="longer prompts are rejected; else the context decides"
    )
    seed: int = setting(0, ge=0)
    backend: str = "local"
    batch_size: int = setting(64, ge=1, description="rows decoded at once")
    chunk_size: int = setting(256, ge=1, description="rows in a shard: the unit of resume")
    target_store: Literal["none", "final_hidden"] = setting(
        "final_hidden", description="keep the target's final hidden states for training"
    )
    system_prompt: str | None = setting(None, description="for rows without a system message")

    @model_validator(mode="after")
    def _check_raw(self) -> GenerateConfig:
        if self.corpus.raw and self.system_prompt is not None:
            raise ConfigError("corpus.raw uses no chat template, so system_prompt has no place")
        return self


@dataclass(frozen=True)
class _Question:
    prompt: Prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Chunk:
    index: int
    sampling_index: int
    questions: tuple[_Question, ...]


@dataclass(frozen=True)
class _Plan:
    chunks: tuple[_Chunk, ...]
    rejected: tuple[tuple[Prompt, str], ...]


def generate_key(
    config: GenerateConfig, store: ArtifactStore, *, may_be_provisional: bool = False
) -> ArtifactKey:
    """The key of what :func:`generate` would build; reads the prompts, loads no model.

    With ``may_be_provisional``, prompts on a hub that cannot be reached stand for themselves by
    name ("unread:..."): good for a plan, and not the key a run will have.

    Raises:
        CorpusError: the prompts cannot be read.
        ModelNotFoundError: the target is a path, and nothing is there.
    """
    if may_be_provisional and not is_reachable(config.corpus):
        return _key(config, store, f"{UNREAD}{config.corpus.name}")
    return _key(config, store, f"sha256:{read_corpus(config.corpus).sha256}")


def _key(config: GenerateConfig, store: ArtifactStore, corpus_revision: str) -> ArtifactKey:
    revisions = {"target": model_revision(config.target), "corpus": corpus_revision}
    return store.key(STAGE, CODE_VERSION, config, revisions=revisions)


def generate(
    config: GenerateConfig,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact] | None = None,
    rebuild: bool = False,
) -> Artifact:
    """Let the target answer the corpus. Resumes what was killed; returns at once what is built.

    A prompt that cannot be answered (too long, no user turn) is a row with its reason, never a
    crash; the counts in the metrics add up to the corpus.

    Raises:
        CorpusError: unreadable or malformed prompts, or none that can be answered.
        ModelNotFoundError: the target cannot be found or loaded.
        DiskSpaceError: the states would not fit on the disk.
    """
    if inputs:
        raise ArtifactError(f"generate reads no artifact, but was given: {', '.join(inputs)}")
    corpus = read_corpus(config.corpus)
    key = _key(config, store, f"sha256:{corpus.sha256}")
    return store.get_or_build(
        key, lambda directory: _build(config, corpus, directory), rebuild=rebuild
    )


def _build(config: GenerateConfig, corpus: Corpus, directory: Path) -> dict[str, Any]:
    started = time.perf_counter()
    tokenizer = load_tokenizer(config.target)
    shape = read_shape(config.target)
    assert shape is not None, "a model whose tokenizer is here has its config.json beside it"
    plan = _plan(config, corpus, tokenizer, shape)
    work = directory / "work"
    work.mkdir(exist_ok=True)
    shards = {chunk.index: work / f"shard-{chunk.index:05d}.parquet" for chunk in plan.chunks}
    pending = [chunk for chunk in plan.chunks if not shards[chunk.index].exists()]
    _require_disk(config, pending, shape, directory)

    num_new_tokens, generate_s = 0, 0.0
    if pending:
        logger.info(
            "%d of %d chunks to generate, %d prompts rejected",
            len(pending),
            len(plan.chunks),
            len(plan.rejected),
        )
        backend = _open_backend(config)
        loaded = time.perf_counter()
        num_rows = sum(len(chunk.questions) for chunk in pending) * config.num_samples
        with answering_progress(num_rows) as progress:
            for chunk in pending:
                num_new_tokens += _run_chunk(config, backend, chunk, directory, progress)
        generate_s = time.perf_counter() - loaded

    rejected = work / "rejected.parquet"
    storage.write_rows(rejected, [_rejected_row(*entry) for entry in plan.rejected])
    counts = storage.merge([*shards.values(), rejected], directory)
    metrics: dict[str, Any] = dict.fromkeys(
        ("num_completed", "num_truncated", "num_rejected", "num_failed"), 0
    )
    metrics.update(sorted(counts.items()))
    metrics.update(
        num_prompts=len(corpus.prompts),
        num_chunks=len(plan.chunks),
        num_chunks_resumed=len(plan.chunks) - len(pending),
        generate_s=generate_s,
        tokens_per_s=num_new_tokens / generate_s if generate_s else 0.0,
        wall_s=time.perf_counter() - started,
    )
    return metrics


def _open_backend(config: GenerateConfig) -> Backend:
    factory = BACKENDS.get(config.backend)
    return factory(config.target, max_batch_size=config.batch_size)


# ---------------------------------------------------------------- planning


def _plan(
    config: GenerateConfig,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    shape: ModelShape,
) -> _Plan:
    """Turn prompts into chunks of equal settings and similar length, and name the rejected.

    Raises:
        CorpusError: every prompt is rejected.
    """
    limit = shape.max_position_embeddings - 1  # room for one token of an answer
    if config.max_prompt_tokens is not None:
        limit = min(limit, config.max_prompt_tokens)
    questions: list[_Question] = []
    rejected: list[tuple[Prompt, str]] = []
    for prompt in corpus.prompts:
        if prompt.reject_reason is not None:
            rejected.append((prompt, prompt.reject_reason))
            continue
        ids = prompt_token_ids(
            tokenizer, prompt, is_raw=config.corpus.raw, system_prompt=config.system_prompt
        )
        if len(ids) > limit:
            rejected.append((prompt, f"its {len(ids)} tokens are more than the {limit} allowed"))
        else:
            questions.append(_Question(prompt, tuple(ids)))
    if not questions:
        first, reason = rejected[0]
        raise CorpusError(
            f"none of the {len(rejected)} prompts can be answered; {first.prompt_id!r}: {reason}"
        )
    questions.sort(key=lambda question: (len(question.token_ids), question.prompt.prompt_id))
    size = max(1, config.chunk_size // config.num_samples)
    parts = [
        (sampling_index, tuple(questions[start : start + size]))
        for sampling_index in range(len(config.samplings))
        for start in range(0, len(questions), size)
    ]
    chunks = [_Chunk(index, *part) for index, part in enumerate(parts)]
    return _Plan(tuple(chunks), tuple(rejected))


def _require_disk(
    config: GenerateConfig, pending: Sequence[_Chunk], shape: ModelShape, directory: Path
) -> None:
    """Refuse to start what could not be finished: every answer at its longest must fit."""
    num_rows = sum(len(chunk.questions) for chunk in pending) * config.num_samples
    num_tokens = num_rows * config.max_new_tokens
    state_bytes = 2 * shape.hidden_size + 4 if config.target_store == "final_hidden" else 0
    prompt_tokens = sum(len(q.token_ids) for chunk in pending for q in chunk.questions)
    needed = num_tokens * (state_bytes + _TABLE_BYTES_PER_TOKEN)
    needed += prompt_tokens * config.num_samples * _TABLE_BYTES_PER_TOKEN
    what = f"{num_rows} completions of up to {config.max_new_tokens} tokens"
    if state_bytes:
        what += " with the target's hidden states (target_store: none keeps none)"
    require_free_bytes(directory, needed, what=what)


# ---------------------------------------------------------------- one chunk


def _run_chunk(
    config: GenerateConfig,
    backend: Backend,
    chunk: _Chunk,
    directory: Path,
    progress: Progress,
) -> int:
    """Answer a chunk and store it: states first, rows last, so that rows mean "done".

    Returns the number of new tokens.
    """
    keep_hidden = config.target_store == "final_hidden"
    seeds = [
        stable_seed(config.seed, question.prompt.prompt_id, chunk.sampling_index)
        for question in chunk.questions
    ]
    answers: dict[tuple[int, int], Completion] = {}
    for completion in backend.generate(
        [question.token_ids for question in chunk.questions],
        config.samplings[chunk.sampling_index],
        max_new_tokens=config.max_new_tokens,
        seeds=seeds,
        num_samples=config.num_samples,
        keep_hidden=keep_hidden,
        on_tokens=progress.add_tokens,
    ):
        answers[completion.prompt_index, completion.sample_index] = completion
        progress.add_answer()

    rows: list[dict[str, Any]] = []
    hidden: list[torch.Tensor] = []
    logsumexp: list[torch.Tensor] = []
    num_tokens = 0
    hidden_file = storage.hidden_file_name(chunk.index) if keep_hidden else None
    for index, sample in itertools.product(range(len(seeds)), range(config.num_samples)):
        answer = answers.get((index, sample))
        row = _answer_row(config, chunk, chunk.questions[index], seeds[index], sample, answer)
        if answer is not None and keep_hidden:
            row |= {"hidden_file": hidden_file, "hidden_offset": num_tokens}
            assert answer.hidden_TD is not None
            assert answer.logsumexp_T is not None
            hidden.append(answer.hidden_TD)
            logsumexp.append(answer.logsumexp_T)
        num_tokens += len(row["completion_token_ids"])
        rows.append(row)
    if hidden_file is not None and hidden:
        storage.write_hidden(directory / hidden_file, torch.cat(hidden), torch.cat(logsumexp))
    storage.write_rows(directory / "work" / f"shard-{chunk.index:05d}.parquet", rows)
    return num_tokens


def _answer_row(
    config: GenerateConfig,
    chunk: _Chunk,
    question: _Question,
    seed: int,
    sample_index: int,
    answer: Completion | None,
) -> dict[str, Any]:
    prompt = question.prompt
    token_ids = [] if answer is None else list(answer.token_ids)
    reason = None
    status: storage.Status = "completed"
    if answer is None:
        status, reason = "failed", "the backend returned no completion"
    elif answer.finish_reason == "length":
        status = "truncated"
    return {
        "row_id": f"{prompt.prompt_id}/{chunk.sampling_index}/{sample_index}",
        "prompt_id": prompt.prompt_id,
        "task": prompt.task,
        "split": prompt.split,
        "prompt_token_ids": list(question.token_ids),
        "completion_token_ids": token_ids,
        "loss_mask": [0] * len(question.token_ids) + [1] * len(token_ids),
        "status": status,
        "reason": reason,
        "finish_reason": None if answer is None else answer.finish_reason,
        "sampling_index": chunk.sampling_index,
        "temperature": config.samplings[chunk.sampling_index].temperature,
        "sample_index": sample_index,
        "seed": sample_seed(seed, sample_index),
    }


def _rejected_row(prompt: Prompt, reason: str) -> dict[str, Any]:
    return {
        "row_id": f"{prompt.prompt_id}/rejected",
        "prompt_id": prompt.prompt_id,
        "task": prompt.task,
        "split": prompt.split,
        "prompt_token_ids": [],
        "completion_token_ids": [],
        "loss_mask": [],
        "status": "rejected",
        "reason": reason,
    }
