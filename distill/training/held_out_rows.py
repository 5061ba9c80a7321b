"""Owns the held-out answers that weights are chosen on, and those that a draft is reported on.

Refuses to know how prompts fall into halves (``distill/held_out.py``) and what is done with rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow.parquet as pq

from distill.artifacts import Artifact
from distill.errors import TrainingError
from distill.held_out import answered_held_out, reporting_half, selection_half
from distill.training.data import Row, read_rows

_COMPLETIONS = "completions.parquet"
_COLUMNS = ["row_id", "prompt_id", "split", "status", "turn_index"]

Half = Callable[[Iterable[str]], frozenset[str]]


def read_selection_rows(generated: Artifact, *, max_length: int) -> list[Row]:
    """The held-out answers to choose weights on: none is of a prompt that measure reports on.

    Raises:
        TrainingError: no such answer has a position to score.
    """
    return _read(generated, selection_half, max_length)


def read_reporting_rows(generated: Artifact, *, max_length: int) -> list[Row]:
    """The held-out answers to report on: none is of a prompt that weights are chosen on.

    Raises:
        TrainingError: no such answer has a position to score.
    """
    return _read(generated, reporting_half, max_length)


def _read(generated: Artifact, half: Half, max_length: int) -> list[Row]:
    rows = read_rows(generated, "held_out", max_length=max_length)
    table = pq.read_table(generated.file(_COMPLETIONS), columns=_COLUMNS).to_pylist()
    prompt_of = {record["row_id"]: record["prompt_id"] for record in table}
    prompts = half(record["prompt_id"] for record in answered_held_out(table))
    chosen = [row for row in rows if prompt_of[row.row_id] in prompts]
    if not chosen:
        raise TrainingError(
            f"{generated.path}: of {len(rows)} held-out answers none is of the {len(prompts)} "
            f"prompts in this half of them ({half.__name__}): their answers are masked, empty or "
            f"past the draft's context of {max_length} tokens. Raise corpus.held_out_fraction, or "
            f"use a draft with a longer context."
        )
    return chosen
