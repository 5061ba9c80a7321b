"""Owns the state of a run on disk: what a killed run needs to go on as if nothing had happened.

Refuses to know losses, schedules and data: their place follows from the step number alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from distill.errors import ArtifactCorruptError
from distill.files import atomic_write
from distill.training.select import Best, HeldOutScore

STATE_FILE = "state.json"


@dataclass(frozen=True)
class SavedState:
    """A run after `step` optimiser steps. `seconds` is wall clock, for reports only."""

    step: int
    parameters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    best: Best
    log: list[dict[str, Any]]
    seconds: float


def save_state(
    directory: Path,
    *,
    step: int,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    best: Best,
    log: list[dict[str, Any]],
    seconds: float,
) -> None:
    """Write the state; a kill at any moment leaves either the last one or this one.

    The tensors go to files of new names first; `state.json`, renamed into place, then makes them
    current, and what it no longer names is deleted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"parameter/{name}": tensor for name, tensor in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value
    state_name, best_name = f"state-{step:08d}.safetensors", f"best-{best.step:08d}.safetensors"
    _write_tensors(directory / state_name, tensors)
    if not (directory / best_name).is_file():
        _write_tensors(directory / best_name, best.parameters)
    record = {
        "step": step,
        "state_file": state_name,
        "best": {"step": best.step, "file": best_name, "score": asdict(best.score)},
        "log": log,
        "seconds": seconds,
    }
    atomic_write(directory / STATE_FILE, json.dumps(record))
    for path in directory.glob("*.safetensors"):
        if path.name not in (state_name, best_name):
            path.unlink()


def saved_step(directory: Path) -> int | None:
    """Return the step of the last state saved in this directory, or None.

    Raises:
        ArtifactCorruptError: the state cannot be read.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        return None
    with _reading(directory):
        step: int = json.loads(path.read_text(encoding="utf-8"))["step"]
    return step


def load_state(directory: Path) -> SavedState | None:
    """Return the last state saved in this directory, or None.

    Raises:
        ArtifactCorruptError: a file of the state is damaged or gone.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        return None
    with _reading(directory):
        return _state_of(directory, json.loads(path.read_text(encoding="utf-8")))


def _state_of(directory: Path, record: Mapping[str, Any]) -> SavedState:
    parameters: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(directory / record["state_file"]).items():
        kind, _, name = key.partition("/")
        if kind == "parameter":
            parameters[name] = tensor
        else:
            moments.setdefault(name, {})[kind] = tensor
    best = record["best"]
    return SavedState(
        step=record["step"],
        parameters=parameters,
        moments=moments,
        best=Best(best["step"], HeldOutScore(**best["score"]), load_file(directory / best["file"])),
        log=record["log"],
        seconds=record["seconds"],
    )


@contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """What a file can be damaged into, as one error that says what to delete."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ArtifactCorruptError(
            f"the state of an unfinished training in {directory} cannot be read "
            f"({type(error).__name__}: {error}). Delete {directory} and run the same command "
            f"again; the training starts anew"
        ) from error


def restore(
    saved: SavedState, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Put a saved state's parameters and moments back, in place."""
    assert set(saved.parameters) == set(parameters), "the state belongs to another draft"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved.parameters[name])
    for name, parameter in parameters.items():
        if name in saved.moments:
            optimizer.state[parameter] = {
                # the fused AdamW keeps its count of steps beside the parameter, like the moments
                key: value.to(parameter.device)
                for key, value in saved.moments[name].items()
            }


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    atomic_write(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
