"""Owns what is kept of the target beside its answers: the kinds, their settings and their files.

Refuses to know who computes it and how it trains: stages write it, `training/` reads it.
"""

from __future__ import annotations

from distill.target_store.config import (
    SampledSettings,
    StoreKind,
    TargetStoreChoice,
    TopKSettings,
    bytes_per_token,
    knowledge_of,
    settings_of,
)

__all__ = [
    "SampledSettings",
    "StoreKind",
    "TargetStoreChoice",
    "TopKSettings",
    "bytes_per_token",
    "knowledge_of",
    "settings_of",
]
