"""The pair pipeline: measure what exists already, two model references or a server that runs both.

Refuses to know how anything is measured; it wires a file's section to the stage it is for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.artifacts import ArtifactStore
from distill.files import atomic_write
from distill.report import build_report, write_report
from distill.report.compare import SERVED_FILE
from distill.stages.measure import measure_acceptance
from distill.stages.measure_pair import PairConfig, corpus_prompts
from distill.stages.measure_server import measure_served


def run(
    config: PairConfig, store: ArtifactStore, *, rebuild: bool = False
) -> tuple[dict[str, Any], Sequence[Path]]:
    """Measure the pair; returns the report and the files it was written to.

    ``rebuild`` measures what has been measured once more; a server is asked anew every time.

    Raises:
        DistillError: whatever the stage raises.
    """
    directory = store.root / "reports" / config.name
    if config.measure is not None:
        measured = measure_acceptance(config.measure, store, inputs={}, rebuild=rebuild)
        report = build_report(config.name, {"measure": measured}, gate=config.measure.bounds)
        return report, write_report(directory, report)
    served = config.served
    assert served is not None, "a pair's file has one of the two sections"
    prompts = corpus_prompts(
        served.corpus, config.target, max_prompts_per_task=served.max_prompts_per_task
    )
    report = {"name": config.name} | measure_served(served, config.target, prompts)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SERVED_FILE
    atomic_write(path, json.dumps(report, indent=1) + "\n")
    return report, [path]
