"""Owns where the `evaluate` modules lie: ``evaluate.load(str(module_path("acceptance_rate")))``.

Refuses to compute: each module is a thin wrapper around a pure function of ``distill.metrics``.
"""

from __future__ import annotations

from pathlib import Path

from distill.errors import RegistryError

MODULES = ("acceptance_rate", "block_efficiency", "expected_speedup")


def module_path(name: str) -> Path:
    """Directory that ``evaluate.load`` takes; needs no network.

    Raises RegistryError for an unknown name.
    """
    if name not in MODULES:
        raise RegistryError(f"Unknown evaluate module {name!r}. Known: {', '.join(MODULES)}.")
    return Path(__file__).parent / name
