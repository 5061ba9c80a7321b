"""Owns the draft's vocabulary subset: how it is chosen, and its file.

Refuses to know heads and losses; it deals in token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from distill.artifacts import Artifact, atomic_write
from distill.errors import ConfigError

VOCABULARY_FILE = "draft_vocabulary.json"


@dataclass(frozen=True)
class DraftVocabulary:
    """The token ids a draft may propose, ascending; the rows its head keeps.

    `coverage` is their share of the target's own output tokens. Acceptance cannot exceed the
    probability the target puts on the subset, so it should be close to 1.
    """

    token_ids: tuple[int, ...]
    coverage: float


def choose_vocabulary(
    generate: Artifact, size: int, *, num_tokens: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """Return the `size` ids the target emits most often, those of `always` among them.

    Ids never seen fill up in ascending order: in a byte-pair vocabulary a low id is an early,
    hence common, merge. `num_tokens` is the number of ids that exist.

    Raises:
        ConfigError: `size` is larger than the vocabulary, or too small to hold `always`.
    """
    if size > num_tokens:
        raise ConfigError(
            f"distill.vocabulary_size is {size}, but target and draft share {num_tokens} tokens; "
            f"set it lower, or to null for the whole vocabulary"
        )
    kept = {token_id for token_id in always if token_id < num_tokens}
    if size < len(kept):
        raise ConfigError(
            f"distill.vocabulary_size is {size}, but the model has {len(kept)} tokens that end a "
            f"text, which a draft must be able to propose; set it to {len(kept)} or more"
        )
    table = pq.read_table(generate.file("vocabulary.parquet")).to_pylist()
    counts = {record["token_id"]: record["count"] for record in table}
    ranked = sorted(range(num_tokens), key=lambda token_id: (-counts.get(token_id, 0), token_id))
    for token_id in ranked:
        if len(kept) == size:
            break
        kept.add(token_id)
    covered = sum(counts.get(token_id, 0) for token_id in kept)
    return DraftVocabulary(tuple(sorted(kept)), covered / max(1, sum(counts.values())))


def write_vocabulary(directory: Path, vocabulary: DraftVocabulary) -> None:
    """Write the subset's file into an artifact's directory."""
    content = {"coverage": vocabulary.coverage, "token_ids": list(vocabulary.token_ids)}
    atomic_write(directory / VOCABULARY_FILE, json.dumps(content) + "\n")


def read_vocabulary(distilled: Artifact) -> DraftVocabulary | None:
    """Return the subset a distilled draft is restricted to; None: it may propose every token."""
    if not any(entry.path == VOCABULARY_FILE for entry in distilled.manifest.files):
        return None
    content = json.loads(distilled.file(VOCABULARY_FILE).read_text(encoding="utf-8"))
    return DraftVocabulary(tuple(content["token_ids"]), content["coverage"])
