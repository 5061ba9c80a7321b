"""Owns what a damaged state of an unfinished training is: an error that says what to delete.

Refuses to know what a state holds; that it is resumed exactly is test_training.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.artifacts import Artifact
from distill.errors import ArtifactCorruptError
from distill.models import LoadedModel
from distill.training.checkpoint import saved_step
from distill.training.run import Followers
from tests.training_helpers import train_draft, training_config


class _Killed(Exception):
    pass


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def _tensors(work: Path) -> list[Path]:
    return sorted(work.glob("*.safetensors"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "state cut": lambda work: _cut(work / "state.json"),
    "state empty": lambda work: (work / "state.json").write_text(""),
    "state of bytes": lambda work: (work / "state.json").write_bytes(b"\xff\xfe\x00garbage"),
    "state of another form": lambda work: (work / "state.json").write_text("[1]"),
    "state without a step": lambda work: (work / "state.json").write_text("{}"),
    "tensors cut": lambda work: [_cut(path) for path in _tensors(work)],
    "tensors gone": lambda work: [path.unlink() for path in _tensors(work)],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_an_error_that_names_the_folder_to_delete(
    target: LoadedModel, generated: Artifact, tmp_path: Path, damage: str
) -> None:
    work, config = tmp_path / "work", training_config()

    def die(step: int, record: dict[str, Any]) -> None:
        if step == 5:
            raise _Killed

    with pytest.raises(_Killed):
        train_draft(target, generated, config, work, followers=Followers(die))
    assert saved_step(work) == 4
    DAMAGES[damage](work)
    with pytest.raises(ArtifactCorruptError) as caught:
        train_draft(target, generated, config, work)
    assert f"Delete {work} " in str(caught.value)
    for path in work.iterdir():
        path.unlink()
    work.rmdir()
    assert train_draft(target, generated, config, work)[1].log[-1]["step"] == 6


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name.startswith("state")])
def test_the_step_of_a_damaged_state_is_the_same_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "state.json").write_text('{"step": 4, "and": "more than twenty bytes"}')
    DAMAGES[damage](tmp_path)
    with pytest.raises(ArtifactCorruptError, match="Delete"):
        saved_step(tmp_path)
