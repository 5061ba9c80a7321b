"""How completions are stored: tables of rows, files of the target store, counts of token ids.

Refuses to know how completions are made. Everything appears whole or not at all, under its name.

``completions.parquet`` has one row an answer (``SCHEMA``): ``row_id``, ``prompt_id``, ``task``,
``split`` ("train" or "held_out"; both are answered), ``prompt_token_ids``,
``completion_token_ids`` (the stop token is the last id when ``finish_reason`` is "stop"),
``loss_mask`` (0 for each prompt id, then 1 for each completion id), ``status`` and, for the last
two of these, its ``reason``: "completed" (it stopped), "truncated" (``max_new_tokens`` or the
context ended it), "rejected" (the prompt cannot be answered), "failed" (no answer came);
``turn_index``, which answer of a conversation it is (a row a turn: ``prompt_token_ids`` then hold
all that was said before, the target's own answers included); ``sampling_index`` into the config's
``samplings`` with its ``temperature``, ``sample_index``,
``seed``; ``target_file`` and ``target_offset``, where what is kept of the target begins: row n of
a completion is at ``target_offset + n``. A rejected prompt has one row, with neither ids nor
anything kept. A conversation that ended early has no row for the turns that were not asked; the
``reason`` of its last row says so.

The files of the target store have one row a completion id, of what the target knew before it:

- ``hidden-00000.safetensors``, ... (``target_store: final_hidden``): ``hidden_ND`` (bfloat16), the
  final hidden state, and ``logsumexp_N`` (float32), the log-sum-exp of the raw logits it gave to
  the ids of the tokenizer (padded rows of the head left out).
- ``top_k-00000.safetensors``, ... (``top_k``): ``id_low_NK`` (uint16), ``id_high2_NH`` (the two
  bits above them, packed; or 4, or 8; absent where the vocabulary has none), ``log_prob_NK``
  (uint16, multiples of -32 / 65535) and ``tail_mass_NT`` (float32, at temperature 1 and 0.7).
- ``sampled-00000.safetensors``, ... (``sampled``): ``num_entries_N`` (uint8), ``entropy_N``
  (float16) and ``entries_EC`` (uint8), the distinct ids of all positions after each other, each in
  3 or 4 little-endian bytes: the id above six bits of its count less one.

``vocabulary.parquet`` holds ``token_id`` and ``count``: how often an id occurs in the completions
of the train split, most frequent first.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from distill.files import TEMP_SUFFIX, sha256_of, sync

if TYPE_CHECKING:
    import torch

COMPLETIONS_FILE = "completions.parquet"
VOCABULARY_FILE = "vocabulary.parquet"

Status = Literal["completed", "truncated", "rejected", "failed"]

_IDS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("prompt_id", pa.string()),
        ("task", pa.string()),
        ("split", pa.string()),
        ("prompt_token_ids", _IDS),
        ("completion_token_ids", _IDS),
        ("loss_mask", pa.list_(pa.int8())),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("finish_reason", pa.string()),
        ("sampling_index", pa.int32()),
        ("temperature", pa.float64()),
        ("sample_index", pa.int32()),
        ("turn_index", pa.int32()),
        ("seed", pa.int64()),
        ("target_file", pa.string()),
        ("target_offset", pa.int64()),
    ]
)
_VOCABULARY_SCHEMA = pa.schema([("token_id", pa.int32()), ("count", pa.int64())])


_SETTINGS = b"distill.settings"
_TARGET_FILE, _TARGET_SHA256 = b"distill.target_file", b"distill.target_sha256"


SHARD_FILES, REOPENED_FILES = "shard-*.parquet", "reopened-*.parquet"


def shard_path(directory: Path, chunk_index: int) -> Path:
    """Where the rows of a chunk lie until they are merged."""
    return directory / "work" / f"shard-{chunk_index:05d}.parquet"


def reopened_path(directory: Path, chunk_index: int) -> Path:
    """Where they lie while those of them that failed are asked again."""
    return directory / "work" / f"reopened-{chunk_index:05d}.parquet"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of ``SCHEMA`` as one parquet file, atomically; absent columns are null."""
    write_table(path, pa.Table.from_pylist(list(rows), schema=SCHEMA))


def write_shard(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    target_file: Path | None,
) -> None:
    """Write the rows of a chunk with the settings that made them and the hash of what is kept."""
    notes = {_SETTINGS: json.dumps(settings, sort_keys=True).encode()}
    if target_file is not None:
        notes[_TARGET_FILE] = target_file.name.encode()
        notes[_TARGET_SHA256] = sha256_of(target_file).encode()
    write_table(path, pa.Table.from_pylist(list(rows), schema=SCHEMA.with_metadata(notes)))


def read_shard_settings(path: Path) -> dict[str, Any]:
    """The settings a shard was made with; empty for a file that is no whole shard."""
    try:
        notes = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid):
        return {}
    settings: dict[str, Any] = json.loads(notes.get(_SETTINGS, b"{}"))
    return settings


def is_shard_whole(path: Path, directory: Path) -> bool:
    """Whether a shard's rows can be read and the file kept with it is the one written then."""
    try:
        notes = pq.read_table(path).schema.metadata or {}
    except (OSError, pa.ArrowInvalid):
        return False
    expected: bytes | None = notes.get(_TARGET_SHA256)
    if expected is None:
        return True
    kept = directory / notes[_TARGET_FILE].decode()
    return kept.is_file() and sha256_of(kept) == expected.decode()


def write_table(path: Path, table: pa.Table) -> None:
    """Write a parquet file so that its name stands for all its rows."""
    with _Replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write what is kept of the target for a chunk, atomically."""
    from safetensors.torch import save_file

    with _Replacing(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        temporary.chmod(0o644)  # written for the owner alone; artifacts are shared


def merge(shards: Iterable[Path], directory: Path) -> Counter[str]:
    """Join shards, in order, into the payload's tables.

    Returns the counts that describe them: rows by status ("num_completed", ...), prompts by status
    ("num_prompts_completed", ...), rows by split and by task, and tokens.
    """
    counts: Counter[str] = Counter()
    token_counts: Counter[int] = Counter()
    statuses: dict[str, set[Status]] = {}
    with (
        _Replacing(directory / COMPLETIONS_FILE) as temporary,
        pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer,
    ):
        for shard in shards:
            table = pq.read_table(shard, schema=SCHEMA)
            writer.write_table(table)
            for row in table.to_pylist():
                _count(row, counts, token_counts)
                statuses.setdefault(row["prompt_id"], set()).add(row["status"])
    counts.update(f"num_prompts_{prompt_status(found)}" for found in statuses.values())
    ordered = sorted(token_counts.items(), key=lambda item: (-item[1], item[0]))
    columns = [[token for token, _ in ordered], [count for _, count in ordered]]
    vocabulary = pa.table(columns, names=_VOCABULARY_SCHEMA.names).cast(_VOCABULARY_SCHEMA)
    write_table(directory / VOCABULARY_FILE, vocabulary)
    return counts


def prompt_status(statuses: Set[Status]) -> Status:
    """What became of a row of the corpus, from its answers: the worst of them counts.

    Answers beside a rejected one (a later turn that no longer fits) leave the row truncated.
    """
    if "failed" in statuses:
        return "failed"
    if statuses == {"rejected"}:
        return "rejected"
    return "completed" if statuses == {"completed"} else "truncated"


def _count(row: Mapping[str, Any], counts: Counter[str], token_counts: Counter[int]) -> None:
    ids = row["completion_token_ids"]
    counts["num_rows"] += 1
    counts[f"num_{row['status']}"] += 1
    counts["num_completion_tokens"] += len(ids)
    counts["num_prompt_tokens"] += len(row["prompt_token_ids"])
    if row["status"] in ("completed", "truncated"):
        counts[f"num_{row['split']}_rows"] += 1
        counts[f"num_rows_of_task/{row['task']}"] += 1
    if row["split"] == "train":
        token_counts.update(ids)


class _Replacing:
    """A temporary name beside ``path`` that becomes ``path``, on the disk, when all went well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # One process writes a file (the artifact's lock, or its shard), so a fixed name is enough:
        # what a kill leaves behind is overwritten, and the store drops the suffix from a payload.
        self._temporary = path.with_name(f".{path.name}{TEMP_SUFFIX}")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            sync(self._temporary)
            os.replace(self._temporary, self._path)
            sync(self._path.parent)
