"""What a command prints: lines, tables, JSON, on stdout and by one process of a run.

Refuses to know where the numbers come from.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from distill.artifacts import Artifact


def is_first_process() -> bool:
    """Whether this process writes and prints: under a launcher (torchrun) only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str, *, ends_line: bool = True) -> None:
    """Print a result to stdout, once a run."""
    if is_first_process():
        typer.echo(text, nl=ends_line)


def say_json(content: Any, *, sort_keys: bool = False) -> None:
    """Print a result as JSON."""
    say(json.dumps(content, indent=2, sort_keys=sort_keys))


def print_table(table: Table, *, width: int) -> None:
    """Print a table; where the output is no terminal, in a width that holds it."""
    from rich.console import Console

    if is_first_process():
        Console(width=None if sys.stdout.isatty() else width).print(table)


def print_artifacts(artifacts: Mapping[str, Artifact], *, as_json: bool) -> None:
    """Where each stage's artifact is."""
    if as_json:
        rows = {
            name: {"path": str(artifact.path), "fingerprint": artifact.fingerprint}
            for name, artifact in artifacts.items()
        }
        say_json({"artifacts": rows})
        return
    for name, artifact in artifacts.items():
        say(f"{name}: {artifact.path}")


def print_report(report: dict[str, Any], paths: Sequence[Path], *, as_json: bool) -> None:
    """A report on one screen, and the files it was written to."""
    from distill.report import report_table, served_table

    if as_json:
        say_json(report, sort_keys=True)
        return
    print_table(report_table(report) if "verdict" in report else served_table(report), width=110)
    for path in paths:
        say(f"report: {path}")
