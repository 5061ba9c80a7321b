"""Owns the tests of what a manifest may be, and of what a user is told to do about a bad one.

Refuses to build artifacts of any stage: a manifest is enough.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.artifacts import Artifact, ArtifactStore
from distill.config import Config
from distill.errors import ArtifactCorruptError, ArtifactError, ArtifactMissingError
from distill.manifest import neighbour, read_manifest, way_out


class Settings(Config):
    """Stands in for a stage's settings."""

    seed: int = 0


def _built(root: Path, stage: str = "train", seed: int = 0) -> Artifact:
    store = ArtifactStore(root)

    def build(partial: Path) -> dict[str, Any]:
        (partial / "a.txt").write_text("x")
        return {"wall_s": 1.0}

    return store.get_or_build(store.key(stage, 1, Settings(seed=seed)), build)


def _edit(artifact: Artifact, **changes: Any) -> None:
    path = artifact.path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["photos", "tmp", "0123456789abc", "0123456789AB"])
def test_a_folder_that_the_store_did_not_make_is_never_said_to_be_deleted(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with pytest.raises(ArtifactMissingError, match=r"no manifest\.json") as caught:
        read_manifest(folder)
    assert "elete" not in str(caught.value)
    assert "STAGE/FINGERPRINT" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", '{"schema_version": 1}', "[" * 100_000])
def test_a_manifest_of_another_tool_is_no_reason_to_delete_its_folder(
    text: str, tmp_path: Path
) -> None:
    folder = tmp_path / "extension"
    folder.mkdir()
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError) as caught:
        read_manifest(folder)
    assert "elete" not in str(caught.value)


def test_an_artifact_of_the_store_may_be_deleted_or_built_again(tmp_path: Path) -> None:
    artifact = _built(tmp_path)
    partial = artifact.path.with_name(f"{artifact.fingerprint}.partial")
    for folder in (artifact.path, partial):
        assert f"Delete {folder}, or build it again" in way_out(folder)
    (artifact.path / "manifest.json").unlink()
    with pytest.raises(ArtifactMissingError, match=r"Delete .*--rerun train"):
        ArtifactStore(tmp_path).load(artifact.path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": 5}, "config is a int, not a dict"),
        ({"inputs": []}, "inputs is a list, not a dict"),
        ({"code": None}, "code is a NoneType, not a dict"),
        ({"files": {}}, "files is a dict, not a list"),
        ({"files": [5]}, "in files: 5 is no table"),
        ({"files": [{"path": "a.txt"}]}, "missing or unknown: bytes, sha256"),
        (
            {"files": [{"path": 1, "bytes": 1, "sha256": "0"}]},
            "in files: path is a int, not a str",
        ),
        ({"metrics": "none"}, "metrics is a str, not a dict"),
        ({"schema_version": True}, "schema_version is a bool, not a int"),
        ({"config": {"rate": float("nan")}}, "is not JSON"),
    ],
)
def test_a_manifest_with_values_of_another_kind_is_corrupt_and_no_traceback(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    artifact = _built(tmp_path)
    _edit(artifact, **changes)
    with pytest.raises(ArtifactCorruptError) as caught:
        ArtifactStore(tmp_path).load(artifact.path)
    assert words in str(caught.value)
    assert str(artifact.path) in str(caught.value)


def test_a_measurement_is_built_again_by_the_command_that_takes_pairs_too() -> None:
    assert "(distill measure CONFIG --rerun)" in way_out(Path("store/measure/0123456789ab"))
    assert "(distill run CONFIG --rerun train)" in way_out(Path("store/train/0123456789ab"))


def test_a_neighbour_is_read_without_its_payload_and_only_if_it_is_the_one(tmp_path: Path) -> None:
    one, two = _built(tmp_path), _built(tmp_path, "other", seed=1)
    two.file("a.txt").unlink()
    assert neighbour(one, "other", two.fingerprint) == two.manifest
    assert neighbour(one, "train", two.fingerprint) is None
    assert neighbour(one, "other", two.fingerprint[:12] + "0" * 52) is None
