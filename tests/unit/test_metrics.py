"""Owns the tests of acceptance numbers, their intervals and the timing harness.

Refuses to know models: golden values are worked out by hand, intervals are checked against scipy.
Fault rows covered: 115 (tokens after EOS counted), 117 (what the denominator is), 118 (a counter
that always reads 100%), 119 (more accepted, yet slower).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from distill.errors import ConfigError
from distill.metrics import acceptance, intervals, summary, timing
from distill.metrics.intervals import Estimate
from distill.metrics.summary import PromptRecord
from distill.sampling import SamplingConfig

# ------------------------------------------------------------------------------ intervals


def test_interval_equals_scipy_percentile_bootstrap() -> None:
    generator = np.random.default_rng(5)
    tested = generator.integers(1, 40, 25)
    accepted = generator.binomial(tested, 0.6)
    ours = intervals.estimate(
        np.stack([accepted, tested], axis=1), intervals.ratio, seed=11, num_resamples=500
    )
    reference = stats.bootstrap(
        (accepted, tested),
        lambda a, t, axis: a.sum(axis=axis) / t.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=500,
        method="percentile",
        rng=np.random.default_rng(11),
    ).confidence_interval
    assert ours.value == pytest.approx(accepted.sum() / tested.sum(), abs=1e-15)
    assert (ours.low, ours.high) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_a_rate_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    table = [[1, 1], [0, 99]]
    assert intervals.estimate(table, intervals.ratio, seed=0).value == 0.01


def test_identical_prompts_have_a_point_interval() -> None:
    estimate = intervals.estimate([[3, 4]] * 6, intervals.ratio, seed=0)
    assert estimate == Estimate(0.75, 0.75, 0.75, 6)


def test_one_prompt_has_a_value_and_no_interval() -> None:
    assert intervals.estimate([[3, 4]], intervals.ratio, seed=0) == Estimate(0.75, None, None, 1)


def test_nothing_tested_has_no_value() -> None:
    assert intervals.estimate([[0, 0]] * 3, intervals.ratio, seed=0).value is None
    assert intervals.estimate(np.empty((0, 2)), intervals.ratio, seed=0).num_prompts == 0


def test_paired_difference_of_a_draft_with_itself_is_exactly_zero() -> None:
    table = [[3, 4, 3, 4], [1, 9, 1, 9], [5, 6, 5, 6]]
    assert intervals.estimate(table, intervals.ratio_difference, seed=0) == Estimate(0, 0, 0, 3)


def test_pairing_removes_the_spread_between_prompts() -> None:
    # Prompts differ wildly, the gap between the drafts is always one accepted token in ten.
    base = np.arange(1, 9)
    table = np.stack([base + 1, np.full(8, 10), base, np.full(8, 10)], axis=1)
    difference = intervals.estimate(table, intervals.ratio_difference, seed=0)
    assert (difference.low, difference.high) == pytest.approx((0.1, 0.1), abs=1e-12)


def test_speedup_is_time_per_token_over_time_per_token() -> None:
    # Plain 10 s for 100 tokens, speculative 4 s for 80 tokens: .1 / .05 = 2.
    estimate = intervals.estimate([[10, 100, 4, 80]], intervals.ratio_of_ratios, seed=0)
    assert estimate.value == 2.0


def test_estimate_survives_json() -> None:
    estimate = Estimate(0.5, 0.4, None, 2)
    assert Estimate.from_dict(estimate.to_dict()) == estimate


# ------------------------------------------------------------------------------ counts

GOLDEN = acceptance.summarize_rounds([2, 0, 4], 4)
"""Three rounds of four drafts: accepted 2 (third rejected), 0 (first rejected), 4 (all)."""


def test_golden_acceptance_rate_is_over_tested_tokens() -> None:
    # tested = 3 + 1 + 4 = 8
    assert GOLDEN["acceptance_rate"] == 6 / 8


def test_golden_draft_acceptance_rate_is_over_proposed_tokens() -> None:
    assert GOLDEN["draft_acceptance_rate"] == 6 / 12


def test_golden_block_efficiency_counts_the_correction_or_bonus() -> None:
    # emitted = 3 + 1 + 5 = 9 in 3 target calls
    assert GOLDEN["block_efficiency"] == 3.0


def test_golden_acceptance_by_position() -> None:
    assert GOLDEN["acceptance_by_position"] == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    assert GOLDEN["conditional_acceptance_by_position"] == [2 / 3, 1.0, 0.5, 1.0]


def test_the_two_rates_satisfy_the_published_conversion() -> None:
    # draft_acceptance_rate = (tau - 1) / K
    assert GOLDEN["draft_acceptance_rate"] == (GOLDEN["block_efficiency"] - 1) / 4


def test_an_adversarial_draft_reads_zero() -> None:
    rates = acceptance.summarize_rounds([0, 0, 0], 4)
    assert rates["acceptance_rate"] == 0.0
    assert rates["block_efficiency"] == 1.0
    assert rates["conditional_acceptance_by_position"] == [0.0, None, None, None]


def test_ragged_rounds_count_only_what_was_proposed() -> None:
    # Row 117: a round that proposed 1 token cannot be charged for 4.
    rates = acceptance.summarize_rounds([1, 2], [1, 4])
    assert rates["acceptance_rate"] == 3 / 4
    assert rates["draft_acceptance_rate"] == 3 / 5
    assert rates["acceptance_by_position"] == [1.0, 1.0, 0.0, 0.0]


def test_round_without_drafts_is_a_plain_step() -> None:
    rates = acceptance.summarize_rounds([0, 0], 0)
    assert rates["acceptance_rate"] is None
    assert rates["block_efficiency"] == 1.0


def test_accepting_more_than_proposed_is_refused() -> None:
    with pytest.raises(ConfigError, match="accepted 5 of 4"):
        acceptance.summarize_rounds([5], 4)


def test_lengths_must_agree() -> None:
    with pytest.raises(ConfigError, match="2 rounds were accepted from but 1"):
        acceptance.summarize_rounds([1, 1], [4])


# ------------------------------------------------------------------------------ two distributions


def _logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log().to(torch.float32)


def test_three_rules_by_hand() -> None:
    target = _logits([0.5, 0.3, 0.2])
    draft = _logits([0.2, 0.7, 0.1])
    sums = acceptance.analytic_sums(target, draft, SamplingConfig(temperature=1.0))
    assert sums["speculative_sampling"] == pytest.approx(0.2 + 0.3 + 0.1, abs=1e-6)
    assert sums["draft_argmax"] == pytest.approx(0.3, abs=1e-6)
    assert sums["sample_and_match"] == pytest.approx(0.10 + 0.21 + 0.02, abs=1e-6)


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    sums = acceptance.analytic_sums(logits, logits, SamplingConfig(temperature=0.7))
    assert sums["speculative_sampling"] == pytest.approx(7.0, abs=1e-5)


def test_disjoint_supports_are_never_accepted() -> None:
    target = _logits([0.5, 0.5, 0.0, 0.0])
    draft = _logits([0.0, 0.0, 0.5, 0.5])
    sums = acceptance.analytic_sums(target, draft, SamplingConfig(temperature=1.0))
    assert set(sums.values()) == {0.0}


def test_rules_coincide_at_temperature_zero() -> None:
    generator = torch.Generator().manual_seed(1)
    target, draft = (torch.randn(40, 3, generator=generator) for _ in range(2))
    sums = acceptance.analytic_sums(target, draft, SamplingConfig(temperature=0.0))
    agreements = float((target.argmax(-1) == draft.argmax(-1)).sum())
    assert sums == dict.fromkeys(acceptance.RULES, agreements)
    assert 0 < agreements < 40


def test_sums_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    target, draft = (torch.randn(10, 5, generator=generator) for _ in range(2))
    whole = acceptance.analytic_sums(target, draft, SamplingConfig())
    monkeypatch.setattr(acceptance, "ANALYTIC_CHUNK", 3)
    assert acceptance.analytic_sums(target, draft, SamplingConfig()) == pytest.approx(whole)


def test_padded_rows_of_a_wider_head_are_ignored() -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    padded = torch.cat([logits, torch.full((4, 2), 50.0)], dim=1)
    sums = acceptance.analytic_sums(padded, logits, SamplingConfig())
    assert sums["speculative_sampling"] == pytest.approx(4.0, abs=1e-5)


# ------------------------------------------------------------------------------ tables


def _record(draft: str, prompt: str, task: str, accepted: list[int], **kwargs: Any) -> PromptRecord:
    """A prompt decoded with K = 2 whose rounds accepted these many tokens; 4 analytic positions."""
    rounds = acceptance.summarize_rounds(accepted, 2)
    counts = {
        **rounds,
        "proposed_by_position": [len(accepted)] * 2,
        "tested_by_position": [len(accepted), sum(a >= 1 for a in accepted)],
        "accepted_by_position": [sum(a >= 1 for a in accepted), sum(a >= 2 for a in accepted)],
        "num_rounds": len(accepted),
        "accepted_length_histogram": [accepted.count(n) for n in range(3)],
    }
    sums = kwargs.pop("sums", {"speculative_sampling": 3.0, "draft_argmax": 2.0})
    return PromptRecord(draft, 1.0, prompt, task, counts, 4, sums)


RECORDS = [
    _record("ours", "p1", "math", [2, 2]),
    _record("ours", "p2", "chat", [0, 1]),
    _record("base", "p1", "math", [1, 1]),
    _record("base", "p2", "chat", [0, 0]),
]


def _cells(records: list[PromptRecord]) -> dict[tuple[str, str | None], dict[str, Any]]:
    cells = summary.summarize(records, num_draft_tokens=2, seed=0)
    return {(cell["draft"], cell["task"]): cell for cell in cells}


def test_tables_have_one_cell_per_draft_and_task_and_one_for_all_tasks() -> None:
    expected = [(d, t) for d in ("ours", "base") for t in (None, "math", "chat")]
    assert list(_cells(RECORDS)) == expected


def test_pooled_cell_by_hand() -> None:
    cell = _cells(RECORDS)["ours", None]
    # Rounds 2, 2, 0, 1 with K = 2: accepted 5, tested 2 + 2 + 1 + 2 = 7, proposed 8, emitted 9.
    assert cell["acceptance_rate"]["value"] == 5 / 7
    assert cell["draft_acceptance_rate"]["value"] == 5 / 8
    assert cell["block_efficiency"]["value"] == 9 / 4
    assert [e["value"] for e in cell["acceptance_by_position"]] == [3 / 4, 2 / 4]
    assert [e["value"] for e in cell["conditional_acceptance_by_position"]] == [3 / 4, 2 / 3]
    assert [e["value"] for e in cell["accepted_length_histogram"]] == [1 / 4, 1 / 4, 2 / 4]
    assert cell["analytic_acceptance_rate"]["value"] == 6 / 8
    assert cell["analytic_acceptance_rate_by_rule"]["draft_argmax"]["value"] == 4 / 8


def test_every_pooled_number_has_an_interval_around_it() -> None:
    cell = _cells(RECORDS)["ours", None]
    for name in ("acceptance_rate", "block_efficiency", "analytic_acceptance_rate"):
        assert cell[name]["low"] <= cell[name]["value"] <= cell[name]["high"]


def test_comparison_is_paired_by_prompt() -> None:
    rows = summary.compare(RECORDS, draft="ours", baseline="base", seed=0)
    assert [row["task"] for row in rows] == [None, "math", "chat"]
    # base: accepted 2 of tested 2 + 2 + 1 + 1 = 6.
    assert rows[0]["acceptance_rate"]["value"] == pytest.approx(5 / 7 - 2 / 6)
    assert rows[0]["analytic_acceptance_rate"] == Estimate(0.0, 0.0, 0.0, 2).to_dict()


def test_a_prompt_that_only_one_draft_answered_is_in_no_comparison() -> None:
    rows = summary.compare(RECORDS[:3], draft="ours", baseline="base", seed=0)
    assert [(row["task"], row["num_prompts"]) for row in rows] == [(None, 1), ("math", 1)]
    assert "one prompt gives no interval" in rows[0]["sentence"]


def test_paired_interval_equals_scipy_on_resampled_prompts() -> None:
    rng = np.random.default_rng(5)
    tested = rng.integers(5, 30, 40).astype(float)
    base = rng.binomial(tested.astype(int), 0.5).astype(float)
    ours = np.minimum(tested, base + rng.integers(0, 3, 40))
    table = np.stack([ours, tested, base, tested], axis=1)
    found = intervals.estimate(table, intervals.ratio_difference, seed=1, num_resamples=20_000)

    def statistic(*columns: Any, axis: int = -1) -> Any:
        a, b, c, d = (column.sum(axis=axis) for column in columns)
        return a / b - c / d

    expected = stats.bootstrap(
        tuple(table.T),
        statistic,
        paired=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert found.low == pytest.approx(expected.low, abs=1e-3)
    assert found.high == pytest.approx(expected.high, abs=1e-3)


def test_a_draft_without_an_analytic_rate_says_so() -> None:
    cell = _cells([_record("ngram", "p1", "math", [1], sums={})])["ngram", None]
    assert cell["analytic_acceptance_rate"]["value"] is None


def test_calls_without_room_for_a_draft_do_not_lower_its_coverage() -> None:
    # Six calls of which the last had room for no draft; a lookup that found nothing in two more.
    record = _record("ours", "p1", "math", [1] * 5)
    last = {"num_target_calls": 6}
    full = replace(record, counts={**record.counts, **last}, num_draftable_calls=5)
    assert _cells([full])["ours", None]["draft_coverage"] == 1.0
    silent = replace(record, counts={**record.counts, "num_target_calls": 8})
    assert _cells([replace(silent, num_draftable_calls=7)])["ours", None]["draft_coverage"] == 5 / 7
    # Where nobody counted, every call is taken to have had room.
    assert _cells([silent])["ours", None]["draft_coverage"] == 5 / 8


# ------------------------------------------------------------------------------ timing


class FakeClock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def work(self, name: str, seconds: float) -> None:
        self.order.append(name)
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def test_contestants_are_warmed_then_interleaved_and_reversed() -> None:
    clock = FakeClock()
    seconds = timing.interleave(
        {"a": lambda: clock.work("a", 1.0), "b": lambda: clock.work("b", 2.0)},
        repeats=3,
        clock=clock,
    )
    assert clock.order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]}


def test_step_costs_are_ratios_to_a_plain_target_step() -> None:
    clock = FakeClock()
    costs = timing.measure_step_costs(
        lambda n: clock.work("target", 8.0 + 2.0 * n),
        {"draft": lambda: clock.work("draft", 8.0)},
        widths=[3, 6],
        repeats=3,
        draft_steps_per_call=4,
        clock=clock,
    )
    assert costs.draft_cost_ratio == {"draft": 0.2}
    assert costs.draft_step_ms["draft"].median == 2000.0
    assert costs.verify_cost_ratio == {1: 1.0, 3: 1.4, 6: 2.0}
    assert costs.target_step_ms.median == 10_000.0


def test_spread_is_median_and_range() -> None:
    assert timing.spread([3.0, 1.0, 100.0]) == timing.Spread(3.0, 1.0, 100.0, 3)


def test_conditions_name_what_a_timing_depends_on() -> None:
    facts = timing.conditions(torch.device("cpu"), torch.bfloat16)
    assert facts["dtype"] == "bfloat16"
    assert facts["num_threads"] >= 1
    assert facts["device_name"]
