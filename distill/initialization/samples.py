"""Owns the rows that importance is measured on: some of the target's own answers.

Refuses to know what is measured. Only generate's table is read, so any target store will do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

from distill.artifacts import Artifact, atomic_write
from distill.errors import ConfigError

SAMPLES_FILE = "importance_samples.json"

_COLUMNS = ["split", "status", "prompt_token_ids", "completion_token_ids"]


def read_samples(generate: Artifact, num_tokens: int) -> list[list[int]]:
    """Rows of the train split until they hold `num_tokens` tokens.

    A row is a prompt and its answer; the last one is cut. Rows are spread evenly over the
    table, which is sorted by length within a chunk, so that short and long answers both count.

    Raises:
        ConfigError: the artifact has no answer to train on.
    """
    table = pq.read_table(generate.file("completions.parquet"), columns=_COLUMNS)
    is_usable = [
        split == "train" and status in ("completed", "truncated")
        for split, status in zip(
            table.column("split").to_pylist(), table.column("status").to_pylist(), strict=True
        )
    ]
    usable = [index for index, usable in enumerate(is_usable) if usable]
    if not usable:
        raise ConfigError(
            f"{generate.path} has 0 answers in its train split, and importance is measured on "
            f"{num_tokens} tokens of them. Generate more, or name the layers in a list."
        )
    prompts, answers = table.column("prompt_token_ids"), table.column("completion_token_ids")
    samples: list[list[int]] = []
    room = num_tokens
    for index in _spread_order(usable):
        row = [*prompts[index].as_py(), *answers[index].as_py()][:room]
        samples.append(row)
        room -= len(row)
        if room == 0:
            break
    return samples


def write_samples(directory: Path, samples: list[list[int]]) -> None:
    """Keep the rows in a distill artifact: the draft as it started can be built from them again."""
    atomic_write(directory / SAMPLES_FILE, json.dumps({"token_ids": samples}) + "\n")


def stored_samples(distilled: Artifact) -> list[list[int]]:
    """The rows importance was measured on when this draft was started; [] if nothing was."""
    if not any(entry.path == SAMPLES_FILE for entry in distilled.manifest.files):
        return []
    rows: list[list[int]] = json.loads(distilled.file(SAMPLES_FILE).read_text())["token_ids"]
    return rows


def _spread_order(indices: list[int]) -> list[int]:
    """All indices, such that any first part of them is spread over the whole: bit reversal."""
    num_bits = (len(indices) - 1).bit_length()
    order = [int(f"{i:0{num_bits}b}"[::-1], 2) if num_bits else 0 for i in range(1 << num_bits)]
    return [indices[position] for position in order if position < len(indices)]
