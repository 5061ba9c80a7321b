"""Owns the token ids a draft may propose, and the file in which they travel with its weights.

Refuses to know how the ids were chosen, and who proposes them.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import ModelNotFoundError
from distill.files import atomic_write
from distill.models.sources import VOCABULARY_FILE, vocabulary_file


@dataclass(frozen=True)
class DraftVocabulary:
    """The token ids a draft may propose, ascending; the rows its head keeps.

    `coverage` is their share of the target's own output tokens. Acceptance cannot exceed the
    probability the target puts on the subset, so it should be close to 1.
    """

    token_ids: tuple[int, ...]
    coverage: float


def write_vocabulary(directory: Path, vocabulary: DraftVocabulary) -> None:
    """Write the subset's file into a model's directory, or into the artifact around it."""
    content = {"coverage": vocabulary.coverage, "token_ids": list(vocabulary.token_ids)}
    atomic_write(directory / VOCABULARY_FILE, json.dumps(content) + "\n")


def read_vocabulary(directory: Path, *, num_rows: int) -> DraftVocabulary | None:
    """Return the subset of the model in `directory`; None: it may propose every token.

    `num_rows`: of the model's embedding, so ids go from 0 to `num_rows` - 1.

    Raises:
        ModelNotFoundError: the file is there, but is not what :func:`write_vocabulary` writes, or
            belongs to a model with more rows. Without its subset it would be another draft.
    """
    path = vocabulary_file(directory)
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or set(content) != {"coverage", "token_ids"}:
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise _unreadable(path, f"it should hold coverage and token_ids, and holds {found}")
    ids, coverage = content["token_ids"], content["coverage"]
    if not _is_number(coverage) or not 0 <= coverage <= 1:
        raise _unreadable(path, f"coverage is {coverage!r}, and a share is from 0 to 1")
    if not isinstance(ids, list) or not ids or not all(type(token_id) is int for token_id in ids):
        raise _unreadable(path, "token_ids is not a list of one or more whole numbers")
    for before, token_id in itertools.pairwise(ids):
        if token_id <= before:
            raise _unreadable(
                path, f"token_ids are ascending, each once, and {token_id} follows {before}"
            )
    if ids[0] < 0 or ids[-1] >= num_rows:
        raise _unreadable(
            path, f"token_ids are {ids[0]} to {ids[-1]}, and the model has 0 to {num_rows - 1}"
        )
    return DraftVocabulary(tuple(ids), float(coverage))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _unreadable(path: Path, why: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{path} does not say which tokens this draft may propose: {why}. Copy the file again from "
        "where the draft was trained, or export the draft again"
    )
