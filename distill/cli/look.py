"""The commands that look and build nothing: plan, compare, config show.

Refuses to know how anything is counted, and imports nothing heavy until a command runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from distill.cli.errors import reports_user_errors
from distill.cli.options import (
    DEFAULT_ARTIFACTS,
    AnyConfigArgument,
    ArtifactsOption,
    ConfigArgument,
    SetOption,
    load_run,
    open_store,
    prepare_process,
)
from distill.cli.output import is_first_process, print_table, say, say_json


@reports_user_errors
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
    prepare_process()
    from distill.stages.candidates import candidate_table, plan_candidates
    from distill.stages.estimate import estimate_of, estimate_run
    from distill.stages.estimate_table import estimate_table
    from distill.stages.plan_shapes import known_shapes
    from distill.stages.speed_plan import plan_speed, speed_table
    from pipelines import chosen

    run_config = load_run(config, set_)
    shape_of = known_shapes()
    states = chosen.plan(run_config, open_store(artifacts), shape_of=shape_of)
    estimates = estimate_run(run_config, shape_of)
    measured = next(s.artifact for s in states if s.name == "measure")
    shapes = plan_candidates(run_config, shape_of, measured=measured, measure=measure)
    speed = plan_speed(run_config, measured, shape_of=shape_of)
    rows = [
        {
            "stage": state.name,
            "fingerprint": state.key.fingerprint,
            "is_provisional": state.is_provisional,
            "state": "cached" if state.artifact else "started" if state.is_started else "to build",
            "miss": state.miss,
            **estimate_of(estimates, state.key).to_dict(),
        }
        for state in states
    ]
    if as_json:
        content = {"name": run_config.name, "stages": rows, "shapes": shapes.to_dict()}
        say_json(content | {"speed": speed})
        return
    tables = [estimate_table(run_config, rows), candidate_table(shapes)]
    for table in [*tables, *([speed_table(speed)] if speed is not None else [])]:
        print_table(table, width=130)


@reports_user_errors
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
    prepare_process()
    from distill.files import atomic_write
    from distill.report import compare_runs, comparison_table

    store = open_store(artifacts)
    comparison = compare_runs(store, runs)
    path = output or store.root / "reports" / "comparison.json"
    if is_first_process():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(comparison, indent=1) + "\n")
    if as_json:
        say_json(comparison)
        return
    print_table(comparison_table(comparison), width=130)
    say(f"comparison: {path}")


@reports_user_errors
def show(
    config: AnyConfigArgument,
    set_: SetOption = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema.")] = False,
) -> None:
    """Print the resolved config, of a run or of a pair, every default filled in."""
    from distill.config import json_schema
    from distill.stages.measure_pair import (
        PairConfig,
        dump_pair_config,
        is_pair_config,
        load_pair_config,
    )
    from distill.stages.run_config import RunConfig, dump_run_config

    overrides = set_ or []
    is_pair = is_pair_config(config, overrides)
    if schema:
        say_json(json_schema(PairConfig if is_pair else RunConfig))
    elif is_pair:
        say(dump_pair_config(load_pair_config(config, overrides)), ends_line=False)
    else:
        say(dump_run_config(load_run(config, overrides)), ends_line=False)
