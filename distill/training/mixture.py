"""Owns text of two origins in one training: the target's own answers and what the draft wrote.

Refuses to know how either was made, and losses.

Why mix: on its own text a draft learns where it will be asked, behind tokens it proposed itself;
on the target's it learns what is asked most (GKD, Agarwal et al. 2023, arXiv 2306.13649, section 3;
DistillSpec, Zhou et al. 2023, arXiv 2310.08461).

N positions that carry loss, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from distill.artifacts import Artifact
from distill.errors import ConfigError
from distill.losses import FullKnowledge, TargetKnowledge
from distill.target_store.files import kind_in
from distill.training.data import Row, TargetFiles, TargetSource, read_rows


def check_mixable(generated: Artifact) -> None:
    """Check that a store's knowledge can stand beside that of rollouts, which are scored in full.

    Raises:
        ConfigError: it keeps part of each law only.
    """
    kind = kind_in(generated)
    if kind not in ("none", "final_hidden"):
        raise ConfigError(
            f"{generated.path} has target_store: {kind}, and text the draft wrote is scored in "
            f"full; one step cannot mix the two. Set generate.target_store to final_hidden or none."
        )


def mix_rollouts(
    rows: Sequence[Row],
    source: TargetSource,
    rollouts: Artifact,
    *,
    fraction: float,
    max_length: int,
    seed: int,
) -> tuple[list[Row], TargetSource]:
    """Return rows of which about `fraction` of the trained positions are the draft's own text.

    Of the kind there is too much of, a seeded sample is taken; with a fraction of 1 no row of the
    target's is.

    Raises:
        TrainingError: the rollouts have no position to train on.
    """
    theirs = read_rows(rollouts, "train", max_length=max_length)
    mine, written = _positions(rows), _positions(theirs)
    # positions in all such that neither kind has to be repeated
    total = written / fraction if fraction == 1 else min(written / fraction, mine / (1 - fraction))
    mixed = [
        *_sample(rows, total * (1 - fraction), seed),
        *_sample(theirs, total * fraction, seed),
    ]
    return mixed, MixedSource(source, TargetFiles(rollouts), {row.row_id for row in theirs})


class MixedSource:
    """Asks the source each row is of; both know the target in full."""

    def __init__(self, ours: TargetSource, theirs: TargetSource, their_ids: set[str]) -> None:
        self._ours, self._theirs, self._their_ids = ours, theirs, their_ids

    def of(self, rows: Sequence[Row]) -> TargetKnowledge:
        """Return what is known at the rows' positions, in their order."""
        parts = []
        for is_theirs, group in groupby(rows, key=lambda row: row.row_id in self._their_ids):
            source = self._theirs if is_theirs else self._ours
            known = source.of(list(group))
            assert isinstance(known, FullKnowledge), "refused before training"
            parts.append(known)
        device = parts[0].hidden_ND.device
        dtype = parts[0].hidden_ND.dtype
        logsumexps = [part.logsumexp_N for part in parts]
        is_known = all(logsumexp_N is not None for logsumexp_N in logsumexps)
        return FullKnowledge(
            torch.cat([part.hidden_ND.to(device, dtype) for part in parts]),
            torch.cat([x.to(device) for x in logsumexps if x is not None]) if is_known else None,
        )


def _positions(rows: Sequence[Row]) -> int:
    return sum(row.num_positions for row in rows)


def _sample(rows: Sequence[Row], num_positions: float, seed: int) -> list[Row]:
    """Whole rows in a seeded order, until the number is as near as it gets."""
    chosen: list[Row] = []
    missing = num_positions
    for index in np.random.default_rng([seed, len(rows)]).permutation(len(rows)).tolist():
        row = rows[index]
        if row.num_positions > 2 * missing:
            break
        chosen.append(row)
        missing -= row.num_positions
    return chosen
