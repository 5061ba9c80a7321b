"""Owns what speed a plan can promise before anything is trained, and after something was measured.

Refuses to load a weight: costs follow from shapes and the stated hardware, or from a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distill.artifacts import Artifact
from distill.initialization import ShapeOf
from distill.metrics import planner
from distill.metrics.planner_tables import speedups_by_alpha
from distill.models import ModelShape, read_shape
from distill.stages.plan_shapes import WEIGHT_BYTES, draft_shape
from distill.stages.run_config import HardwareConfig, RunConfig

if TYPE_CHECKING:
    from rich.table import Table

_QUANTIZED_BYTES = {"int8": 1}
_BATCH_SIZES = (1, 4, 16, 64)
_WIDTHS = (1, 2, 3, 5, 9, 17)


@dataclass(frozen=True)
class MeasuredCosts:
    """What a measurement found of the judged draft at its first temperature.

    ``by_batch_size``: c and v(n), by width, at batch 1 and at every other size that was timed.
    ``plans`` are those of all temperatures.
    """

    draft_step_ms: float
    target_step_ms: float
    by_batch_size: Mapping[int, tuple[float, Mapping[int, float]]]
    conditions: Mapping[str, Any]
    plans: Sequence[Mapping[str, Any]]


def measured_costs(measured: Artifact | None) -> MeasuredCosts | None:
    """The costs in a measure artifact; None without one, or where speed was not timed."""
    timing = None if measured is None else measured.metrics.get("timing")
    if not timing:
        return None
    first = timing["plans"][0]
    draft, temperature = first["draft"], first["temperature"]
    cost = next(
        row
        for row in timing["draft_costs"]
        if (row["draft"], row["temperature"]) == (draft, temperature)
    )
    rows = [row for row in timing["batches"] if row["temperature"] == temperature]
    return MeasuredCosts(
        draft_step_ms=cost["draft_step_ms"]["median"],
        target_step_ms=timing["target_step_ms"]["median"],
        by_batch_size={
            1: (cost["draft_cost_ratio"], _by_width(timing)),
            **{row["batch_size"]: (row["draft_cost_ratio"], _by_width(row)) for row in rows},
        },
        conditions=timing["conditions"],
        plans=[plan for plan in timing["plans"] if plan["draft"] == draft],
    )


def _by_width(row: Mapping[str, Any]) -> dict[int, float]:
    return {int(n): ratio for n, ratio in row["verify_cost_ratio"].items()}


def plan_speed(
    config: RunConfig, measured: Artifact | None = None, *, shape_of: ShapeOf = read_shape
) -> dict[str, Any] | None:
    """Best K, speedup and break-even alpha for the pair; None where a shape is not known.

    Before a measurement the draft's cost c and the cost of wide passes v(n) come from a roofline: a
    step takes the longer of reading its weights and computing on them, at the config's
    ``hardware``; a quantised target reads fewer bytes, so its draft costs more of a step. Overheads
    are in neither, so c is a lower bound and the speedup an upper one. Afterwards c and v(n) are
    the measured ones, at the batch sizes that were timed, and ``plans`` the measured plan.
    """
    depth = config.measure.timing.max_draft_tokens
    costs = measured_costs(measured)
    if costs is not None:
        found = [
            {"batch_size": rows} | _plan(cost_ratio, verify, min(depth, max(verify) - 1))
            for rows, (cost_ratio, verify) in costs.by_batch_size.items()
        ]
        return _of_batches(found, source="measured", plans=costs.plans)
    target = shape_of(config.target)
    draft = draft_shape(config, target, shape_of)
    if target is None or draft is None:
        return None
    head_rows = config.distill.vocabulary_size or draft.vocab_size
    # The draft is held in the target's dtype, and never as bytes: quantize is the target's alone.
    draft_bytes = WEIGHT_BYTES[config.target.dtype]
    target_bytes = _QUANTIZED_BYTES.get(config.target.quantize, draft_bytes)
    batches = []
    for rows in _BATCH_SIZES:
        verify = _roofline_verify(target, rows, target_bytes, config.hardware)
        step = _step_s(target, target.vocab_size, rows, target_bytes, config.hardware)
        cost_ratio = _step_s(draft, head_rows, rows, draft_bytes, config.hardware) / step
        batches.append({"batch_size": rows} | _plan(cost_ratio, verify, depth))
    return _of_batches(batches, source="roofline", plans=[])


def _of_batches(
    batches: Sequence[Mapping[str, Any]], *, source: str, plans: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The plan of batch 1, the first, with those of all sizes beside it."""
    return {**batches[0], "source": source, "by_batch_size": batches, "plans": plans}


def _plan(draft_cost_ratio: float, verify: Mapping[int, float], depth: int) -> dict[str, Any]:
    cost = planner.interpolate(verify)
    return {
        "draft_cost_ratio": draft_cost_ratio,
        "verify_cost_ratio": {str(n): v for n, v in verify.items()},
        "break_even_acceptance_rate": planner.break_even_acceptance_rate(
            draft_cost_ratio=draft_cost_ratio, verify_cost_ratio=cost, max_draft_tokens=depth
        ),
        "by_alpha": speedups_by_alpha(
            draft_cost_ratio=draft_cost_ratio, verify_cost_ratio=cost, max_draft_tokens=depth
        ),
    }


def _roofline_verify(
    target: ModelShape, rows: int, element: int, hardware: HardwareConfig
) -> dict[int, float]:
    """v(n) of ``rows`` rows at once, by the roofline."""
    one = _step_s(target, target.vocab_size, rows, element, hardware)
    return {
        n: _step_s(target, target.vocab_size, rows * n, element, hardware) / one for n in _WIDTHS
    }


def _step_s(
    shape: ModelShape, head_rows: int, num_tokens: int, element: int, hardware: HardwareConfig
) -> float:
    """Seconds of one pass: the weights are read once, each computes twice a token.

    The embedding is a lookup; the head counts with the rows it has.
    """
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    weights = shape.num_parameters - tables + head_rows * shape.hidden_size
    return max(
        weights * element / hardware.memory_bandwidth,
        2.0 * weights * num_tokens / hardware.peak_flops,
    )


def speed_table(found: Mapping[str, Any]) -> Table:
    """The plan's speed as a table for the terminal: what each acceptance rate would be worth."""
    from rich.table import Table

    table = Table(title="speedup by batch size and acceptance rate", title_justify="left")
    rows = found["by_batch_size"]
    table.add_column("batch", justify="right")
    table.add_column("c", justify="right")
    table.add_column("break-even", justify="right")
    for row in rows[0]["by_alpha"]:
        table.add_column(f"{row['alpha']:.0%}", justify="right")
    for row in rows:
        even = row["break_even_acceptance_rate"]
        table.add_row(
            str(row["batch_size"]),
            f"{row['draft_cost_ratio']:.3f}",
            "never" if even is None else f"{even:.1%}",
            *(
                f"{one['predicted_speedup']:.2f}x K={one['num_draft_tokens']}"
                if one["num_draft_tokens"]
                else "do not"
                for one in row["by_alpha"]
            ),
        )
    notes = (
        "costs as measured"
        if found["source"] == "measured"
        else ("costs from shapes and the config's `hardware`: an upper bound, without overheads")
    )
    said = [
        f"temperature {plan['temperature']:g}: "
        + (
            f"{plan['num_draft_tokens']} draft tokens, {plan['predicted_speedup']:.2f}x predicted"
            if plan["num_draft_tokens"]
            else "do not speculate"
        )
        for plan in found["plans"]
    ]
    table.caption = "\n".join([*said, f"K: draft tokens per target call; {notes}"])
    return table
