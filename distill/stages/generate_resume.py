"""Owns what an interruption leaves: Ctrl-C that ends after a chunk, chunks and rows found again.

Refuses to know how a row is answered.
"""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError

from distill.artifacts import Artifact
from distill.backends.base import Completion
from distill.errors import ArtifactStaleError
from distill.manifest import describe_changes, fingerprint, listed
from distill.stages import completions as storage
from distill.target_store.files import kind_of_file

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_UNFINISHED = "*.partial"
_UNREADABLE = (OSError, pa.ArrowException, SafetensorError)

CORPUS_SHA256 = "corpus_sha256"
"""Among a chunk's settings: of prompts that the target wrote, which its settings do not fix."""


@dataclass
class Interrupt:
    """Whether the user asked to stop."""

    is_asked: bool = False


@contextmanager
def finishing_on_interrupt() -> Iterator[Interrupt]:
    """Inside, the first Ctrl-C only sets a flag; the second one interrupts at once, as ever."""
    asked = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals belong to the main thread; there is no handler to set here
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        asked.is_asked = True
        signal.signal(signal.SIGINT, before)
        logger.warning("finishing the rows in flight, then stopping; Ctrl-C again stops at once")

    signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def is_chunk_done(
    directory: Path,
    chunk_index: int,
    settings: Mapping[str, Any],
    *,
    asks_failed_again: bool = True,
) -> bool:
    """Whether a chunk is stored, whole, and with these settings.

    One with failed rows is set aside instead: they are asked again, its other answers are known.

    Raises:
        ArtifactStaleError: it was made with other settings; names them.
    """
    rows = storage.shard_path(directory, chunk_index)
    if not rows.exists():
        return False
    found = storage.read_shard_settings(rows)
    if found and fingerprint(found) != fingerprint(settings):
        changes = listed(describe_changes(found, settings))
        raise ArtifactStaleError(
            f"{rows} was made with other settings than this run: {changes}. Answers of different "
            f"settings are not mixed: move that file away, or run with the settings it was made "
            f"with"
        )
    if not found or not storage.is_shard_whole(rows, directory):
        logger.warning("%s is damaged; its chunk is answered again", rows)
        rows.unlink()
        return False
    if asks_failed_again and (num_failed := _num_failed(rows)):
        logger.info("%d rows of %s failed; they are asked again", num_failed, rows)
        rows.replace(storage.reopened_path(directory, chunk_index))
        return False
    return True


def _num_failed(rows: Path) -> int:
    statuses: list[str] = pq.read_table(rows, columns=["status"])["status"].to_pylist()
    return statuses.count("failed")


@dataclass(frozen=True)
class _Place:
    """Where a stored answer is: a row of a row group of a table, in a build's folder."""

    directory: Path
    table: Path
    group: int
    row: int
    is_shard: bool


class StoredAnswers:
    """Answers that are stored already, by row id: read when they are asked for, never all at once.

    Another process may finish the build they are in, or remove it, at any time; an answer that
    cannot be read then is one that is not known.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        # Chunks are sorted alike in every build, so that a few tables serve many rows in a row.
        self._group = functools.lru_cache(maxsize=4)(_group_of)
        self._is_whole = functools.cache(storage.is_shard_whole)

    def add_table(self, directory: Path, table: Path, *, is_shard: bool = True) -> int:
        """Take note of the answers in a table; returns how many are new.

        A shard is compared with the file kept with it before a row of it is used.
        """
        num_before = len(self._places)
        try:
            file = pq.ParquetFile(table)
            for group in range(file.num_row_groups):
                columns = file.read_row_group(group, columns=["row_id", "status"]).to_pylist()
                for row, told in enumerate(columns):
                    if told["status"] in ("completed", "truncated"):
                        place = _Place(directory, table, group, row, is_shard)
                        self._places.setdefault(told["row_id"], place)
        except _UNREADABLE as error:
            logger.warning("%s cannot be read (%s); nothing is taken from it", table, error)
        return len(self._places) - num_before

    def get(self, row_id: str, prompt_token_ids: Sequence[int], seed: int) -> Completion | None:
        """The stored answer to the same ids with the same seed; its states, if kept, come too."""
        place = self._places.get(row_id)
        if place is None:
            return None
        try:
            if place.is_shard and not self._is_whole(place.table, place.directory):
                return None
            rows = self._group(place.table, place.group)
            return _completion(place, rows, prompt_token_ids, seed)
        except _UNREADABLE as error:
            logger.warning("%s cannot be read (%s); its rows are asked", place.table, error)
            return None


def _group_of(table: Path, group: int) -> pa.Table:
    return pq.ParquetFile(table).read_row_group(group)


def _completion(
    place: _Place, rows: pa.Table, prompt_token_ids: Sequence[int], seed: int
) -> Completion | None:
    (row,) = rows.slice(place.row, 1).to_pylist()
    if row["seed"] != seed or row["prompt_token_ids"] != list(prompt_token_ids):
        return None
    hidden_TD, logsumexp_T = None, None
    if row["target_file"] is not None and kind_of_file(row["target_file"]) == "final_hidden":
        hidden_TD, logsumexp_T = _states(
            place.directory / row["target_file"],
            row["target_offset"],
            len(row["completion_token_ids"]),
        )
    return Completion(
        prompt_index=0,
        sample_index=row["sample_index"],
        token_ids=tuple(row["completion_token_ids"]),
        finish_reason=row["finish_reason"],
        hidden_TD=hidden_TD,
        logsumexp_T=logsumexp_T,
    )


def find_stored_answers(
    own: Path, settings: Mapping[str, Any], finished: Artifact | None = None
) -> StoredAnswers:
    """Collect what was answered before with these settings.

    That is: what this build, in the folder ``own``, set aside for its failed rows; what a
    ``finished`` build holds whose failed rows are asked again; and what killed builds of other
    prompts, but equal settings, have answered, so that a corpus that lost or gained rows resumes.
    A chunk whose settings differ is left alone, and the difference is named.
    """
    found = StoredAnswers()
    for path in sorted((own / "work").glob(storage.REOPENED_FILES)):
        found.add_table(own, path)
    if finished is not None:
        table = finished.file(storage.COMPLETIONS_FILE)
        found.add_table(finished.path, table, is_shard=False)
    for directory in sorted(own.parent.glob(_UNFINISHED)):
        if directory == own:
            continue
        num_found, differing = 0, set[str]()
        for shard in sorted((directory / "work").glob(storage.SHARD_FILES)):
            theirs = storage.read_shard_settings(shard)
            if not theirs:
                logger.warning("%s is damaged; nothing is taken from it", shard)
            elif without_corpus(theirs) != without_corpus(settings):
                differing.add(listed(describe_changes(theirs, settings)))
            else:
                num_found += found.add_table(directory, shard)
        for changes in sorted(differing):
            logger.warning("%s is unfinished; this run differs from it in: %s", directory, changes)
        if num_found:
            logger.info("%d answers of %s can be taken over", num_found, directory.name)
    return found


def without_corpus(parts: Mapping[str, Any]) -> str:
    """The fingerprint of the same settings whatever the prompts are."""
    revisions = {name: value for name, value in parts["revisions"].items() if name != "corpus"}
    others = {name: value for name, value in parts.items() if name != CORPUS_SHA256}
    return fingerprint({**others, "revisions": revisions})


def _states(path: Path, offset: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        rows = slice(offset, offset + count)
        return file.get_slice("hidden_ND")[rows], file.get_slice("logsumexp_N")[rows]
