"""Owns what a finished artifact is: manifest, fingerprint, the check of its bytes, comparing two.
Refuses to know where artifacts live and how they come to be.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from distill.errors import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactMissingError,
    ArtifactStaleError,
)
from distill.files import sha256_of, sync

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"

_MAX_LISTED = 6
_MAX_VALUE_CHARS = 48
# Folders that the store makes: only these may a message tell a user to delete.
_OURS = re.compile(r"[0-9a-f]{12}|[0-9a-f]{64}\.(partial|retired)")


@dataclass(frozen=True)
class FileEntry:
    """One payload file: path relative to the artifact (posix), size, sha256 of its bytes."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an artifact is, what it was made from and by what: the content of manifest.json.

    ``inputs`` and ``revisions`` map names to fingerprints and revisions. ``code`` has version,
    git_sha, dirty and code_version. ``started`` and ``finished`` are ISO 8601, UTC. ``metrics``
    are the numbers that may differ between two equal builds.
    """

    schema_version: int
    stage: str
    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, str]
    revisions: dict[str, str]
    files: list[FileEntry]
    code: dict[str, Any]
    packages: dict[str, str]
    hardware: dict[str, Any]
    started: str
    finished: str
    metrics: dict[str, Any]

    @property
    def parts(self) -> dict[str, Any]:
        """The part of it that the fingerprint is taken over, as in ``ArtifactKey.parts``."""
        return {
            "stage": self.stage,
            "code_version": self.code.get("code_version"),
            "config": self.config,
            "inputs": self.inputs,
            "revisions": self.revisions,
        }

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Artifact:
    """A finished directory and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def stage(self) -> str:
        """Name of the stage that built it."""
        return self.manifest.stage

    @property
    def fingerprint(self) -> str:
        """The full fingerprint, 64 hexadecimal digits."""
        return self.manifest.fingerprint

    @property
    def metrics(self) -> dict[str, Any]:
        """What the build returned: numbers that may differ between two equal builds."""
        return self.manifest.metrics

    def file(self, name: str) -> Path:
        """Path of a payload file, or of a payload folder, by its name in the manifest.

        Raises:
            ArtifactMissingError: the manifest lists neither; the message lists what it has.
        """
        names = [entry.path for entry in self.manifest.files]
        if not any(path == name or path.startswith(f"{name}/") for path in names):
            raise ArtifactMissingError(
                f"{self.path}: no file {name!r} in this {self.stage!r} artifact. "
                f"It has: {', '.join(names) or 'no files'}."
            )
        return self.path / name

    def expect(self, stage: str) -> Artifact:
        """Return self if ``stage`` built it.

        Raises:
            ArtifactError: another stage did; names both.
        """
        if self.stage != stage:
            raise ArtifactError(
                f"{self.path} was built by stage {self.stage!r}, but an artifact of stage "
                f"{stage!r} is needed here. Pass the one of {stage!r}."
            )
        return self


@dataclass(frozen=True)
class ArtifactKey:
    """What a build is named by; ``parts`` is the content that was hashed."""

    stage: str
    fingerprint: str
    parts: dict[str, Any]


def fingerprint(parts: Mapping[str, Any]) -> str:
    """sha256, in hexadecimal, of the canonical JSON of ``parts``.

    Canonical: keys as JSON has them (strings) and sorted, no spaces, finite numbers only.
    """
    plain = json.loads(json.dumps(dict(parts), allow_nan=False))  # turns integer keys to strings
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of an artifact directory.

    Raises:
        ArtifactMissingError: there is none.
        ArtifactCorruptError: it is not the JSON of a manifest.
        ArtifactStaleError: another schema version wrote it.
    """
    path = directory / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactMissingError(
            f"{directory} has no {MANIFEST_NAME}, so it is not a finished artifact. "
            f"{way_out(directory)}"
        ) from None
    except (ValueError, RecursionError) as error:  # of the text's encoding, and of its depth
        raise ArtifactCorruptError(f"{path} is not JSON ({error}). {way_out(directory)}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise ArtifactStaleError(
            f"{path} has schema version {version}, this version of distill reads "
            f"{SCHEMA_VERSION}. Use the version that wrote it, or: {way_out(directory)}"
        )
    if fault := _fault(Manifest, content):
        raise ArtifactCorruptError(f"{path}: {fault}. {way_out(directory)}")
    for entry in content["files"]:
        if fault := _fault(FileEntry, entry):
            raise ArtifactCorruptError(f"{path}: in files: {fault}. {way_out(directory)}")
    return Manifest(**(content | {"files": [FileEntry(**entry) for entry in content["files"]]}))


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _fault(kind: type, content: Any) -> str | None:
    """What keeps a JSON value from being the fields of a dataclass; None: nothing does."""
    if not isinstance(content, dict):
        return f"{content!r} is no table"
    hints = get_type_hints(kind)
    if odd := sorted(hints.keys() ^ content.keys()):
        return f"these entries are missing or unknown: {', '.join(odd)}"
    for name, hint in hints.items():
        wanted, found = get_origin(hint) or hint, type(content[name])
        if found is not wanted:
            return f"{name} is a {found.__name__}, not a {wanted.__name__}"
    return None


def verify(artifact: Artifact) -> None:
    """Check the manifest against its own fingerprint, and every file against the manifest.

    Raises:
        ArtifactCorruptError: names the first file that differs and both sizes or hashes.
    """
    manifest, remedy = artifact.manifest, way_out(artifact.path)
    if (found := fingerprint(manifest.parts)) != manifest.fingerprint:
        raise ArtifactCorruptError(
            f"{artifact.path / MANIFEST_NAME} was edited: what it lists has fingerprint "
            f"{found}, but it says {manifest.fingerprint}. {remedy}"
        )
    for entry in manifest.files:
        path = artifact.path / entry.path
        if not path.is_file():
            raise ArtifactCorruptError(f"{path} is missing. {remedy}")
        if (num_bytes := path.stat().st_size) != entry.bytes:
            raise ArtifactCorruptError(
                f"{path} has {num_bytes} bytes, its manifest says {entry.bytes}. {remedy}"
            )
        if (found := sha256_of(path)) != entry.sha256:
            raise ArtifactCorruptError(
                f"{path} has sha256 {found}, its manifest says {entry.sha256}. {remedy}"
            )


def way_out(directory: Path) -> str:
    """What to do about an unusable artifact; the folder it lies in is named after its stage.

    A folder without the name of one holds somebody's own files: it is never said to be deleted.
    """
    if _OURS.fullmatch(directory.name) is None:
        return (
            "Give the folder of an artifact, STAGE/FINGERPRINT under the artifacts folder (12 "
            "hexadecimal digits)."
        )
    stage = directory.parent.name
    # `measure` knows a run's file and a pair's, which `run` does not take
    again = "measure CONFIG --rerun" if stage == "measure" else f"run CONFIG --rerun {stage}"
    return f"Delete {directory}, or build it again (distill {again})."


def neighbour(artifact: Artifact, stage: str, fingerprint: str) -> Manifest | None:
    """The manifest of another artifact in the same store; None where none can be read.

    Its payload is not looked at: it may be large, or gone.
    """
    folder = artifact.path.parent.parent / stage / fingerprint[: len(artifact.path.name)]
    try:
        manifest = read_manifest(folder)
    except ArtifactError as error:
        logger.debug("not read: %s", error)
        return None
    return manifest if manifest.fingerprint == fingerprint else None


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which two sets of parts differ, each as "dotted.name old -> new"."""
    before, after = _leaves(old), _leaves(new)
    names = sorted(name for name in before.keys() | after.keys() if _differs(before, after, name))
    return [f"{name} {_short(before, name)} -> {_short(after, name)}" for name in names]


def listed(changes: list[str]) -> str:
    """Changes as one readable line; a long list is cut and the rest counted."""
    shown = ", ".join(changes[:_MAX_LISTED])
    rest = len(changes) - _MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as JSON holds them: numpy scalars become numbers, tuples lists, NaN null.

    Raises:
        ArtifactError: a value JSON cannot hold; names it.
    """
    plain = _plain(metrics, "metrics")
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}.{index}") for index, item in enumerate(value)]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        logger.warning("%s is %s; written as null, JSON has no such number", name, value)
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ArtifactError(f"{name} is a {type(value).__name__}; a build returns JSON-able metrics.")


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and value:
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {name: value}
    leaves: dict[str, Any] = {}
    for key, item in items:
        leaves.update(_leaves(item, f"{name}.{key}" if name else key))
    return leaves


def _differs(before: dict[str, Any], after: dict[str, Any], name: str) -> bool:
    if (name in before) != (name in after):
        return True
    # As JSON, not with ==: True equals 1 and 1 equals 1.0 in Python, but not in a fingerprint.
    return json.dumps(before[name]) != json.dumps(after[name])


def _short(leaves: dict[str, Any], name: str) -> str:
    if name not in leaves:
        return "(absent)"
    text = json.dumps(leaves[name])
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."


def sync_payload(partial: Path, *, scratch: str) -> list[FileEntry]:
    """Put every payload file and directory on the disk and list the files, sorted by path.

    ``scratch`` names the folder that is no payload; a file whose name starts with a dot is none
    either, and is removed.

    Raises:
        ArtifactError: a link, whose bytes lie elsewhere.
    """
    entries = []
    for path in sorted(partial.rglob("*")):
        relative = path.relative_to(partial)
        if relative.parts[0] == scratch or relative.as_posix() == MANIFEST_NAME:
            continue
        if path.is_symlink():
            raise ArtifactError(f"{path} is a link; a payload holds its bytes itself.")
        # Half a file of a write that was killed: ours and safetensors' own have such names.
        if path.name.startswith(".") and path.is_file():
            path.unlink()
            continue
        sync(path)
        if path.is_file():
            entries.append(FileEntry(relative.as_posix(), path.stat().st_size, sha256_of(path)))
    return entries
