"""Owns the tests of the speed a plan promises: the roofline by hand, and the measured one.

Refuses to load a weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from distill.initialization import ScratchConfig
from distill.stages.candidates import candidate_table, plan_candidates
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
    draft = layer + 576 + config.distill.vocabulary_size * 576
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
            "conditions": {"device": "cpu"},
            "target_step_ms": {"median": 10.0},
            "verify_cost_ratio": {"1": 1.0, "5": 1.4},
            "draft_costs": [
                {
                    "draft": "distilled",
                    "temperature": 1.0,
                    "draft_cost_ratio": 0.2,
                    "draft_step_ms": {"median": 2.0},
                }
            ],
            "batches": [
                {
                    "batch_size": 4,
                    "temperature": 1.0,
                    "draft_cost_ratio": 0.3,
                    "verify_cost_ratio": {"1": 1.0, "3": 2.0, "5": 4.0},
                },
                {
                    "batch_size": 4,
                    "temperature": 0.0,
                    "draft_cost_ratio": 0.9,
                    "verify_cost_ratio": {"1": 9.0, "5": 9.0},
                },
            ],
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


def test_the_batch_sizes_that_were_timed_keep_their_rows(config: RunConfig) -> None:
    found = plan_speed(config, Measured())  # type: ignore[arg-type]
    assert found is not None
    rows = [(row["batch_size"], row["draft_cost_ratio"]) for row in found["by_batch_size"]]
    assert rows == [(1, 0.2), (4, 0.3)]
    table = speed_table(found)
    assert list(table.columns[0].cells) == ["1", "4"]
    # At 0.9 and K = 4: 1 + 0.9 + 0.81 + 0.729 + 0.6561 tokens for 1.4 + 4 x 0.2 steps; of a batch
    # of 4, at K = 1, 1.9 tokens for 1.5 + 0.3 steps.
    best = {row["batch_size"]: row["by_alpha"][-1] for row in found["by_batch_size"]}
    assert best[1]["predicted_speedup"] == pytest.approx(4.0951 / 2.2)
    assert best[4]["num_draft_tokens"] == 1
    assert best[4]["predicted_speedup"] == pytest.approx(1.9 / 1.8)


def test_the_shapes_show_the_cost_that_was_measured(config: RunConfig) -> None:
    other = ScratchConfig(num_layers=1)
    with_other = config.model_copy(update={"candidates": (other,)})
    before = plan_candidates(with_other).candidates
    plan = plan_candidates(with_other, measured=Measured())  # type: ignore[arg-type]
    own, beside = plan.candidates
    assert (own.draft_cost_ratio, own.draft_step_ms) == (0.2, 2.0)
    assert own.draft_cost_ratio != before[0].draft_cost_ratio
    # the other was not measured, but is verified by the target that was
    assert beside.draft_cost_ratio == before[1].draft_cost_ratio
    assert beside.by_alpha[-1]["predicted_speedup"] < before[1].by_alpha[-1]["predicted_speedup"]
    assert [cell[0] == "~" for cell in candidate_table(plan).columns[3].cells] == [False, True]
    assert "as the measure stage found them" in plan.note


def test_without_a_shape_nothing_is_promised(config: RunConfig) -> None:
    unknown = config.target.model_copy(update={"model": "org/unknown", "shape": None})
    assert plan_speed(config.model_copy(update={"target": unknown})) is None
