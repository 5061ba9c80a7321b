"""Owns the choice of a draft's vocabulary subset: which tokens it will have to propose.

Refuses to know heads and losses, and how the subset is kept (``models/vocabulary.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow.parquet as pq

from distill.artifacts import Artifact
from distill.errors import ConfigError
from distill.models import DraftVocabulary


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
