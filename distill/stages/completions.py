"""How completions are stored: tables of rows, files of hidden states, counts of token ids.

Refuses to know how completions are made. Everything appears whole or not at all, under its name.

``completions.parquet`` has one row an answer (``SCHEMA``): ``row_id``, ``prompt_id``, ``task``,
``split`` ("train" or "held_out"; both are answered), ``prompt_token_ids``,
``completion_token_ids`` (the stop token is the last id when ``finish_reason`` is "stop"),
``loss_mask`` (0 for each prompt id, then 1 for each completion id), ``status`` and, for the last
two of these, its ``reason``: "completed" (it stopped), "truncated" (``max_new_tokens`` or the
context ended it), "rejected" (the prompt cannot be answered), "failed" (no answer came);
``sampling_index`` into the config's ``samplings`` with its ``temperature``, ``sample_index``,
``seed``; ``hidden_file`` and ``hidden_offset``, where the row's states begin. A rejected prompt
has one row, with neither ids nor states.

``hidden-00000.safetensors``, ... hold ``hidden_ND`` (bfloat16) and ``logsumexp_N`` (float32), one
row a completion id: the final hidden state that predicted it, and the log-sum-exp of the raw logits
it gave to the ids of the tokenizer (padded rows of the head left out). Row n of a completion is at
``hidden_offset + n``.

``vocabulary.parquet`` holds ``token_id`` and ``count``: how often an id occurs in the completions
of the train split, most frequent first.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from distill.files import TEMP_SUFFIX, sync

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
        ("seed", pa.int64()),
        ("hidden_file", pa.string()),
        ("hidden_offset", pa.int64()),
    ]
)
_VOCABULARY_SCHEMA = pa.schema([("token_id", pa.int32()), ("count", pa.int64())])


def hidden_file_name(chunk_index: int) -> str:
    """The name of a chunk's file of hidden states."""
    return f"hidden-{chunk_index:05d}.safetensors"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of ``SCHEMA`` as one parquet file, atomically; absent columns are null."""
    write_table(path, pa.Table.from_pylist(list(rows), schema=SCHEMA))


def write_table(path: Path, table: pa.Table) -> None:
    """Write a parquet file so that its name stands for all its rows."""
    with _Replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def write_hidden(path: Path, hidden_ND: torch.Tensor, logsumexp_N: torch.Tensor) -> None:
    """Write the states of a chunk, atomically."""
    from safetensors.torch import save_file

    tensors = {"hidden_ND": hidden_ND.contiguous(), "logsumexp_N": logsumexp_N.contiguous()}
    with _Replacing(path) as temporary:
        save_file(tensors, temporary)
        temporary.chmod(0o644)  # written for the owner alone; artifacts are shared


def merge(shards: Iterable[Path], directory: Path) -> Counter[str]:
    """Join shards, in order, into the payload's tables.

    Returns the counts that describe them: rows by status ("num_completed", ...), by split and by
    task, and tokens.
    """
    counts: Counter[str] = Counter()
    token_counts: Counter[int] = Counter()
    with (
        _Replacing(directory / COMPLETIONS_FILE) as temporary,
        pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer,
    ):
        for shard in shards:
            table = pq.read_table(shard, schema=SCHEMA)
            writer.write_table(table)
            for row in table.to_pylist():
                _count(row, counts, token_counts)
    ordered = sorted(token_counts.items(), key=lambda item: (-item[1], item[0]))
    columns = [[token for token, _ in ordered], [count for _, count in ordered]]
    vocabulary = pa.table(columns, names=_VOCABULARY_SCHEMA.names).cast(_VOCABULARY_SCHEMA)
    write_table(directory / VOCABULARY_FILE, vocabulary)
    return counts


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
        # One builder holds the artifact's lock, so a fixed name is enough: what a kill leaves
        # behind is overwritten, and the store drops the suffix from a payload.
        self._temporary = path.with_name(f".{path.name}{TEMP_SUFFIX}")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            sync(self._temporary)
            os.replace(self._temporary, self._path)
            sync(self._path.parent)
