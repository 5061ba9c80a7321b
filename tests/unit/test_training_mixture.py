"""Owns text of two origins in one training: the share of each, and who is asked about a row.

Refuses to know how either text is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from distill.artifacts import Artifact, ArtifactStore
from distill.errors import ConfigError
from distill.losses import FullKnowledge
from distill.training import mixture
from distill.training.data import Row, TargetFiles, read_rows
from distill.training.mixture import MixedSource, check_mixable, mix_rollouts
from tests.distill_helpers import make_generated


@pytest.fixture(scope="module")
def generated(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair_dirs: tuple[Path, Path]
) -> Artifact:
    return make_generated(ArtifactStore(tmp_path_factory.mktemp("store")), tiny_pair_dirs[0])


def _row(name: str, num_positions: int) -> Row:
    positions_N = np.arange(num_positions)
    return Row(name, np.zeros(num_positions, dtype=np.int64), positions_N, "", positions_N)


class Constant:
    """Knows one number of every position."""

    def __init__(self, value: float) -> None:
        self._value = value

    def of(self, rows: Sequence[Row]) -> FullKnowledge:
        number = sum(row.num_positions for row in rows)
        return FullKnowledge(torch.full((number, 1), self._value), torch.full((number,), 7.0))


def test_each_row_is_asked_of_its_own_source_and_the_order_stays() -> None:
    rows = [_row("a", 2), _row("x", 1), _row("y", 3), _row("b", 1)]
    known = MixedSource(Constant(1.0), Constant(2.0), {"x", "y"}).of(rows)
    assert isinstance(known, FullKnowledge)
    assert known.hidden_ND[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0]
    assert known.logsumexp_N is not None
    assert len(known.logsumexp_N) == 7


@pytest.mark.parametrize(
    ("num_mine", "num_theirs", "fraction"),
    [(200, 60, 0.5), (60, 200, 0.5), (100, 100, 0.25), (100, 100, 0.9), (50, 80, 1.0)],
)
def test_the_share_of_the_drafts_text_is_the_fraction_and_none_is_repeated(
    generated: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    num_mine: int,
    num_theirs: int,
    fraction: float,
) -> None:
    mine = [_row(f"mine-{i}", 2 + i % 3) for i in range(num_mine)]
    theirs = [_row(f"theirs-{i}", 2 + i % 3) for i in range(num_theirs)]
    monkeypatch.setattr(mixture, "read_rows", lambda *_, **__: theirs)
    mixed, _ = mix_rollouts(
        mine, Constant(1.0), generated, fraction=fraction, max_length=512, seed=3
    )
    names = [row.row_id for row in mixed]
    assert len(set(names)) == len(names)
    written = sum(row.num_positions for row in mixed if row.row_id.startswith("theirs"))
    total = sum(row.num_positions for row in mixed)
    assert written / total == pytest.approx(fraction, abs=0.03)
    # one of the two is used up
    whole = {name.partition("-")[0] for name in names if names}
    used = {side: sum(n.startswith(side) for n in names) for side in whole}
    assert used.get("mine") in (num_mine, num_mine - 1) or used["theirs"] >= num_theirs - 1


def test_the_sample_depends_on_the_seed_alone(
    generated: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [_row(f"mine-{i}", 3) for i in range(50)]
    theirs = [_row(f"theirs-{i}", 3) for i in range(10)]
    monkeypatch.setattr(mixture, "read_rows", lambda *_, **__: theirs)

    def names(seed: int) -> list[str]:
        mixed, _ = mix_rollouts(
            mine, Constant(1.0), generated, fraction=0.5, max_length=512, seed=seed
        )
        return [row.row_id for row in mixed]

    assert names(1) == names(1)
    assert set(names(1)) != set(names(2))


def test_real_files_of_two_artifacts_mix(generated: Artifact, tmp_path: Path) -> None:
    rows = read_rows(generated, "train", max_length=512)
    source = TargetFiles(generated)
    mixed = MixedSource(source, source, {rows[1].row_id}).of(rows[:3])
    whole = source.of(rows[:3])
    assert isinstance(mixed, FullKnowledge)
    assert isinstance(whole, FullKnowledge)
    assert torch.equal(mixed.hidden_ND, whole.hidden_ND)


def test_a_store_that_keeps_part_of_each_law_cannot_be_mixed(
    generated: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mixable(generated)
    monkeypatch.setattr(mixture, "kind_in", lambda _: "top_k")
    with pytest.raises(ConfigError, match=r"target_store: top_k.*final_hidden or none"):
        check_mixable(generated)
