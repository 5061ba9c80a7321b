"""Owns the public surface of the library: the names below, each loaded on first use.
Refuses to import anything heavy: ``import distill`` costs milliseconds and never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.artifacts import ArtifactStore
    from distill.export import export_draft
    from distill.models import load_draft
    from distill.runtime.speculative import speculative_decode
    from distill.stages.distill_draft import distill_draft
    from distill.stages.generate import generate
    from distill.stages.measure import measure_acceptance
    from distill.stages.run_config import load_config
    from distill.stages.serve import serve

__version__ = "0.1.0"

__all__ = [
    "ArtifactStore",
    "__version__",
    "distill_draft",
    "export_draft",
    "generate",
    "load_config",
    "load_draft",
    "measure_acceptance",
    "serve",
    "speculative_decode",
]

_HOMES = {
    "ArtifactStore": "distill.artifacts",
    "distill_draft": "distill.stages.distill_draft",
    "export_draft": "distill.export",
    "generate": "distill.stages.generate",
    "load_config": "distill.stages.run_config",
    "load_draft": "distill.models",
    "measure_acceptance": "distill.stages.measure",
    "serve": "distill.stages.serve",
    "speculative_decode": "distill.runtime.speculative",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'distill' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
