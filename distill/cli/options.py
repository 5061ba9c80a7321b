"""What commands have in common before they work: their options, logging, the config, the store.

Refuses to know any command, and imports nothing heavy until one runs.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from distill.artifacts import ArtifactStore
    from distill.stages.run_config import RunConfig

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
AnyConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The YAML file of a run, or of a pair.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=C", help="Put this value at a key of the config; repeatable."
    ),
]
ArtifactsOption = Annotated[
    Path,
    typer.Option("--artifacts", envvar="DISTILL_ARTIFACTS", help="Where artifacts are kept."),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v")]
DEFAULT_ARTIFACTS = Path("artifacts")


def prepare_process(verbose: bool = False) -> None:
    """Log to stderr, and keep third parties from reporting usage over the network."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    for name in ("httpx", "httpx2", "httpcore", "filelock", "matplotlib", "fontTools", "PIL"):
        logging.getLogger(name).setLevel(logging.WARNING)


def load_run(config_path: Path, overrides: list[str] | None) -> RunConfig:
    """The config of a run; a mistake in it is an error with the way out."""
    from distill.stages.run_config import load_config

    return load_config(config_path, overrides or [])


def open_store(root: Path) -> ArtifactStore:
    """The store below a folder, which need not be there yet."""
    from distill.artifacts import ArtifactStore

    return ArtifactStore(root)
