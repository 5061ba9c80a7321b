"""Owns the training text: rows in memory, what is known of the target there, batches, their order.

Refuses to know losses, models and optimisers.

B rows of a batch, T positions, N positions that carry loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from distill.artifacts import Artifact
from distill.errors import TrainingError
from distill.losses import TargetKnowledge
from distill.target_store.files import StoredTarget

Ints = np.ndarray[Any, np.dtype[np.int64]]

_COMPLETIONS = "completions.parquet"
_USABLE = ("completed", "truncated")
_ID_COLUMNS = ("prompt_token_ids", "completion_token_ids", "loss_mask")
# Rows are sorted by length inside a pool of this many micro-batches: little padding, and the
# micro-batches of a step still mix lengths, because they are shuffled afterwards.
_POOL_MICRO_BATCHES = 16


@dataclass(frozen=True)
class Row:
    """One answer of the target, with the positions whose next token is trained on.

    `input_ids_T` is prompt and completion without its last id, which nothing follows.
    `positions_N` index it; `target_rows_N` index the file `target_file` of the target store: what
    is there is known of the target at the same position. Without a store the name is empty.
    """

    row_id: str
    input_ids_T: Ints
    positions_N: Ints
    target_file: str
    target_rows_N: Ints

    @property
    def length(self) -> int:
        """Tokens fed to the draft."""
        return len(self.input_ids_T)

    @property
    def num_positions(self) -> int:
        """Positions that carry loss."""
        return len(self.positions_N)


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right to one length; causal attention never looks at the padding.

    `flat_positions_N` index the draft's states flattened to [B * T]; `row_index_N` says which
    row each of them is of.
    """

    row_ids: tuple[str, ...]
    input_ids_BT: Tensor
    flat_positions_N: Tensor
    row_index_N: Tensor
    target: TargetKnowledge


def read_rows(
    artifact: Artifact, split: Literal["train", "held_out"], *, max_length: int
) -> list[Row]:
    """Return the answers of a split that train at least one position.

    Positions past `max_length`, the draft's context, are cut off.

    Raises:
        TrainingError: no row of the split has a position to train on.
    """
    table = pq.read_table(artifact.file(_COMPLETIONS))
    rows: list[Row] = []
    num_seen = num_cut = 0
    records = table.select(["row_id", "split", "status", "target_file", "target_offset"])
    for index, record in enumerate(records.to_pylist()):
        if record["split"] != split or record["status"] not in _USABLE:
            continue
        num_seen += 1
        # arrays, not lists of Python integers: a corpus has millions of tokens
        ids = {name: table.column(name)[index].values.to_numpy() for name in _ID_COLUMNS}
        row = _row(record, max_length, **ids)
        if row is None:
            num_cut += 1
        else:
            rows.append(row)
    if not rows:
        raise TrainingError(
            f"{artifact.path}: the {split!r} split has {num_seen} answers and no position to "
            f"train on ({num_cut} are masked, empty or wholly past the draft's context of "
            f"{max_length} tokens). Generate more answers, raise corpus.held_out_fraction when it "
            f"is the held-out split that is empty, or use a draft with a longer context."
        )
    return rows


def _row(
    record: dict[str, Any],
    max_length: int,
    *,
    prompt_token_ids: Ints,
    completion_token_ids: Ints,
    loss_mask: Ints,
) -> Row | None:
    num_prompt = len(prompt_token_ids)
    if not num_prompt or not len(completion_token_ids):
        return None
    ids = np.concatenate([prompt_token_ids, completion_token_ids]).astype(np.int64)
    assert len(loss_mask) == len(ids), "loss_mask covers prompt and completion"
    # the state at position t predicts the id at t + 1
    positions_N = np.flatnonzero(loss_mask[1:])
    positions_N = positions_N[(positions_N >= num_prompt - 1) & (positions_N < max_length)]
    if not len(positions_N):
        return None
    target_rows_N = positions_N - (num_prompt - 1) + (record["target_offset"] or 0)
    # nothing is learnt from what follows the last trained position
    ids = ids[: positions_N[-1] + 1]
    return Row(record["row_id"], ids, positions_N, record["target_file"] or "", target_rows_N)


class TargetSource(Protocol):
    """Who knows the target at the positions of rows: a store's files, or the target itself."""

    def of(self, rows: Sequence[Row]) -> TargetKnowledge:
        """Return what is known at the rows' positions, in their order."""
        ...


class TargetFiles:
    """What generate stored."""

    def __init__(self, artifact: Artifact) -> None:
        self._stored = StoredTarget(artifact)

    def of(self, rows: Sequence[Row]) -> TargetKnowledge:
        """Read it; see :class:`TargetSource`."""
        return self._stored.at(
            [(row.target_file, torch.from_numpy(row.target_rows_N)) for row in rows]
        )


def pad(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Return (input_ids_BT, flat_positions_N) of rows padded to one length."""
    width = max(row.length for row in rows)
    input_ids_BT = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        input_ids_BT[index, : row.length] = row.input_ids_T
    flat_N = np.concatenate([index * width + row.positions_N for index, row in enumerate(rows)])
    return torch.from_numpy(input_ids_BT), torch.from_numpy(flat_N)


def collate(rows: Sequence[Row], source: TargetSource) -> Batch:
    """Pad rows to one length and gather what is known of the target at their positions."""
    input_ids_BT, flat_positions_N = pad(rows)
    row_index_N = np.repeat(np.arange(len(rows)), [row.num_positions for row in rows])
    return Batch(
        row_ids=tuple(row.row_id for row in rows),
        input_ids_BT=input_ids_BT,
        flat_positions_N=flat_positions_N,
        row_index_N=torch.from_numpy(row_index_N),
        target=source.of(rows),
    )


def pack_by_length(
    rows: Sequence[Row], order: Sequence[int], micro_batch_tokens: int
) -> list[list[int]]:
    """Cut row indices, in the order given, into micro-batches of at most that many padded tokens.

    A row longer than the budget is a micro-batch of its own.
    """
    packed: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, rows[index].length)
        if not packed or longest * (len(packed[-1]) + 1) > micro_batch_tokens:
            packed.append([])
            longest = rows[index].length
        packed[-1].append(index)
    return packed


def plan_epoch(
    rows: Sequence[Row], *, batch_tokens: int, micro_batch_tokens: int, seed: int, epoch: int
) -> list[list[list[int]]]:
    """Return the steps of an epoch, each a list of micro-batches of row indices.

    Every row is in exactly one step. A step has about `batch_tokens` positions that carry loss;
    the remainder is spread over all steps, so that none is much smaller than the others. The
    order depends on (seed, epoch) alone: a resumed run needs no memory of it.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(rows))
    micro_batches: list[list[int]] = []
    pool: list[int] = []
    pool_tokens = 0
    for index in order.tolist():
        pool.append(index)
        pool_tokens += rows[index].length
        if pool_tokens >= _POOL_MICRO_BATCHES * micro_batch_tokens:
            micro_batches += pack_by_length(rows, _by_length(rows, pool), micro_batch_tokens)
            pool, pool_tokens = [], 0
    micro_batches += pack_by_length(rows, _by_length(rows, pool), micro_batch_tokens)
    micro_batches = [micro_batches[i] for i in generator.permutation(len(micro_batches))]
    return _group(rows, micro_batches, batch_tokens)


def _by_length(rows: Sequence[Row], pool: list[int]) -> list[int]:
    return sorted(pool, key=lambda index: (rows[index].length, index))


def _group(
    rows: Sequence[Row], micro_batches: list[list[int]], batch_tokens: int
) -> list[list[list[int]]]:
    counts = [sum(rows[index].num_positions for index in micro) for micro in micro_batches]
    total = sum(counts)
    num_steps = min(len(micro_batches), max(1, round(total / batch_tokens)))
    steps: list[list[list[int]]] = [[] for _ in range(num_steps)]
    done = 0
    for micro, count in zip(micro_batches, counts, strict=True):
        # the step in which the middle of this micro-batch falls
        steps[min(num_steps - 1, (2 * done + count) * num_steps // (2 * total))].append(micro)
        done += count
    return [step for step in steps if step]


def plan_steps(
    rows: Sequence[Row], *, batch_tokens: int, micro_batch_tokens: int, seed: int, start: int = 0
) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield (epoch, micro-batches) of step `start`, `start` + 1, ... without end."""
    epoch = step = 0
    while True:
        plan = plan_epoch(
            rows,
            batch_tokens=batch_tokens,
            micro_batch_tokens=micro_batch_tokens,
            seed=seed,
            epoch=epoch,
        )
        for micro_batches in plan[max(0, start - step) :]:
            yield epoch, micro_batches
        step += len(plan)
        epoch += 1
