"""The command line: parses, calls one function, prints; a user's mistake is exit 2, no traceback.

Refuses to know how anything works, and imports nothing heavy until a command runs.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from distill import __version__
from distill.errors import DistillError

if TYPE_CHECKING:
    from rich.table import Table

    from distill.artifacts import Artifact, ArtifactStore
    from distill.stages.run_config import RunConfig

P = ParamSpec("P")
R = TypeVar("R")

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

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a key of the config; repeatable."),
]
ArtifactsOption = Annotated[
    Path,
    typer.Option("--artifacts", envvar="DISTILL_ARTIFACTS", help="Where artifacts are kept."),
]
DEFAULT_ARTIFACTS = Path("artifacts")

_CHOOSE_ANOTHER = "Choose another path (--artifacts, --output), or move what is there away."
_ALLOW_WRITING = "Allow writing there, or choose another path (--artifacts, --output)."
# What the machine refuses and a user can put right, and how; any other OSError is a bug of ours.
_WAY_OUT: Mapping[int | None, str] = {
    errno.EACCES: _ALLOW_WRITING,
    errno.EPERM: _ALLOW_WRITING,
    errno.EROFS: _ALLOW_WRITING,
    errno.ENOTDIR: _CHOOSE_ANOTHER,
    errno.EEXIST: _CHOOSE_ANOTHER,
    errno.EISDIR: _CHOOSE_ANOTHER,
    errno.ENOSPC: "Free some space, or choose a path on another disk (--artifacts, --output).",
}


def _reports_user_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Exit 2 with one message for what a user can put right; anything else stays a traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except DistillError as error:
            fault = "error: " if error.exit_code else ""
            typer.echo(f"distill: {fault}{error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if error.errno not in _WAY_OUT:
                raise
            where = f"{error.filename}: " if error.filename is not None else ""
            message = f"{where}{error.strerror}. {_WAY_OUT[error.errno]}"
            typer.echo(f"distill: error: {message}", err=True)
            raise typer.Exit(DistillError.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("distill: interrupted; run the same command again to go on.", err=True)
            raise typer.Exit(130) from None

    return wrapped


def _prepare_process(verbose: bool = False) -> None:
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


def _load(config_path: Path, overrides: list[str] | None) -> RunConfig:
    from distill.stages.run_config import load_config

    return load_config(config_path, overrides or [])


def _store(root: Path) -> ArtifactStore:
    from distill.artifacts import ArtifactStore

    return ArtifactStore(root)


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


@app.command()
@_reports_user_errors
def run(
    config: ConfigArgument,
    set_: SetOption = None,
    artifacts: ArtifactsOption = DEFAULT_ARTIFACTS,
    until: Annotated[str, typer.Option(help="The last stage to run.")] = "export",
    rerun: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Build this stage again though it is there."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Generate only this part; the last of N joins them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> None:
    """Run the pipeline end to end; stages that are built already are not built again."""
    _prepare_process(verbose)
    from pipelines import chosen

    given = [] if shard is None else [f"generate.shard={shard}"]
    run_config = _load(config, [*(set_ or ()), *given])
    store = _store(artifacts)
    stages = list(rerun or ())
    log = logging.getLogger("distill")
    # the export comes last and on its own: when it fails, what was measured is reported already
    has_export = until == "export"
    result = chosen.run(
        run_config,
        store,
        until="measure" if has_export else until,
        rerun=[name for name in stages if not (has_export and name == "export")],
        on_stage=lambda name: log.info("stage %s", name),
    )
    built = dict(result.artifacts)
    if "measure" not in built:
        _print_artifacts(built, as_json=as_json)
        return
    outcome = _write_report(run_config, store, built)
    if has_export:
        from distill.export import export_draft

        log.info("stage export")
        inputs = {name: built[name] for name in chosen.INPUTS["export"]}
        built["export"] = export_draft(
            run_config.export, store, inputs=inputs, rebuild="export" in stages
        )
        outcome = _write_report(run_config, store, built)
    _print_report(*outcome, as_json=as_json)
    _check_gate(outcome[0])


def _print_artifacts(artifacts: Mapping[str, Artifact], *, as_json: bool) -> None:
    if as_json:
        rows = {
            name: {"path": str(artifact.path), "fingerprint": artifact.fingerprint}
            for name, artifact in artifacts.items()
        }
        typer.echo(json.dumps({"artifacts": rows}, indent=2))
        return
    for name, artifact in artifacts.items():
        typer.echo(f"{name}: {artifact.path}")


def _write_report(
    config: RunConfig, store: ArtifactStore, artifacts: Mapping[str, Artifact]
) -> tuple[dict[str, Any], Sequence[Path]]:
    """The report, and the files it was written to."""
    from distill.report import build_report, write_report
    from pipelines import chosen

    report = build_report(config.name, artifacts, gate=config.measure.bounds)
    return report, write_report(chosen.report_directory(config, store), report)


def _check_gate(report: Mapping[str, Any]) -> None:
    """Exit 3 for a draft below a bound: last of all, when everything is written and printed."""
    from distill.errors import GateFailedError

    gate = report.get("gate")
    if gate is not None and gate["failures"]:
        raise GateFailedError("the gate failed: " + "; ".join(gate["failures"]))


def _print_report(report: dict[str, Any], paths: Sequence[Path], *, as_json: bool) -> None:
    from distill.report import report_table, served_table

    if as_json:
        typer.echo(json.dumps(report, indent=2, sort_keys=True))
        return
    _print_table(report_table(report) if "verdict" in report else served_table(report), width=110)
    for path in paths:
        typer.echo(f"report: {path}")


def _print_table(table: Table, *, width: int) -> None:
    """Print a table; where the output is no terminal, in a width that holds it."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else width).print(table)


@app.command()
@_reports_user_errors
def plan(
    config: ConfigArgument,
    set_: SetOption = None,
    artifacts: ArtifactsOption = DEFAULT_ARTIFACTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Time a step of the target and of each draft shape. Loads the target."
        ),
    ] = False,
) -> None:
    """Show stages, what is cached, what the rest would cost, and what a draft's shape can gain.

    Loads no weights, unless asked to measure.
    """
    _prepare_process()
    from distill.stages.candidates import candidate_table, plan_candidates
    from distill.stages.estimate import estimate_run, estimate_table
    from distill.stages.speed_plan import plan_speed, speed_table
    from pipelines import chosen

    run_config = _load(config, set_)
    states = chosen.plan(run_config, _store(artifacts))
    estimates = estimate_run(run_config)
    shapes = plan_candidates(run_config, measure=measure)
    speed = plan_speed(run_config, next(s.artifact for s in states if s.name == "measure"))
    rows = [
        {
            "stage": state.name,
            "fingerprint": state.key.fingerprint,
            "is_provisional": state.is_provisional,
            "state": "cached" if state.artifact else "started" if state.is_started else "to build",
            "miss": state.miss,
            **estimates[state.key.stage].to_dict(),
        }
        for state in states
    ]
    if as_json:
        content = {"name": run_config.name, "stages": rows, "shapes": shapes.to_dict()}
        typer.echo(json.dumps(content | {"speed": speed}, indent=2))
        return
    tables = [estimate_table(run_config, rows), candidate_table(shapes)]
    for table in [*tables, *([speed_table(speed)] if speed is not None else [])]:
        _print_table(table, width=130)


@app.command()
@_reports_user_errors
def measure(
    config: ConfigArgument,
    set_: SetOption = None,
    artifacts: ArtifactsOption = DEFAULT_ARTIFACTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> None:
    """Measure a draft: the one a run trains, a pair that exists already, or one a server runs."""
    _prepare_process(verbose)
    from distill.stages.measure_pair import is_pair_config, load_pair_config
    from pipelines import chosen, pair

    store = _store(artifacts)
    if is_pair_config(config):
        report, paths = pair.run(load_pair_config(config, set_ or []), store)
    else:
        run_config = _load(config, set_)
        built = chosen.run(run_config, store, until="measure").artifacts
        report, paths = _write_report(run_config, store, built)
    _print_report(report, paths, as_json=as_json)
    _check_gate(report)


@app.command()
@_reports_user_errors
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...", help="Names of runs, report directories or measure artifacts."
        ),
    ],
    artifacts: ArtifactsOption = DEFAULT_ARTIFACTS,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The JSON file to write.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Put measured runs side by side, with paired differences on the prompts they share."""
    _prepare_process()
    from distill.files import atomic_write
    from distill.report import compare_runs, comparison_table

    store = _store(artifacts)
    comparison = compare_runs(store, runs)
    path = output or store.root / "reports" / "comparison.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(comparison, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(comparison, indent=2))
        return
    _print_table(comparison_table(comparison), width=130)
    typer.echo(f"comparison: {path}")


@app.command()
@_reports_user_errors
def serve(
    config: ConfigArgument,
    set_: SetOption = None,
    artifacts: ArtifactsOption = DEFAULT_ARTIFACTS,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> None:
    """Serve the pair over HTTP (OpenAI-compatible); builds the draft first where needed."""
    _prepare_process(verbose)
    from distill.stages.serve import serve as serve_stage
    from pipelines import chosen

    run_config, store = _load(config, set_), _store(artifacts)
    needed = run_config.serve.inputs
    built = chosen.run(run_config, store, until="measure").artifacts if needed else {}
    inputs = {name: built[name] for name in needed}
    serve_stage(run_config.serve, store, inputs=inputs, block=True)


@app.command()
@_reports_user_errors
def export(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="A directory to create.")],
    set_: SetOption = None,
    artifacts: ArtifactsOption = DEFAULT_ARTIFACTS,
) -> None:
    """Write the draft as a directory that another team loads."""
    _prepare_process()
    from distill.export import copy_bundle
    from pipelines import chosen

    run_config = _load(config, set_)
    result = chosen.run(run_config, _store(artifacts))
    typer.echo(str(copy_bundle(result.artifacts["export"], output)))


@config_app.command()
@_reports_user_errors
def show(
    config: ConfigArgument,
    set_: SetOption = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema.")] = False,
) -> None:
    """Print the resolved config, every default filled in."""
    from distill.stages.run_config import RunConfig, dump_run_config

    if schema:
        from distill.config import json_schema

        typer.echo(json.dumps(json_schema(RunConfig), indent=2))
        return
    typer.echo(dump_run_config(_load(config, set_)), nl=False)
