"""Owns the tests of the speed a plan promises: the roofline by hand, and the measured one.

Refuses to load a weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from distill.stages.run_config import RunConfig, load_config
from distill.stages.speed_plan import plan_speed, speed_table

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(REPOSITORY / "configs" / "quickstart.yaml")


def test_cost_is_the_ratio_of_weights_read_at_batch_one(config: RunConfig) -> None:
    # SmolLM2-135M: 576 wide, MLP 1536, 9 heads of 64, 3 of them keys and values, 30 layers.
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    target = 30 * layer + 576 + 49152 * 576
    draft = layer + 576 + 8192 * 576
    found = plan_speed(config)
    assert found is not None
    assert found["draft_cost_ratio"] == pytest.approx(draft / target)
    # Reading the weights takes longer than computing on a few tokens: verification is free.
    assert found["verify_cost_ratio"]["5"] == pytest.approx(1.0)
    assert found["break_even_acceptance_rate"] == pytest.approx(draft / target, abs=1e-6)


def test_a_target_in_bytes_is_read_faster_so_its_draft_costs_more(config: RunConfig) -> None:
    whole = plan_speed(config)
    target = config.target.model_copy(update={"quantize": "int8"})
    small = plan_speed(config.model_copy(update={"target": target}))
    assert whole is not None
    assert small is not None
    # One byte a weight in place of the dtype's two (or four), on the target's side alone.
    factor = 4.0 if config.target.dtype == "float32" else 2.0
    assert small["draft_cost_ratio"] == pytest.approx(factor * whole["draft_cost_ratio"])


def test_a_large_batch_ends_speculation(config: RunConfig) -> None:
    found = plan_speed(config)
    assert found is not None
    rows = {row["batch_size"]: row for row in found["by_batch_size"]}
    best = {size: row["by_alpha"][4]["predicted_speedup"] for size, row in rows.items()}
    assert best[1] >= best[4] >= best[16] >= best[64] == 1.0
    assert rows[64]["break_even_acceptance_rate"] is None
    table = speed_table(found)
    assert table.row_count == 4
    assert "do not" in list(table.columns[-1].cells)[-1]


class Measured:
    """Stands in for a measure artifact: its timing."""

    metrics: ClassVar[dict[str, Any]] = {
        "timing": {
            "verify_cost_ratio": {"1": 1.0, "5": 1.4},
            "draft_costs": [{"draft": "distilled", "draft_cost_ratio": 0.2}],
            "plans": [
                {
                    "draft": "distilled",
                    "temperature": 1.0,
                    "num_draft_tokens": 0,
                    "predicted_speedup": 1.0,
                }
            ],
        }
    }


def test_what_was_measured_takes_the_place_of_what_was_assumed(config: RunConfig) -> None:
    found = plan_speed(config, Measured())  # type: ignore[arg-type]
    assert found is not None
    assert (found["source"], found["draft_cost_ratio"]) == ("measured", 0.2)
    assert found["verify_cost_ratio"] == {"1": 1.0, "5": 1.4}
    assert "temperature 1: do not speculate" in str(speed_table(found).caption)


def test_without_a_shape_nothing_is_promised(config: RunConfig) -> None:
    unknown = config.target.model_copy(update={"model": "org/unknown", "shape": None})
    assert plan_speed(config.model_copy(update={"target": unknown})) is None
