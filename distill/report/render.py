"""Owns how a report is shown: a self-contained HTML page, report.json, a table for the terminal.

Refuses to know where the numbers come from; it formats what build.py gathered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from distill.artifacts import atomic_write
from distill.metrics.sentences import ENOUGH_PROMPTS, few_prompts
from distill.report.models import how_held

if TYPE_CHECKING:
    from rich.table import Table

MISSING = "–"
_REVISION_CHARS = len("sha256:") + 12
FEW_MARK = "*"
FEW_NOTE = f"{FEW_MARK} {few_prompts(0)}"

RULE_NAMES = {
    "speculative_sampling": "speculative sampling",
    "draft_argmax": "argmax draft (vLLM, llama.cpp)",
    "sample_and_match": "sample and match (MLX, exllama)",
}


def write_report(directory: Path, report: Mapping[str, Any]) -> list[Path]:
    """Write report.json and report.html (no external file, no network); returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "report.json", directory / "report.html"]
    atomic_write(paths[0], json.dumps(report, indent=2, sort_keys=True) + "\n")
    atomic_write(paths[1], render_html(report))
    return paths


def render_html(report: Mapping[str, Any]) -> str:
    """The page as one string. Everything that comes from a run is escaped."""
    # Imported here because matplotlib is slow to import and the terminal table does without it.
    from distill.report import plots

    drawings = {
        "task": plots.acceptance_by_task(report),
        "position": plots.acceptance_by_position(report),
        "depth": plots.speedup_by_depth(report),
        "training": plots.training_curve(training_points(report)),
    }
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        **_FORMATS,
        "estimate_value": estimate_value,
        "estimate_range": estimate_range,
        "range": spread_range,
        "scalars": scalars,
        "quoted": quoted,
        "skipped": skipped_sentence,
        "held": how_held,
    }
    source = resources.files("distill").joinpath("templates/report.html.j2")
    template = environment.from_string(source.read_text(encoding="utf-8"))
    # The SVG is markup of our own making; its only text from a run is escaped by matplotlib.
    svg = {name: Markup(text) if text else None for name, text in drawings.items()}
    return template.render(
        report=report,
        plots=svg,
        labels=plots.LABELS,
        trained=trained(report),
        few=_figures_of_few(report),
        enough=ENOUGH_PROMPTS,
        names=RULE_NAMES,
        self_tests=self_tests_sentence(report["self_tests"]),
        has_failed_tests=any(t["is_passed"] is False for t in report["self_tests"]),
    )


def report_table(report: Mapping[str, Any]) -> Table:
    """The report on one terminal screen."""
    from rich.table import Table
    from rich.text import Text

    verdict = report["verdict"]
    title = Text(f"{report['name']}: {headline(verdict)}")
    title.stylize("bold green" if verdict["ship"] else "bold red")
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("", no_wrap=True)
    for row in report["summary"]:
        table.add_column(f"temperature {row['temperature']:g}", justify="right", no_wrap=True)
    lines = summary_lines(report["summary"])
    for label, cells in lines:
        table.add_row(label, *cells)
    notes = few_notes([text for _, cells in lines for text in cells])
    notes.append(f"target: {named(report['target'])}")
    notes += [f"{model['draft']}: {named(model)}" for model in report["draft_models"]]
    notes += [f"training: {trained(report)}"] if trained(report) else []
    notes += [f"why: {reason}" for reason in verdict["reasons"]]
    notes += [f"compared: {sentence}" for sentence in sentences(report)]
    if report["gate"] is not None:
        outcome = "passed" if report["gate"]["is_passed"] else "failed"
        notes += [f"gate {outcome}", *(f"gate: {text}" for text in report["gate"]["failures"])]
    if report["num_skipped"]:
        notes.append(f"skipped: {skipped_sentence(report)}")
    notes.append(f"checked: {self_tests_sentence(report['self_tests'])}")
    notes += [f"{stage}: {artifact['path']}" for stage, artifact in report["artifacts"].items()]
    table.caption = Text("\n".join(notes), overflow="fold")
    return table


def summary_lines(summary: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Label and one text per temperature, for the lines of the terminal table."""
    lines: list[tuple[str, list[str]]] = []
    for metric, label, unit in (
        ("analytic_acceptance_rate", "acceptance rate, analytic", "percent"),
        ("acceptance_rate", "acceptance rate, decoded", "percent"),
        ("block_efficiency", "block efficiency", "number"),
    ):
        has_before = any(row[metric]["before"] for row in summary)
        for moment in ("before", "after"):
            texts = [estimate(row[metric][moment], unit) for row in summary]
            if moment == "after" and not has_before:
                lines.append((label, texts))
            elif has_before:
                lines.append((f"{label}, {moment}", texts))
    timed = [row["timed"] or {} for row in summary]
    depths = [str(run.get("num_draft_tokens", MISSING)) for run in timed]
    rivals = [row["strongest_rival"] for row in summary]
    return [
        *lines,
        ("num_draft_tokens", depths),
        ("predicted speedup", [times(run.get("predicted_speedup")) for run in timed]),
        ("measured speedup", [estimate(run.get("speedup"), "times") for run in timed]),
        ("measured / predicted", [percent(run.get("efficiency")) for run in timed]),
        (
            "strongest rival",
            [f"{r['draft']} {times(r['speedup']['value'])}" if r else MISSING for r in rivals],
        ),
    ]


def sentences(report: Mapping[str, Any]) -> list[str]:
    """What the paired comparisons over all tasks say."""
    return [row["sentence"] for row in report["differences"] if row["task"] is None]


def self_tests_sentence(tests: Sequence[Mapping[str, Any]]) -> str:
    """How many self-tests passed, failed and could not be judged: not judged is not passed."""
    passed, failed, unjudged = (
        sum(t["is_passed"] is outcome for t in tests) for outcome in (True, False, None)
    )
    text = f"{passed} of {len(tests)} self-tests of this measurement passed"
    if failed:
        text += f", {failed} failed"
    if unjudged:
        text += f", {unjudged} {'was' if unjudged == 1 else 'were'} not judged"
    return text


def skipped_sentence(report: Mapping[str, Any]) -> str:
    """How many prompts were left out, and why."""
    number, measured = report["num_skipped"], report["num_prompts"]
    return (
        f"{number} of {number + measured} prompts, for the target's context has no room for them "
        "and an answer"
    )


def headline(verdict: Mapping[str, Any]) -> str:
    """The verdict in words."""
    return "ship" if verdict["ship"] else "do not ship"


def trained(report: Mapping[str, Any]) -> str:
    """What was trained, in a line: where the draft started, its size, losses, steps and time."""
    settings, metrics = report["training"]["settings"], report["training"]["metrics"]
    parts = []
    if "initialization" in settings:
        start = dict(settings["initialization"])
        kind = start.pop("kind", "")
        parts.append(f"{kind} ({', '.join(f'{k} {v}' for k, v in start.items() if v is not None)})")
    if "num_parameters" in metrics:
        parts.append(f"{metrics['num_parameters'] / 1e6:.1f}M parameters")
    if settings.get("vocabulary_size"):
        parts.append(f"proposes {settings['vocabulary_size']} tokens")
    if "loss" in settings:
        loss = settings["loss"]
        names = [loss] if isinstance(loss, str) else [phase["name"] for phase in loss]
        parts.append(f"trained with {' then '.join(names)}")
    if "num_steps" in metrics:
        parts.append(_work(report["training"]))
    return "; ".join(parts)


def _work(training: Mapping[str, Any]) -> str:
    """Steps, tokens and seconds of a training: of several rounds their sums."""
    total, rounds = training["total"], training["rounds"]
    sums = f"{total['num_steps']} steps, {total['num_tokens']} tokens, {total['train_s']:.0f} s"
    if total["num_rounds"] == 1:
        return sums
    steps = " + ".join(str(row["num_steps"]) for row in rounds)
    text = sums if len(rounds) == 1 else f"{steps} = {sums}"
    if total["num_rounds_unread"]:
        return f"{text} in the last {len(rounds)} of its rounds; those before are deleted"
    return f"{len(rounds)} rounds of {text}"


def named(model: Mapping[str, Any]) -> str:
    """A model in a line: what it is, how its weights were held, where its revision begins."""
    revision = model["revision"] and model["revision"][:_REVISION_CHARS]
    parts = [part for part in (how_held(model), revision) if part]
    return f"{model['model']} ({', '.join(parts)})" if parts else str(model["model"])


def training_points(report: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    """(step, held-out acceptance at temperature 1, at temperature 0) from the training log."""
    scored = [
        (row["step"], row["held_out"]) for row in report["training"]["log"] if "held_out" in row
    ]
    return [(step, score["acceptance"], score["greedy_agreement"]) for step, score in scored]


def percent(value: float | None) -> str:
    """0.7312 -> 73.1%"""
    return MISSING if value is None else f"{100 * value:.1f}%"


def points(value: float | None) -> str:
    """A difference of two rates, in percentage points with its sign."""
    return MISSING if value is None else f"{100 * value:+.1f}"


def number(value: float | None) -> str:
    """Two decimals."""
    return MISSING if value is None else f"{value:.2f}"


def times(value: float | None) -> str:
    """A speedup."""
    return MISSING if value is None else f"{value:.2f}x"


def change(value: float | None) -> str:
    """A difference with its sign."""
    return MISSING if value is None else f"{value:+.2f}"


_FORMATS: dict[str, Callable[[float | None], str]] = {
    "percent": percent,
    "points": points,
    "number": number,
    "times": times,
    "change": change,
}


def estimate(value: Mapping[str, Any] | None, unit: str = "percent") -> str:
    """A value and its interval: 73.1% [70.2, 75.9]; the unit is written once.

    An asterisk behind the interval says that it is over too few prompts, see ``few_notes``.
    """
    if value is None or value["value"] is None:
        return MISSING
    text = estimate_value(value, unit)
    if value["low"] is None:
        return text
    mark = FEW_MARK if few_prompts(value["num_prompts"]) else ""
    return f"{text} [{estimate_range(value, unit, ', ')}]{mark}"


def few_notes(texts: Sequence[str]) -> list[str]:
    """What the mark means, where one of the texts has it."""
    return [FEW_NOTE] if any(text.endswith(FEW_MARK) for text in texts) else []


def _figures_of_few(report: Mapping[str, Any]) -> set[str]:
    """The figures in which an interval is over too few prompts to be relied on."""
    cells = report["cells"]
    pooled = [cell for cell in cells if cell["task"] is None]
    shown = {
        "task": [cell["analytic_acceptance_rate"] for cell in cells],
        "position": [value for cell in pooled for value in cell["acceptance_by_position"]],
        "depth": [run["speedup"] for run in report["timing"].get("runs", [])],
    }
    return {
        name
        for name, values in shown.items()
        if any(v["low"] is not None and few_prompts(v["num_prompts"]) for v in values)
    }


def estimate_range(value: Mapping[str, Any], unit: str = "percent", to: str = " to ") -> str:
    """The interval alone, without the unit: 70.2 to 75.9"""
    return to.join(_FORMATS[unit](value[end]).rstrip("%x") for end in ("low", "high"))


def estimate_value(value: Mapping[str, Any] | None, unit: str = "percent") -> str:
    """The value alone."""
    return _FORMATS[unit](None if value is None else value["value"])


def spread_range(value: Mapping[str, Any]) -> str:
    """The range of a timing: 20.9 to 21.8"""
    return f"{value['minimum']:.1f} to {value['maximum']:.1f}"


def quoted(text: str) -> str:
    """A token as text, its white space visible: " the" and "\\n"."""
    return json.dumps(text, ensure_ascii=False)


def scalars(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted name and text of every scalar in a nested mapping; short lists are joined."""
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += scalars(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            if value and not any(isinstance(item, (Mapping, list, tuple)) for item in value):
                rows.append((name, ", ".join(str(item) for item in value[:12])))
            else:
                for index, item in enumerate(value[:12]):
                    if isinstance(item, Mapping):
                        rows += scalars(item, f"{name}[{index}].")
        elif value is not None:
            rows.append((name, f"{value:.6g}" if isinstance(value, float) else str(value)))
    return rows
