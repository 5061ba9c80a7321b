"""Owns which models a measurement was of, and how each held its weights, as its manifest has it.

Refuses to load any, and to know how they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distill.artifacts import Artifact
from distill.metrics.verdict import DISTILLED


def target_of(measure: Artifact) -> dict[str, Any]:
    """The target: ``model``, ``dtype``, ``quantize`` and ``revision``; null where none is told."""
    manifest = measure.manifest
    return _held(manifest.config.get("target") or {}, manifest.revisions.get("target"))


def drafts_of(
    measure: Artifact, drafts: Sequence[str], *, primary: str, distilled: Artifact | None = None
) -> list[dict[str, Any]]:
    """The drafts that have weights of their own, each as ``target_of``, by their names.

    Left out is what has none (copying, the target's own first layers), and the undistilled draft,
    which follows from the settings of the training. The distilled one is named by the artifact
    that trained it; its revision is that artifact's fingerprint.

    Args:
        drafts: the names in the order of the tables.
        primary: the judged draft, the one that ``config.draft`` names in a pair.
        distilled: the artifact, where it is at hand.
    """
    manifest = measure.manifest
    target, others = manifest.config.get("target") or {}, manifest.config.get("drafts") or {}
    rows = []
    for name in drafts:
        if name == DISTILLED:
            fingerprint = manifest.inputs.get("distill")
            model = f"distill/{(fingerprint or '')[:12]}" if distilled is None else distilled.path
            held = {"model": str(model), "dtype": target.get("dtype"), "quantize": "none"}
            rows.append({"draft": name, **_held(held, fingerprint)})
            continue
        config = others.get(name) or (manifest.config.get("draft") if name == primary else None)
        if config:
            # A dtype left open is the target's, as it was measured.
            is_open = config.get("dtype", "auto") == "auto"
            held = {**config, "dtype": target.get("dtype") if is_open else config["dtype"]}
            rows.append({"draft": name, **_held(held, manifest.revisions.get(f"draft/{name}"))})
    return rows


def _held(config: Mapping[str, Any], revision: str | None) -> dict[str, Any]:
    return {
        "model": config.get("model"),
        "dtype": config.get("dtype"),
        "quantize": config.get("quantize", "none"),
        "revision": revision,
    }


def how_held(model: Mapping[str, Any]) -> str:
    """How a model's weights were held, for beside its name: bfloat16, int8 weights."""
    parts = [] if model["dtype"] in (None, "auto") else [str(model["dtype"])]
    if model["quantize"] != "none":
        parts.append(f"{model['quantize']} weights")
    return ", ".join(parts)
