"""Owns the answer to "what made this?": our version and commit, package versions, the machine.
Refuses to import what it reports on (no torch) and to name who or where: no host, user or path.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from distill import __version__

_PACKAGES = (
    "accelerate",
    "datasets",
    "evaluate",
    "numpy",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
)
_GIT_TIMEOUT_S = 20


def code_versions() -> dict[str, Any]:
    """Return {version, git_sha, dirty}; the last two are None outside a checkout of ours."""
    here = Path(__file__).resolve()
    # An installed copy inside somebody else's repository must not report that repository's commit.
    is_ours = _git(here.parent, "ls-files", "--error-unmatch", here.name) is not None
    git_sha = _git(here.parent, "rev-parse", "HEAD") if is_ours else None
    changes = (
        _git(here.parent, "status", "--porcelain", "--untracked-files=no") if git_sha else None
    )
    return {
        "version": __version__,
        "git_sha": git_sha,
        "dirty": None if changes is None else bool(changes),
    }


def package_versions() -> dict[str, str]:
    """Return the installed versions of Python and of the packages that can change results."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> dict[str, Any]:
    """Return {system, machine, cpu, cpu_count, memory_bytes, gpus}; unknown entries are None."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name") or platform.processor() or None,
        "cpu_count": _usable_cpus(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
    }


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _usable_cpus() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _gpus() -> list[str]:
    # The driver's own text files: no library has to be loaded to read them.
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [_first_value(card, "Model") for card in cards]
    return [name for name in names if name]


def _first_value(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None
