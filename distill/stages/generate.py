"""Generate: the target answers the prompts, and what it computed on the way is kept.

Refuses to know what the answers train, who runs the target (a backend) and how answers are stored
(``completions.py``, which describes the payload).

The unit of work and of resume is a chunk: rows of one sampling setting, sorted by prompt length,
run by the same calls of the backend. A chunk's bits depend on the config alone, so a build that was
killed and resumed, or shared among processes, equals one that was not.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore, require_free_bytes
from distill.backends.base import Backend, open_backend
from distill.corpus import Corpus, CorpusConfig, is_reachable, read_corpus, unread_revision
from distill.errors import ArtifactError, DiskSpaceError, ShardsPendingError
from distill.models import ModelShape, load_tokenizer, model_revision, read_shape
from distill.stages import completions as storage
from distill.stages.generate_chunk import Answering, rejected_row, run_chunk
from distill.stages.generate_config import GenerateConfig
from distill.stages.generate_plan import Chunk, Plan, Shard, make_plan, shard_of
from distill.stages.generate_resume import (
    CORPUS_SHA256,
    find_stored_answers,
    finishing_on_interrupt,
    is_chunk_done,
)
from distill.stages.generate_size import total
from distill.stages.generate_store import TargetKeeping, store_metrics
from distill.stages.generate_synthesis import write_prompts
from distill.stages.progress import JsonLines, answering_progress
from distill.target_store.config import bytes_per_token, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CODE_VERSION", "CorpusConfig", "GenerateConfig", "generate", "generate_key"]

logger = logging.getLogger(__name__)

STAGE = "generate"
CODE_VERSION = 3
UNREAD = "unread:"
LOGS_DIR = "logs"

_POLL_S = 0.2


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
        return _key(config, store, f"{UNREAD}{unread_revision(config.corpus)}")
    return _key(config, store, _corpus_revision(config, _given_corpus(config)))


def _given_corpus(config: GenerateConfig) -> Corpus | None:
    return None if config.corpus.kind == "self_synthesis" else read_corpus(config.corpus)


def _corpus_revision(config: GenerateConfig, corpus: Corpus | None) -> str:
    if corpus is None:
        return f"self_synthesis:{unread_revision(config.corpus)}"
    return f"sha256:{corpus.sha256}"


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
    crash; the counts in the metrics add up to the corpus. With ``config.shard``, or under torchrun,
    this process answers its part; a rebuild is not shared. With ``config.retry_failed`` a finished
    build that has failed rows is replaced by one in which they were asked once more.

    Raises:
        CorpusError: unreadable or malformed prompts, or none that can be answered.
        ModelNotFoundError: the target cannot be found or loaded.
        DiskSpaceError: what is kept would not fit on the disk; what is done is kept.
        ArtifactStaleError: rows in an unfinished build were made with other settings.
        ShardsPendingError: this process's shard is done, and others are not.
        KeyboardInterrupt: Ctrl-C; the rows in flight were finished and kept.
    """
    if inputs:
        raise ArtifactError(f"generate reads no artifact, but was given: {', '.join(inputs)}")
    corpus = _given_corpus(config)
    key = _key(config, store, _corpus_revision(config, corpus))
    finished = store.find(key) if config.retry_failed and not rebuild else None
    if finished is not None and finished.metrics["num_failed"]:
        store.verify(finished)
        rebuild = True
    else:
        finished = None
    shard = None if rebuild else shard_of(config.shard)
    build = _Build(config, store, key, corpus, shard, finished)
    if shard is not None:
        if (found := store.find(key)) is not None:
            return found
        build.answer_shard(store.partial_dir(key), shard)
    return store.get_or_build(key, build, rebuild=rebuild)


class _Build:
    """One build of the artifact by this process; called with the folder to build in."""

    def __init__(
        self,
        config: GenerateConfig,
        store: ArtifactStore,
        key: ArtifactKey,
        corpus: Corpus | None,
        shard: Shard | None,
        finished: Artifact | None,
    ) -> None:
        self._config, self._store, self._key = config, store, key
        self._corpus, self._shard, self._finished = corpus, shard, finished
        self._plan: Plan | None = None
        self._num_tokens, self._num_resumed, self._answer_s = 0, 0, 0.0
        self._done: set[int] = set()  # chunks that this process has answered or looked at
        part = "" if shard is None else f"-shard-{shard.index + 1}-of-{shard.count}"
        name = f"{STAGE}-{key.fingerprint[:12]}{part}.jsonl"
        self._lines = JsonLines(store.root / LOGS_DIR / name)

    def __call__(self, directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        plan = self._prepare(directory)
        self._answer(directory, plan.chunks)
        rejected = directory / "work" / "rejected.parquet"
        storage.write_rows(rejected, [rejected_row(entry) for entry in plan.rejected])
        shards = [storage.shard_path(directory, chunk.index) for chunk in plan.chunks]
        counts = storage.merge([*shards, rejected], directory)
        metrics = self._metrics(plan, counts, directory)
        metrics["wall_s"] = time.perf_counter() - started
        self._lines.write("finished", **metrics)
        return metrics

    def answer_shard(self, directory: Path, shard: Shard) -> None:
        """Answer this process's chunks, then wait for the others' (a rank) or leave them to them.

        Processes write files of their own into one folder. So the order they finish in, how many
        there are and on how many machines they ran (copy the folders together) changes no byte.

        Raises:
            ShardsPendingError: chunks of other shards are missing.
        """
        (directory / "work").mkdir(parents=True, exist_ok=True)
        chunks = self._prepare(directory).chunks
        self._answer(directory, [chunk for chunk in chunks if shard.owns(chunk)], is_part=True)
        missing = self._missing(directory, chunks)
        while missing and shard.is_rank and shard.index == 0:
            time.sleep(_POLL_S)  # torchrun ends all ranks when one of them dies
            missing = self._missing(directory, chunks)
        if missing and not shard.is_rank:
            raise ShardsPendingError(
                f"shard {shard.name} is done; {len(missing)} of {len(chunks)} chunks are still to "
                f"come from the other shards, in {directory}. The last of them to finish puts all "
                "together; so does a run without a shard, which answers what is missing itself."
            )

    def _missing(self, directory: Path, chunks: Sequence[Chunk]) -> list[Chunk]:
        paths = [(chunk, storage.shard_path(directory, chunk.index)) for chunk in chunks]
        return [chunk for chunk, path in paths if not path.exists()]

    def _prepare(self, directory: Path) -> Plan:
        """The plan; first the prompts, where the target writes them itself."""
        if self._plan is not None:
            return self._plan
        config = self._config
        (directory / "work").mkdir(exist_ok=True)
        if self._corpus is None:
            self._corpus = write_prompts(
                config.corpus,
                self._tokenizer,
                self._backend,
                directory / "work",
                system_prompt=config.system_prompt,
                today=config.template_date,
                chunk_size=config.chunk_size,
                lock=self._store.work_lock(self._key),
                lines=self._lines,
            )
        self._plan = make_plan(
            self._corpus,
            self._tokenizer,
            is_raw=config.corpus.raw,
            system_prompt=config.system_prompt,
            today=config.template_date,
            max_prompt_tokens=self._max_prompt_tokens,
            num_samplings=len(config.samplings),
            questions_per_chunk=max(1, config.chunk_size // config.num_samples),
        )
        return self._plan

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._config.target)

    @functools.cached_property
    def _backend(self) -> Backend:
        import torch

        target, local_rank = self._config.target, os.environ.get("LOCAL_RANK")
        is_any_gpu = target.device in ("auto", "cuda") and torch.cuda.is_available()
        if self._shard is not None and local_rank is not None and is_any_gpu:
            target = target.model_copy(update={"device": f"cuda:{local_rank}"})
        return open_backend(self._config.backend, target, max_batch_size=self._config.batch_size)

    @functools.cached_property
    def _shape(self) -> ModelShape:
        shape = read_shape(self._config.target)
        assert shape is not None, "a model whose tokenizer is here has its config.json beside it"
        return shape

    @property
    def _max_prompt_tokens(self) -> int:
        limit = self._shape.max_position_embeddings - 1  # room for one token of an answer
        return min(limit, self._config.max_prompt_tokens or limit)

    @property
    def _settings(self) -> Mapping[str, Any]:
        """What a chunk's rows are made with, the prompts' texts among it."""
        if self._config.corpus.kind != "self_synthesis":
            return self._key.parts  # the texts are in the corpus revision
        assert self._corpus is not None
        return {**self._key.parts, CORPUS_SHA256: self._corpus.sha256}

    def _pending(self, directory: Path, chunks: Sequence[Chunk], *, is_part: bool) -> list[Chunk]:
        """The chunks to answer; each is looked at once by a process, as looking means hashing."""
        # What another rank failed to answer it asked a moment ago.
        is_others = self._shard is not None and self._shard.is_rank and not is_part
        unseen = [chunk for chunk in chunks if chunk.index not in self._done]
        pending = [
            chunk
            for chunk in unseen
            if not is_chunk_done(
                directory, chunk.index, self._settings, asks_failed_again=not is_others
            )
        ]
        self._num_resumed += len(unseen) - len(pending)
        self._done.update(chunk.index for chunk in unseen)
        return pending

    def _answer(self, directory: Path, chunks: Sequence[Chunk], *, is_part: bool = False) -> None:
        """Answer the chunks that are not done yet, one after the other, each kept when it is."""
        config, settings = self._config, self._settings
        pending = self._pending(directory, chunks, is_part=is_part)
        if not pending:
            return
        # Ranks write to one disk at the same time, so all that is missing has to fit on it.
        is_shared = is_part and self._shard is not None and self._shard.is_rank
        missing = self._missing(directory, self._prepare(directory).chunks)
        _require_disk(config, self._shape, missing if is_shared else pending, directory)
        logger.info("%d of %d chunks to generate", len(pending), len(chunks))
        self._lines.write("started", num_chunks=len(chunks), num_pending=len(pending))
        backend = self._backend
        num_answers = sum(chunk.num_turns for chunk in pending) * config.num_samples
        started = time.perf_counter()
        with (
            answering_progress(num_answers, self._lines) as progress,
            finishing_on_interrupt() as interrupt,
        ):
            answering = Answering(
                backend=backend,
                tokenizer=self._tokenizer,
                samplings=config.samplings,
                num_samples=config.num_samples,
                max_new_tokens=config.max_new_tokens,
                max_prompt_tokens=self._max_prompt_tokens,
                seed=config.seed,
                system_prompt=config.system_prompt,
                today=config.template_date,
                keeping=TargetKeeping(config.target_store, backend),
                known=find_stored_answers(directory, settings, self._finished),
                progress=progress,
            )
            for number, chunk in enumerate(pending, start=1):
                self._require_disk_now(chunk, directory, number - 1, len(pending))
                self._num_tokens += run_chunk(answering, chunk, directory, settings)
                self._lines.write("chunk", chunk=chunk.index, **progress.state())
                if interrupt.is_asked:
                    self._lines.write("interrupted", **progress.state())
                    logger.warning(
                        "stopped after %d of %d chunks, which are kept in %s; the same command "
                        "goes on from there",
                        number,
                        len(pending),
                        directory,
                    )
                    raise KeyboardInterrupt
        self._answer_s += time.perf_counter() - started

    def _require_disk_now(
        self, chunk: Chunk, directory: Path, num_done: int, num_pending: int
    ) -> None:
        """Others write to the disk too: check again before each chunk, not when it is full."""
        shard = self._shard
        num_at_once = shard.count if shard is not None and shard.is_rank else 1
        try:
            _require_disk(self._config, self._shape, [chunk] * num_at_once, directory)
        except DiskSpaceError as error:
            self._lines.write("disk_full", num_done=num_done)
            raise DiskSpaceError(
                f"{error} {num_done} of {num_pending} chunks were answered and are kept in "
                f"{directory}; run the same command again to go on."
            ) from error

    def _metrics(self, plan: Plan, counts: Counter[str], directory: Path) -> dict[str, Any]:
        assert self._corpus is not None
        statuses = ("completed", "truncated", "rejected", "failed")
        metrics: dict[str, Any] = {f"num_{status}": 0 for status in statuses}
        metrics.update({f"num_prompts_{status}": 0 for status in statuses})
        metrics.update(sorted(counts.items()))
        metrics.update(self._corpus.counts)
        indices = (chunk.index for chunk in plan.chunks)
        metrics.update(store_metrics(kind_of(self._config.target_store), directory, indices))
        kinds = Counter(f"num_rejected_as/{entry.kind}" for entry in plan.rejected)
        metrics.update(sorted(kinds.items()))
        metrics.update(plan.num_asked_by_part(self._corpus.part_of))
        num_prompts = len(self._corpus.prompts)
        by_status = {status: metrics[f"num_prompts_{status}"] for status in statuses}
        assert sum(by_status.values()) == num_prompts, f"{by_status} of {num_prompts} prompts"
        metrics.update(
            num_prompts=num_prompts,
            num_chunks=len(plan.chunks),
            num_chunks_resumed=self._num_resumed,
            generate_s=self._answer_s,
            tokens_per_s=self._num_tokens / self._answer_s if self._answer_s else 0.0,
        )
        return metrics


def _require_disk(
    config: GenerateConfig, shape: ModelShape, chunks: Sequence[Chunk], directory: Path
) -> None:
    """Refuse to start what could not be finished: every answer at its longest must fit."""
    size = total(chunk.size(config.max_new_tokens) for chunk in chunks).times(config.num_samples)
    kept_bytes = bytes_per_token(
        config.target_store, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size
    )
    what = f"{size.num_answers} completions of up to {config.max_new_tokens} tokens"
    if kept_bytes:
        what += (
            f" with up to {kept_bytes} bytes of the target's knowledge for each (target_store: "
            f"{kind_of(config.target_store)}; top_k and sampled keep less than most hidden states, "
            f"target_store: none nothing)"
        )
    require_free_bytes(directory, size.disk_bytes(kept_bytes), what=what)
