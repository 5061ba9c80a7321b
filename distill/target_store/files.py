"""Owns the files of a target store: one safetensors file a chunk of answers, read by position.

Refuses to know rows, stages and losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from distill.artifacts import Artifact
from distill.losses.knowledge import FullKnowledge, TargetKnowledge
from distill.target_store.config import StoreKind
from distill.target_store.sampled import SampledRows, concatenate
from distill.target_store.top_k import unpack_top_k

_SUFFIX = ".safetensors"
_PREFIXES: dict[StoreKind, str] = {
    "final_hidden": "hidden",
    "top_k": "top_k",
    "sampled": "sampled",
}


def file_name(kind: StoreKind, chunk_index: int) -> str | None:
    """The name of a chunk's file in a store; None where nothing is kept."""
    prefix = _PREFIXES.get(kind)
    return None if prefix is None else f"{prefix}-{chunk_index:05d}{_SUFFIX}"


def kind_of_file(name: str) -> StoreKind:
    """Which store a file is of, by its name; "none" for a file of no store."""
    for kind, prefix in _PREFIXES.items():
        if name.startswith(f"{prefix}-") and name.endswith(_SUFFIX):
            return kind
    return "none"


def kind_in(artifact: Artifact) -> StoreKind:
    """Which store an artifact's files are; "none" where there are none."""
    kinds = (kind_of_file(entry.path) for entry in artifact.manifest.files)
    return next((kind for kind in kinds if kind != "none"), "none")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors, mapped into memory: read once, kept by the system's cache."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class StoredTarget:
    """A store's files; what is known at the positions asked for.

    ``parts`` are pairs of a file name and the places in it.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.kind = kind_in(artifact)
        self._files = {
            entry.path: read_tensors(artifact.file(entry.path))
            for entry in artifact.manifest.files
            if kind_of_file(entry.path) != "none"
        }
        self._sampled: dict[str, SampledRows] = {}
        if self.kind == "sampled":
            self._sampled = {name: SampledRows(packed) for name, packed in self._files.items()}

    def at(self, parts: Sequence[tuple[str, Tensor]]) -> TargetKnowledge:
        """Return what is known at the places of these parts, in their order."""
        if self.kind == "sampled":
            return concatenate([self._sampled[name].of(index_N) for name, index_N in parts])
        taken = [_take(self._files[name], index_N) for name, index_N in parts]
        joined = {name: torch.cat([part[name] for part in taken]) for name in taken[0]}
        if self.kind == "top_k":
            return unpack_top_k(joined)
        return FullKnowledge(joined["hidden_ND"], joined["logsumexp_N"])


def _take(tensors: Mapping[str, Tensor], index_N: Tensor) -> dict[str, Tensor]:
    return {name: _rows(tensor, index_N) for name, tensor in tensors.items()}


def _rows(tensor: Tensor, index_N: Tensor) -> Tensor:
    if tensor.dtype == torch.uint16:  # torch indexes int16 only; the bits are the same
        return tensor.view(torch.int16).index_select(0, index_N).view(torch.uint16)
    return tensor.index_select(0, index_N)
