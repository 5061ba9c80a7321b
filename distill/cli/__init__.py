"""The command line: parses, calls one function, prints; a user's mistake is exit 2, no traceback.

Refuses to know how anything works, and imports nothing heavy until a command runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from distill import __version__
from distill.cli import build, look

__all__ = ["app"]

app = typer.Typer(
    name="distill",
    help="Draft models for speculative decoding: generate, distill, measure, serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at a config.", no_args_is_help=True)
app.add_typer(config_app, name="config")

for command in (build.run, look.plan, build.measure, look.compare, build.serve, build.export):
    app.command()(command)
config_app.command()(look.show)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"distill {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Draft models for speculative decoding: generate, distill, measure, serve."""
