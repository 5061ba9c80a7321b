"""Owns the behaviour of the artifact store: keys, reuse, rebuild, look-up, manifests, messages.
Refuses to know kills and full disks (tests/faults/test_artifact_faults.py) and any real stage.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distill
from distill.artifacts import Artifact, ArtifactKey, ArtifactStore, atomic_write, fingerprint
from distill.config import Config, setting
from distill.errors import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactMissingError,
    ArtifactStaleError,
)


class Settings(Config):
    seed: int = 0
    rate: float = 1e-4
    weights: dict[int, float] = setting({})
    num_workers: int = setting(1, in_fingerprint=False)


Build = Callable[[Path], Mapping[str, Any]]


def build(partial: Path) -> dict[str, Any]:
    (partial / "draft").mkdir(exist_ok=True)
    (partial / "draft" / "model.bin").write_bytes(b"weights")
    (partial / "table.txt").write_text("rows")
    return {"wall_s": 1.5}


def never(partial: Path) -> dict[str, Any]:
    raise AssertionError(f"built again in {partial}")


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def key_of(store: ArtifactStore, **changes: Any) -> ArtifactKey:
    arguments: dict[str, Any] = {
        "stage": "train",
        "code_version": 1,
        "config": Settings(),
        "inputs": {"generate": "a" * 64},
        "revisions": {"target": "rev-1"},
    } | changes
    return store.key(arguments.pop("stage"), arguments.pop("code_version"), arguments.pop("config"),
                     **arguments)  # fmt: skip


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "measure"},
        {"code_version": 2},
        {"config": Settings(seed=1)},
        {"config": Settings(rate=2e-4)},
        {"config": Settings(weights={3: 1.0})},
        {"inputs": {"generate": "b" * 64}},
        {"inputs": {"corpus": "a" * 64}},
        {"inputs": {}},
        {"revisions": {"target": "rev-2"}},
        {"revisions": {"target": "rev-1", "draft": "rev-1"}},
    ],
    ids=str,
)
def test_key_changes_with_each_part(store: ArtifactStore, change: dict[str, Any]) -> None:
    assert key_of(store, **change).fingerprint != key_of(store).fingerprint


def test_field_outside_the_fingerprint_does_not_change_the_key(store: ArtifactStore) -> None:
    assert key_of(store, config=Settings(num_workers=9)) == key_of(store)


def test_key_depends_on_content_not_on_order(store: ArtifactStore) -> None:
    one = key_of(store, revisions={"a": "1", "b": "2"}, config=Settings(weights={2: 1.0, 10: 2.0}))
    two = key_of(store, revisions={"b": "2", "a": "1"}, config=Settings(weights={10: 2.0, 2: 1.0}))
    assert one.fingerprint == two.fingerprint


def test_fingerprint_is_the_sha256_of_canonical_json() -> None:
    # printf '{"a":[1,2.5],"b":"x"}' | sha256sum
    expected = "5cefae54a95b31dc660d6cbbb2198f0811fc70ee37b1cc85b1989870cd293ffb"
    assert fingerprint({"b": "x", "a": [1, 2.5]}) == expected


def test_fingerprint_refuses_numbers_json_does_not_have() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        fingerprint({"a": math.nan})


# --- building and reusing -----------------------------------------------------------------------


def test_build_is_published_under_the_short_fingerprint(store: ArtifactStore) -> None:
    key = key_of(store)
    artifact = store.get_or_build(key, build)
    assert artifact.path == store.root / "train" / key.fingerprint[:12]
    assert artifact.path == store.path(key)
    assert (artifact.stage, artifact.fingerprint) == ("train", key.fingerprint)
    assert artifact.metrics == {"wall_s": 1.5}
    assert not store.partial_dir(key).exists()


def test_manifest_lists_every_payload_file_with_size_and_hash(store: ArtifactStore) -> None:
    files = store.get_or_build(key_of(store), build).manifest.files
    assert [(entry.path, entry.bytes) for entry in files] == [
        ("draft/model.bin", 7),
        ("table.txt", 4),
    ]
    # printf weights | sha256sum
    assert files[0].sha256 == "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"


def test_manifest_says_what_made_it(store: ArtifactStore) -> None:
    manifest = store.get_or_build(key_of(store), build).manifest
    assert manifest.config == {"seed": 0, "rate": 1e-4, "weights": {}}
    assert manifest.inputs == {"generate": "a" * 64}
    assert manifest.revisions == {"target": "rev-1"}
    assert manifest.code["version"] == distill.__version__
    assert manifest.code["code_version"] == 1
    assert set(manifest.code) == {"version", "git_sha", "dirty", "code_version"}
    assert {"python", "torch", "transformers"} <= set(manifest.packages)
    assert manifest.hardware["cpu_count"] >= 1
    assert manifest.started <= manifest.finished
    assert manifest.finished.endswith("+00:00")


def test_second_call_reuses_and_logs_one_line(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = store.get_or_build(key_of(store), build)
    with caplog.at_level(logging.INFO, logger="distill"):
        caplog.clear()
        assert store.get_or_build(key_of(store), never) == first
    assert [record.getMessage() for record in caplog.records] == [f"train: reusing {first.path}"]


def test_equal_builds_have_equal_payload_entries(tmp_path: Path) -> None:
    stores = [ArtifactStore(tmp_path / name) for name in ("one", "two")]
    one, two = (store.get_or_build(key_of(store), build).manifest.files for store in stores)
    assert one == two


def test_a_changed_key_builds_beside_the_old_one(store: ArtifactStore) -> None:
    old = store.get_or_build(key_of(store), build)
    new = store.get_or_build(key_of(store, config=Settings(seed=1)), build)
    assert old.path.is_dir()
    assert new.path != old.path


def test_rebuild_replaces_only_when_asked(store: ArtifactStore) -> None:
    key = key_of(store)
    store.get_or_build(key, build)

    def build_better(partial: Path) -> dict[str, Any]:
        assert list(partial.iterdir()) == []
        (partial / "table.txt").write_text("better rows")
        return {}

    artifact = store.get_or_build(key, build_better, rebuild=True)
    assert artifact.file("table.txt").read_text() == "better rows"
    assert not (artifact.path / "draft").exists()
    assert store.find(key) == artifact
    assert sorted(path.name for path in (store.root / "train").iterdir()) == [artifact.path.name]


def test_scratch_and_temporary_files_are_not_published(store: ArtifactStore) -> None:
    def build_with_scratch(partial: Path) -> dict[str, Any]:
        (partial / "work").mkdir()
        (partial / "work" / "shard-0").write_text("x")
        (partial / ".table.txt.12345678.distill-tmp").write_text("half")
        return build(partial)

    artifact = store.get_or_build(key_of(store), build_with_scratch)
    found = {path.relative_to(artifact.path).as_posix() for path in artifact.path.rglob("*")}
    assert found == {"draft", "draft/model.bin", "table.txt", "manifest.json"}


def test_links_in_a_payload_are_refused(store: ArtifactStore, tmp_path: Path) -> None:
    def build_link(partial: Path) -> dict[str, Any]:
        (partial / "link").symlink_to(tmp_path)
        return {}

    with pytest.raises(ArtifactError, match="is a link"):
        store.get_or_build(key_of(store), build_link)


def test_metrics_become_plain_json(store: ArtifactStore, caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"a": np.float32(0.5), "b": (np.int64(2), True), "c": {"d": math.nan, 3: None}}
    artifact = store.get_or_build(key_of(store), lambda partial: metrics)
    assert artifact.metrics == {"a": 0.5, "b": [2, True], "c": {"d": None, "3": None}}
    assert store.load(artifact.path).metrics == artifact.metrics
    assert "metrics.c.d is nan" in caplog.text


def test_metrics_that_json_cannot_hold_are_named(store: ArtifactStore) -> None:
    with pytest.raises(ArtifactError, match=r"metrics\.a\.0 is a PosixPath"):
        store.get_or_build(key_of(store), lambda partial: {"a": [partial]})


# --- messages on a miss -------------------------------------------------------------------------


def test_explain_miss_names_the_key_that_differs(store: ArtifactStore) -> None:
    assert store.explain_miss(key_of(store)) is None
    near = store.get_or_build(key_of(store), build)
    store.get_or_build(key_of(store, config=Settings(seed=7, rate=0.5), code_version=3), build)
    key = key_of(store, config=Settings(seed=7))
    assert store.explain_miss(key) == (
        f"nearest is {near.path.name}, which differs in config.seed 0 -> 7"
    )
    assert store.explain_miss(key_of(store)) is None


def test_explain_miss_covers_every_part_and_cuts_long_lists(store: ArtifactStore) -> None:
    store.get_or_build(key_of(store), build)
    key = key_of(
        store,
        code_version=2,
        config=Settings(seed=1, rate=1.0, weights={n: 1.0 for n in range(5)}),
        inputs={"generate": "b" * 64},
        revisions={"draft": "rev-9"},
    )
    message = store.explain_miss(key) or ""
    assert "code_version 1 -> 2" in message
    assert "and 6 more" in message
    few = store.explain_miss(key_of(store, revisions={"draft": "rev-9"})) or ""
    assert 'revisions.draft (absent) -> "rev-9"' in few
    assert 'revisions.target "rev-1" -> (absent)' in few


def test_a_miss_is_logged_with_its_reason(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="distill"):
        store.get_or_build(key_of(store), build)
        store.get_or_build(key_of(store, config=Settings(seed=1)), build)
        store.get_or_build(key_of(store), build, rebuild=True)
    assert "nothing like it yet" in caplog.text
    assert "config.seed 0 -> 1" in caplog.text
    assert "asked to rebuild" in caplog.text


def test_explain_miss_passes_over_manifests_it_cannot_read(store: ArtifactStore) -> None:
    artifact = store.get_or_build(key_of(store), build)
    (artifact.path / "manifest.json").write_text("{")
    assert store.explain_miss(key_of(store, config=Settings(seed=1))) is None


# --- look-up ------------------------------------------------------------------------------------


def test_load_accepts_a_path_a_relative_path_and_leading_digits(store: ArtifactStore) -> None:
    artifact = store.get_or_build(key_of(store), build)
    digits = artifact.fingerprint
    for reference in (
        artifact.path,
        str(artifact.path),
        f"train/{digits[:12]}",
        digits,
        digits[:5],
    ):
        assert store.load(reference) == artifact


def test_load_lists_what_there_is(store: ArtifactStore) -> None:
    with pytest.raises(ArtifactMissingError, match="none yet"):
        store.load("abcdef")
    artifact = store.get_or_build(key_of(store), build)
    with pytest.raises(ArtifactMissingError, match=f"Candidates: train/{artifact.path.name}"):
        store.load("no-such")
    with pytest.raises(ArtifactMissingError, match="Candidates"):
        store.load(artifact.fingerprint[:3])


def test_ambiguous_digits_list_the_candidates(store: ArtifactStore) -> None:
    for name in ("abcdef000001", "abcdef000002"):
        (store.root / "train" / name).mkdir(parents=True)
        (store.root / "train" / name / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactMissingError, match="train/abcdef000001, train/abcdef000002"):
        store.load("abcdef")


def test_load_refuses_an_unfinished_build(store: ArtifactStore) -> None:
    partial = store.partial_dir(key_of(store))
    partial.mkdir(parents=True)
    with pytest.raises(ArtifactMissingError, match="unfinished build"):
        store.load(partial)


def test_load_refuses_a_directory_that_is_no_artifact(store: ArtifactStore, tmp_path: Path) -> None:
    with pytest.raises(ArtifactMissingError, match=r"has no manifest\.json"):
        store.load(tmp_path)


def test_find_does_not_build(store: ArtifactStore) -> None:
    assert store.find(key_of(store)) is None
    assert not store.root.exists()


def test_root_may_be_relative_to_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ArtifactStore("~/runs").root == tmp_path / "runs"


def test_file_is_looked_up_in_the_manifest(store: ArtifactStore) -> None:
    artifact = store.get_or_build(key_of(store), build)
    assert artifact.file("draft/model.bin").read_bytes() == b"weights"
    assert artifact.file("draft").is_dir()
    (artifact.path / "stray.txt").write_text("not listed")
    with pytest.raises(ArtifactMissingError, match=r"'stray\.txt'.*draft/model\.bin, table\.txt"):
        artifact.file("stray.txt")


def test_expect_names_both_stages(store: ArtifactStore) -> None:
    artifact = store.get_or_build(key_of(store), build)
    assert artifact.expect("train") is artifact
    with pytest.raises(ArtifactError, match=r"'train'.*'measure'"):
        artifact.expect("measure")


# --- damage -------------------------------------------------------------------------------------


def damaged(store: ArtifactStore, damage: Callable[[Artifact], object]) -> str:
    """Message of the error that the damage causes in find, load and get_or_build alike."""
    key = key_of(store)
    artifact = store.get_or_build(key, build)
    damage(artifact)
    messages = set()
    uses: list[Callable[[], object]] = [
        lambda: store.find(key),
        lambda: store.load(artifact.path),
        lambda: store.get_or_build(key, never),
    ]
    for use in uses:
        with pytest.raises(ArtifactError) as caught:
            use()
        messages.add(f"{type(caught.value).__name__}: {caught.value}")
    assert len(messages) == 1
    return messages.pop()


def test_changed_byte_is_found_with_both_hashes_and_the_way_out(store: ArtifactStore) -> None:
    message = damaged(store, lambda artifact: artifact.file("table.txt").write_text("r0ws"))
    assert message.startswith("ArtifactCorruptError")
    assert "table.txt has sha256 " in message
    assert message.count(" sha256 ") + message.count("says") == 2
    assert "--rerun train" in message


def test_cut_file_is_found_with_both_sizes(store: ArtifactStore) -> None:
    message = damaged(store, lambda artifact: artifact.file("draft/model.bin").write_bytes(b"we"))
    assert "draft/model.bin has 2 bytes, its manifest says 7" in message


def test_missing_file_is_named(store: ArtifactStore) -> None:
    message = damaged(store, lambda artifact: artifact.file("table.txt").unlink())
    assert "table.txt is missing" in message


def test_missing_manifest_is_named(store: ArtifactStore) -> None:
    message = damaged(store, lambda artifact: (artifact.path / "manifest.json").unlink())
    assert message.startswith("ArtifactMissingError")
    assert "has no manifest.json" in message


def edit(artifact: Artifact, **changes: Any) -> None:
    path = artifact.path / "manifest.json"
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def test_manifest_that_is_not_json_is_named(store: ArtifactStore) -> None:
    message = damaged(
        store, lambda artifact: (artifact.path / "manifest.json").write_text('{"stage":')
    )
    assert message.startswith("ArtifactCorruptError")
    assert "manifest.json is not JSON" in message


@pytest.mark.parametrize("version", [2, 0, None, "1"])
def test_unknown_schema_version_names_both(store: ArtifactStore, version: Any) -> None:
    message = damaged(store, lambda artifact: edit(artifact, schema_version=version))
    assert message.startswith("ArtifactStaleError")
    assert f"schema version {version}, this version of distill reads 1" in message


def test_manifest_with_unknown_entries_is_refused(store: ArtifactStore) -> None:
    assert "unknown: colour" in damaged(store, lambda artifact: edit(artifact, colour="red"))


def test_manifest_that_is_not_an_object_is_refused(store: ArtifactStore) -> None:
    message = damaged(store, lambda artifact: (artifact.path / "manifest.json").write_text("[]"))
    assert message.startswith("ArtifactStaleError")


def test_edited_settings_are_found(store: ArtifactStore) -> None:
    message = damaged(store, lambda artifact: edit(artifact, config={"seed": 5}))
    assert "manifest.json was edited" in message


def test_folder_holding_another_key_is_stale(store: ArtifactStore) -> None:
    one, two = key_of(store), key_of(store, config=Settings(seed=1))
    store.get_or_build(one, build)
    store.path(one).rename(store.path(two))
    with pytest.raises(ArtifactStaleError, match=f"{one.fingerprint}.*{two.fingerprint}"):
        store.find(two)


def test_damage_is_mended_by_a_rebuild(store: ArtifactStore) -> None:
    key = key_of(store)
    store.get_or_build(key, build).file("table.txt").write_text("damaged")
    with pytest.raises(ArtifactCorruptError):
        store.get_or_build(key, build)
    assert store.get_or_build(key, build, rebuild=True).file("table.txt").read_text() == "rows"


# --- files --------------------------------------------------------------------------------------


def test_atomic_write_takes_text_and_bytes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    atomic_write(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    atomic_write(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert list(tmp_path.iterdir()) == [path]


def killed(partial: Path) -> dict[str, Any]:
    (partial / "work").mkdir()
    (partial / "work" / "step").write_text("half way")
    (partial / ".tmpA1b2C3").write_bytes(b"half a file under a name of the library that wrote it")
    raise KeyboardInterrupt


def test_what_a_kill_left_beside_the_scratch_is_no_payload(store: ArtifactStore) -> None:
    key = key_of(store)
    with pytest.raises(KeyboardInterrupt):
        store.get_or_build(key, killed)
    artifact = store.get_or_build(key, build)
    assert [entry.path for entry in artifact.manifest.files] == ["draft/model.bin", "table.txt"]


def test_a_killed_rebuild_is_gone_on_with_when_it_is_asked_for_again(store: ArtifactStore) -> None:
    key = key_of(store)
    store.get_or_build(key, build)
    with pytest.raises(KeyboardInterrupt):
        store.get_or_build(key, killed, rebuild=True)

    def resumed(partial: Path) -> dict[str, Any]:
        assert (partial / "work" / "step").read_text() == "half way"
        return build(partial)

    store.get_or_build(key, resumed, rebuild=True)


def test_a_rebuild_does_not_go_on_with_a_first_build(store: ArtifactStore) -> None:
    key = key_of(store)
    with pytest.raises(KeyboardInterrupt):
        store.get_or_build(key, killed)

    def anew(partial: Path) -> dict[str, Any]:
        assert not (partial / "work" / "step").exists()
        return build(partial)

    store.get_or_build(key, anew, rebuild=True)
