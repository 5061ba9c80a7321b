"""Owns the pictures of a report: inline SVG whose colours are CSS variables of the page.

Refuses to know the page's palette: a theme switch recolours every plot without a second render.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Stand-ins that matplotlib accepts as colours, replaced by CSS variables in the finished SVG.
INK, FAINT = "#010101", "#020202"
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--line)"}
SERIES = ("#030303", "#040404", "#050505", "#060606", "#070707", "#080808")
_VARIABLES |= {colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)}
MARKERS = ("o", "s", "D", "^", "v", "P")
LABELS = {
    "distilled": "distilled draft",
    "undistilled": "undistilled draft",
    "prompt_lookup": "prompt lookup",
    "draft": "draft",
}
# Longer names leave a plot no room for its axes; the tables have them in full.
_MAX_LABEL_CHARS = 32
_LEGEND_COLUMNS, _LEGEND_ROW_INCHES = 3, 0.2

_STYLE: Any = {
    "svg.fonttype": "none",
    # Task names are data: a dollar sign in one is a dollar sign.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
}


def acceptance_by_task(report: Mapping[str, Any]) -> str | None:
    """Analytic acceptance rate of each draft on each task, one panel per temperature."""
    cells = [c for c in report["cells"] if c["analytic_acceptance_rate"]["value"] is not None]
    drafts = [d for d in report["drafts"] if any(c["draft"] == d for c in cells)]
    if not drafts:
        return None
    tasks = list(dict.fromkeys(c["task"] for c in cells))

    def draw(axes: Axes, temperature: float) -> None:
        for index, draft in enumerate(drafts):
            mine = {
                c["task"]: c["analytic_acceptance_rate"]
                for c in cells
                if (c["draft"], c["temperature"]) == (draft, temperature)
            }
            rows = [(i, mine[t]) for i, t in enumerate(tasks) if t in mine]
            offset = (index - (len(drafts) - 1) / 2) * min(0.24, 0.8 / len(drafts))
            _intervals(
                axes,
                positions=[i + offset for i, _ in rows],
                estimates=[e for _, e in rows],
                draft=draft,
                drafts=report["drafts"],
                horizontal=True,
            )
        labels = ["all tasks" if t is None else shortened(t) for t in tasks]
        axes.set_yticks(range(len(tasks)), labels)
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(-0.03, 1.03)
        axes.set_xlabel("analytic acceptance rate")

    height = 1.3 + 0.42 * len(tasks)
    return _panels("task", report["temperatures"], draw, height=height, share_y=True)


def acceptance_by_position(report: Mapping[str, Any]) -> str | None:
    """Probability that the i-th draft token is accepted, one panel per temperature."""
    if not report["num_draft_tokens"]:
        return None

    def draw(axes: Axes, temperature: float) -> None:
        for draft in report["drafts"]:
            for cell in report["cells"]:
                if (cell["draft"], cell["temperature"], cell["task"]) != (draft, temperature, None):
                    continue
                estimates = cell["acceptance_by_position"]
                known = [(i + 1, e) for i, e in enumerate(estimates) if e["value"] is not None]
                _line(axes, [i for i, _ in known], [e for _, e in known], draft, report["drafts"])
        axes.set_ylim(-0.03, 1.03)
        axes.set_xticks(range(1, report["num_draft_tokens"] + 1))
        axes.set_xlabel("position in the block")
        axes.set_ylabel("accepted")

    return _panels("position", report["temperatures"], draw, height=2.9, share_y=True)


def speedup_by_depth(report: Mapping[str, Any]) -> str | None:
    """Predicted speedup against the number of draft tokens, with the measured point on it."""
    plans = report["timing"].get("plans", [])
    runs = report["timing"].get("runs", [])
    if not plans:
        return None
    heights = [point["speedup"] for plan in plans for point in plan["curve"]]
    heights += [run["speedup"]["high"] or run["speedup"]["value"] for run in runs]
    top = 1.06 * max(1.0, *heights)

    def draw(axes: Axes, temperature: float) -> None:
        axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        for draft in report["drafts"]:
            colour, _ = _look(draft, report["drafts"])
            for plan in plans:
                if (plan["draft"], plan["temperature"]) == (draft, temperature):
                    depths = [0, *(point["num_draft_tokens"] for point in plan["curve"])]
                    values = [1.0, *(point["speedup"] for point in plan["curve"])]
                    axes.plot(depths, values, color=colour, label=_label(draft))
            for run in runs:
                if (run["draft"], run["temperature"]) == (draft, temperature):
                    _intervals(
                        axes,
                        positions=[run["num_draft_tokens"]],
                        estimates=[run["speedup"]],
                        draft=draft,
                        drafts=report["drafts"],
                        label="",
                    )
        axes.set_xlabel("draft tokens per target call")
        axes.set_ylabel("speedup")
        axes.set_ylim(0, top)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _panels("depth", report["temperatures"], draw, height=2.9, share_y=True)


def training_curve(points: Sequence[tuple[int, float, float]]) -> str | None:
    """Held-out acceptance at temperatures 1 and 0 against step; step 0 is the undistilled draft."""
    if len(points) < 2:
        return None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.6, 2.8), layout="constrained")
        axes = figure.subplots()
        steps = [p[0] for p in points]
        for column, label in ((1, "temperature 1"), (2, "temperature 0")):
            axes.plot(
                steps,
                [p[column] for p in points],
                color=SERIES[0],
                linestyle="-" if column == 1 else (0, (4, 2)),
                label=label,
            )
        axes.set_xlabel("training step")
        axes.set_ylabel("held-out acceptance")
        figure.legend(loc="outside upper left", ncols=2)
        return _svg(figure, "training")


def _panels(
    name: str,
    temperatures: Sequence[float],
    draw: Callable[[Axes, float], None],
    *,
    height: float,
    share_y: bool,
) -> str:
    """A row of one panel per temperature under a shared legend, as SVG."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.6, height), layout="constrained")
        row = figure.subplots(1, len(temperatures), sharey=share_y, squeeze=False)[0]
        for axes, temperature in zip(row, temperatures, strict=True):
            axes.set_title(f"temperature {temperature:g}")
            draw(axes, temperature)
        for axes in row[1:]:
            axes.set_ylabel("")
        handles, labels = row[0].get_legend_handles_labels()
        if handles:
            more_rows = (len(handles) - 1) // _LEGEND_COLUMNS
            figure.set_figheight(height + _LEGEND_ROW_INCHES * more_rows)
            figure.legend(handles, labels, loc="outside upper left", ncols=_LEGEND_COLUMNS)
        return _svg(figure, name)


def shortened(name: str) -> str:
    """A name as a plot has room for it: the middle of a long one is left out."""
    if len(name) <= _MAX_LABEL_CHARS:
        return name
    half = (_MAX_LABEL_CHARS - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def _label(draft: str) -> str:
    return shortened(LABELS.get(draft, draft))


def _look(draft: str, drafts: Sequence[str]) -> tuple[str, str]:
    """Colour and marker: both, so that a plot reads without colour."""
    index = drafts.index(draft)
    return SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]


def _errors(estimates: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Distances below and above each value; zero where there is no interval."""
    below = [0.0 if e["low"] is None else max(0.0, e["value"] - e["low"]) for e in estimates]
    above = [0.0 if e["high"] is None else max(0.0, e["high"] - e["value"]) for e in estimates]
    return [below, above]


def _intervals(
    axes: Axes,
    *,
    positions: Sequence[float],
    estimates: Sequence[Mapping[str, Any]],
    draft: str,
    drafts: Sequence[str],
    horizontal: bool = False,
    label: str | None = None,
) -> None:
    colour, marker = _look(draft, drafts)
    values = [e["value"] for e in estimates]
    axes.errorbar(
        values if horizontal else positions,
        positions if horizontal else values,
        xerr=_errors(estimates) if horizontal else None,
        yerr=None if horizontal else _errors(estimates),
        fmt=marker,
        color=colour,
        elinewidth=1.4,
        label=_label(draft) if label is None else label or None,
    )


def _line(
    axes: Axes,
    positions: Sequence[int],
    estimates: Sequence[Mapping[str, Any]],
    draft: str,
    drafts: Sequence[str],
) -> None:
    colour, marker = _look(draft, drafts)
    axes.plot(
        positions,
        [e["value"] for e in estimates],
        color=colour,
        marker=marker,
        label=_label(draft),
    )
    below, above = _errors(estimates)
    axes.fill_between(
        positions,
        [e["value"] - d for e, d in zip(estimates, below, strict=True)],
        [e["value"] + d for e, d in zip(estimates, above, strict=True)],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )


def _svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element: themed, with ids of its own, equal bytes for equal data."""
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # matplotlib's own stylesheet would apply to the whole page, and its ids repeat in every plot.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"font-family: [^;\"]*(; )?", "", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    # Without a size in points the viewBox rules and the page decides the width.
    text = re.sub(r'\s(?:width|height)="[0-9.]+pt"', "", text, count=2)
    return text.replace("<svg ", '<svg role="img" ', 1)
