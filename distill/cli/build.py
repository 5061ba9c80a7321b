"""The commands that build: run, measure, serve, export. Each calls a pipeline and prints.

Refuses to know how any stage works, and imports nothing heavy until a command runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.cli.errors import reports_user_errors
from distill.cli.options import (
    DEFAULT_ARTIFACTS,
    AnyConfigArgument,
    ArtifactsOption,
    ConfigArgument,
    SetOption,
    VerboseOption,
    load_run,
    open_store,
    prepare_process,
)
from distill.cli.output import is_first_process, print_artifacts, print_report, say

if TYPE_CHECKING:
    from distill.artifacts import Artifact, ArtifactStore
    from distill.stages.run_config import RunConfig

logger = logging.getLogger("distill")


@reports_user_errors
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
    verbose: VerboseOption = False,
) -> None:
    """Run the pipeline end to end; stages that are built already are not built again."""
    prepare_process(verbose)
    from pipelines import chosen

    given = [] if shard is None else [f"generate.shard={shard}"]
    run_config = load_run(config, [*(set_ or ()), *given])
    store = open_store(artifacts)
    stages = list(rerun or ())
    # the export comes last and on its own: when it fails, what was measured is reported already
    has_export = until == "export"
    result = chosen.run(
        run_config,
        store,
        until="measure" if has_export else until,
        rerun=[name for name in stages if not (has_export and name == "export")],
        on_stage=lambda name: logger.info("stage %s", name),
    )
    built = dict(result.artifacts)
    if "measure" not in built:
        print_artifacts(built, as_json=as_json)
        return
    outcome = _write_report(run_config, store, built)
    if has_export:
        logger.info("stage export")
        built["export"] = _export(run_config, store, built, rebuild="export" in stages)
        outcome = _write_report(run_config, store, built)
    print_report(*outcome, as_json=as_json)
    _check_gate(outcome[0])


@reports_user_errors
def measure(
    config: AnyConfigArgument,
    set_: SetOption = None,
    artifacts: ArtifactsOption = DEFAULT_ARTIFACTS,
    rerun: Annotated[
        bool, typer.Option("--rerun", help="Measure again though it has been measured.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure a draft: the one a run trains, a pair that exists already, or one a server runs."""
    prepare_process(verbose)
    from distill.stages.measure_pair import is_pair_config, load_pair_config
    from pipelines import chosen, pair

    overrides, store = set_ or [], open_store(artifacts)
    if is_pair_config(config, overrides):
        report, paths = pair.run(load_pair_config(config, overrides), store, rebuild=rerun)
    else:
        run_config = load_run(config, overrides)
        again = ["measure"] if rerun else []
        built = chosen.run(run_config, store, until="measure", rerun=again).artifacts
        report, paths = _write_report(run_config, store, built)
    print_report(report, paths, as_json=as_json)
    _check_gate(report)


@reports_user_errors
def serve(
    config: ConfigArgument,
    set_: SetOption = None,
    artifacts: ArtifactsOption = DEFAULT_ARTIFACTS,
    verbose: VerboseOption = False,
) -> None:
    """Serve the pair over HTTP (OpenAI-compatible); builds the draft first where needed."""
    prepare_process(verbose)
    from distill.stages.serve import serve as serve_stage
    from pipelines import chosen

    run_config, store = load_run(config, set_), open_store(artifacts)
    needed = run_config.serve.inputs
    built = chosen.run(run_config, store, until="measure").artifacts if needed else {}
    inputs = {name: built[name] for name in needed}
    serve_stage(run_config.serve, store, inputs=inputs, block=True)


@reports_user_errors
def export(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="A directory to create.")],
    set_: SetOption = None,
    artifacts: ArtifactsOption = DEFAULT_ARTIFACTS,
    force: Annotated[
        bool, typer.Option("--force", help="Export though the gate failed; the card will say so.")
    ] = False,
) -> None:
    """Write the draft as a directory that another team loads; not one that failed its gate."""
    prepare_process()
    from distill.bundle import check_output, copy_bundle
    from distill.errors import GateFailedError
    from distill.report import build_report
    from pipelines import chosen

    run_config, store = load_run(config, set_), open_store(artifacts)
    check_output(output)  # before the hours a run may take
    built = dict(chosen.run(run_config, store, until="measure").artifacts)
    report = build_report(run_config.name, built, gate=run_config.measure.bounds)
    failures = _gate_failures(report)
    if failures and not force:
        raise GateFailedError(
            f"the gate failed: {'; '.join(failures)}. Nothing was exported; --force exports the "
            "draft all the same, with a card that says so."
        )
    bundle = _export(run_config, store, built)
    if is_first_process():
        say(str(copy_bundle(bundle, output, gate_failures=failures)))


def _export(
    config: RunConfig,
    store: ArtifactStore,
    built: Mapping[str, Artifact],
    *,
    rebuild: bool = False,
) -> Artifact:
    from distill.export import export_draft
    from pipelines import chosen

    inputs = {name: built[name] for name in chosen.INPUTS["export"]}
    return export_draft(config.export, store, inputs=inputs, rebuild=rebuild)


def _write_report(
    config: RunConfig, store: ArtifactStore, artifacts: Mapping[str, Artifact]
) -> tuple[dict[str, Any], Sequence[Path]]:
    """The report, and the files it was written to."""
    from distill.report import build_report, write_report
    from pipelines import chosen

    report = build_report(config.name, artifacts, gate=config.measure.bounds)
    if not is_first_process():
        return report, []
    return report, write_report(chosen.report_directory(config, store), report)


def _gate_failures(report: Mapping[str, Any]) -> Sequence[str]:
    gate = report.get("gate")
    return [] if gate is None else gate["failures"]


def _check_gate(report: Mapping[str, Any]) -> None:
    """Exit 3 for a draft below a bound: last of all, when everything is written and printed."""
    from distill.errors import GateFailedError

    if failures := _gate_failures(report):
        raise GateFailedError("the gate failed: " + "; ".join(failures))
