"""Owns the promises of the error tree: one root, one exit code, and the picture in its docstring.
Refuses to know who raises what.
"""

from __future__ import annotations

import inspect
from typing import Any

from distill import errors

TREE = {
    "ConfigError": "DistillError",
    "RegistryError": "ConfigError",
    "ArtifactError": "DistillError",
    "ArtifactMissingError": "ArtifactError",
    "ArtifactCorruptError": "ArtifactError",
    "ArtifactStaleError": "ArtifactError",
    "ShardsPendingError": "ArtifactError",
    "ModelNotFoundError": "DistillError",
    "PairMismatchError": "DistillError",
    "CorpusError": "DistillError",
    "ContextLengthError": "DistillError",
    "DiskSpaceError": "DistillError",
    "SamplingError": "DistillError",
    "LogitsProcessorError": "DistillError",
    "CacheRollbackError": "DistillError",
    "TrainingError": "DistillError",
    "BackendUnavailableError": "DistillError",
    "ExportError": "DistillError",
    "GateFailedError": "DistillError",
    "ServerError": "DistillError",
}


def error_classes() -> dict[str, Any]:
    return {
        name: item
        for name, item in inspect.getmembers(errors, inspect.isclass)
        if item.__module__ == errors.__name__
    }


def test_tree_is_the_agreed_one() -> None:
    found = {name: item.__bases__[0].__name__ for name, item in error_classes().items()}
    assert found == {**TREE, "DistillError": "Exception"}


def test_every_error_is_drawn_in_the_docstring() -> None:
    drawn = errors.__doc__ or ""
    assert [name for name in error_classes() if f" {name} " not in drawn] == []


def test_every_error_exits_with_two_but_the_one_that_is_no_fault_and_the_gate() -> None:
    codes = {name: item.exit_code for name, item in error_classes().items()}
    assert codes.pop("ShardsPendingError") == 0
    assert codes.pop("GateFailedError") == 3
    assert set(codes.values()) == {2}


def test_config_error_can_be_raised_by_a_pydantic_validator() -> None:
    assert issubclass(errors.ConfigError, ValueError)
