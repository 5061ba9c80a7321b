"""Owns the checks that artifacts belong together: one target, one draft.

Refuses to know what any stage writes; it reads manifests only.
"""

from __future__ import annotations

from collections.abc import Mapping

from distill.artifacts import Artifact
from distill.errors import ArtifactError


def fingerprints_of(inputs: Mapping[str, Artifact | str]) -> dict[str, str]:
    """The fingerprints of inputs that are given as artifacts or as fingerprints already."""
    return {
        name: item.fingerprint if isinstance(item, Artifact) else item
        for name, item in inputs.items()
    }


def check_same_target(artifact: Artifact, *, name: str, reference: str, revision: str) -> None:
    """Refuse an artifact that was made with another target than the one in use.

    Args:
        artifact: what was given.
        name: the stage that made it.
        reference: the target in use, as the config names it.
        revision: what `reference` stands for, see `models.model_revision`.

    Raises:
        ArtifactError: the manifest's revision of the target is another one.
    """
    theirs = artifact.manifest.revisions.get("target")
    if theirs != revision:
        raise ArtifactError(
            f"The target {reference!r} is at revision {revision}, but {artifact.path} ({name}) was "
            f"made with a target at {theirs}. Use that target, or run {name} again with this one."
        )


def check_same_quantization(artifact: Artifact, *, name: str, quantize: str) -> None:
    """Refuse the answers of a target whose weights were held in another way: they are others.

    Raises:
        ArtifactError: the target in the manifest has another `quantize` than the one in use.
    """
    theirs = artifact.manifest.config.get("target", {}).get("quantize", "none")
    if theirs != quantize:
        raise ArtifactError(
            f"The target has quantize: {quantize}, but {artifact.path} ({name}) was made with "
            f"quantize: {theirs}. Use that setting, or run {name} again with this one."
        )


def check_same_draft(measure: Artifact, distill: Artifact) -> None:
    """Refuse a measurement of another draft.

    Raises:
        ArtifactError: `measure` did not read `distill`.
    """
    measured = measure.manifest.inputs.get("distill")
    if measured != distill.fingerprint:
        raise ArtifactError(
            f"{measure.path} (measure) measured the draft {measured}, but the draft given is "
            f"{distill.fingerprint} ({distill.path}). Measure that one, or give the other draft."
        )


def check_lineage(inputs: Mapping[str, Artifact], *, reference: str, revision: str) -> None:
    """Refuse a draft of another target, and a measurement, if there is one, of another draft.

    Raises:
        ArtifactError: from `check_same_target` or `check_same_draft`.
    """
    distill, measure = inputs["distill"], inputs.get("measure")
    check_same_target(distill, name="distill", reference=reference, revision=revision)
    if measure is not None:
        check_same_draft(measure, distill)
