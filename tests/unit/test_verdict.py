"""Owns the tests of the verdict and the gate: what was not tested, or is another draft's, counts.

Refuses to measure: tables of a few numbers.
"""

from __future__ import annotations

from typing import Any

import pytest

from distill.metrics.distribution import law_test
from distill.metrics.planner_tables import serving_depth
from distill.metrics.verdict import decide, gate_failures

ONLY_LOSSLESS = {"min_speedup": None, "min_alpha": None, "lossless": True}
COUNTS: dict[str, Any] = {"num_compared": 5, "num_broken": 0}


def _law(temperature: float, *, draft: str = "d", counts: tuple[int, ...] = (260, 252)) -> Any:
    law = [1.0 / len(counts)] * len(counts)
    return {"draft": draft, "temperature": temperature, **law_test([(counts, law)]).to_dict()}


def _timing(
    speeds: dict[float, tuple[float, float | None]],
    curves: dict[float, list[float]],
    *,
    depth: int = 1,
) -> dict[str, Any]:
    return {
        "runs": [
            {
                "draft": "d",
                "temperature": t,
                "num_draft_tokens": depth,
                "predicted_speedup": 1.4,
                "caveat": None,
                "speedup": {"value": value, "low": low, "high": low and 2 * value - low},
            }
            for t, (value, low) in speeds.items()
        ],
        "plans": [
            {
                "draft": "d",
                "temperature": t,
                "num_draft_tokens": 1,
                "curve": [{"num_draft_tokens": k + 1, "speedup": s} for k, s in enumerate(curve)],
            }
            for t, curve in curves.items()
        ],
    }


FAST = _timing({0.0: (1.4, 1.3)}, {0.0: [1.4, 1.2]})
FAST_WARM = _timing({0.7: (1.4, 1.3)}, {0.7: [1.4, 1.2]})


def _gate(lossless: dict[str, Any], *temperatures: float, **more: Any) -> list[str]:
    cells = [{"draft": "d", "task": None, "temperature": t} for t in temperatures]
    return gate_failures(ONLY_LOSSLESS, cells, lossless, {}, draft="d", **more)


# ------------------------------------------------------------------------------ the law


@pytest.mark.parametrize(
    "laws",
    [
        [],
        [_law(0.7, counts=(512,))],  # no degree of freedom
        [_law(0.7, counts=(0, 0))],  # nothing drawn
        [_law(1.0)],  # judged, but at another temperature
        [_law(0.7, draft="rival")],  # judged, but of another draft
    ],
)
def test_a_law_that_was_not_judged_passes_no_gate_and_ships_nothing(
    laws: list[dict[str, Any]],
) -> None:
    lossless = COUNTS | {"laws": laws}
    (failure,) = _gate(lossless, 0.0, 0.7)
    assert "not checked at temperature 0.7: " in failure
    verdict = decide(lossless, FAST_WARM, draft="d")
    assert verdict["ship"] is False
    assert "not checked at temperature 0.7" in verdict["reasons"][0]


def test_why_a_law_was_not_judged_says_what_would_help() -> None:
    def reason(laws: list[dict[str, Any]]) -> str:
        (failure,) = _gate(COUNTS | {"laws": laws}, 0.7)
        return failure.partition("temperature 0.7: ")[2]

    assert reason([]) == "no token was drawn for it: raise measure.law_samples"
    # 64 draws of 64 equally likely tokens: none is expected 5 times.
    few = reason([_law(0.7, counts=(1,) * 64)])
    assert few == "64 draws are too few to expect any token 5 times: raise measure.law_samples"
    assert "raise measure.law_samples" not in reason([_law(0.7, counts=(0, 0))])


def test_a_law_that_leaves_no_choice_can_pass_and_can_fail() -> None:
    # Temperature 0.001: the likeliest token, 512 times of 512, however many are drawn.
    def law(counts: list[int]) -> dict[str, Any]:
        tested = law_test([(counts, [1.0 - 1e-9, 1e-9])])
        return {"draft": "d", "temperature": 0.001, **tested.to_dict()}

    assert _gate(COUNTS | {"laws": [law([512, 0])]}, 0.001) == []
    (failure,) = _gate(COUNTS | {"laws": [law([500, 12])]}, 0.001)
    assert "too many of 512 draws are none of the likeliest token" in failure


def test_a_judged_law_at_every_temperature_passes() -> None:
    lossless = COUNTS | {"laws": [_law(0.7), _law(1.0)]}
    assert _gate(lossless, 0.0, 0.7, 1.0) == []
    assert decide(lossless, FAST_WARM, draft="d")["ship"] is True


def test_greedy_answers_are_wanted_where_temperature_0_was_measured() -> None:
    unchecked = {"num_compared": 0, "num_broken": 0, "laws": [_law(0.7)]}
    assert _gate(unchecked, 0.7) == []
    (failure,) = _gate(unchecked, 0.0, 0.7)
    assert "no greedy answer was compared" in failure


# ------------------------------------------------------------------------------ self-tests


def test_a_failed_self_test_fails_the_gate_whatever_its_bounds() -> None:
    bounds = {"min_speedup": None, "min_alpha": None, "lossless": False}
    assert gate_failures(bounds, [], COUNTS, {}, draft="d") == []
    (failure,) = gate_failures(bounds, [], COUNTS, {}, draft="d", faults=["self-test failed: x"])
    assert failure == "measure.gate cannot be judged: self-test failed: x"


# ------------------------------------------------------------------------------ whose fault


def test_a_rivals_broken_answer_is_told_and_judges_nobody_else() -> None:
    lossless = COUNTS | {
        "by_draft": [
            {"draft": "d", **COUNTS},
            {"draft": "early_exit_2", "num_compared": 5, "num_broken": 3},
        ],
        "laws": [_law(1.0, draft="rival", counts=(500, 12))],
    }
    verdict = decide(lossless, FAST, draft="d")
    assert verdict["ship"] is True
    assert verdict["reasons"][-1].startswith("not judged: early_exit_2 is not lossless: 3 of 5")
    assert _gate(lossless, 0.0) == []


# ------------------------------------------------------------------------------ K


def test_no_depth_to_serve_with_is_not_shipped_however_fast_the_clock_says_it_is() -> None:
    # Measured fast at K = 1, yet every K is predicted to lose at one of the temperatures.
    curves = {0.0: [1.3, 0.9], 0.7: [0.9, 1.2]}
    timing = _timing({0.0: (1.3, 1.2), 0.7: (1.3, 1.2)}, curves)
    verdict = decide(COUNTS | {"laws": [_law(0.7)]}, timing, draft="d")
    assert (verdict["ship"], verdict["num_draft_tokens"]) == (False, 0)
    assert "serve the target alone" in verdict["reasons"][0]


def test_a_depth_that_was_not_timed_is_not_shipped() -> None:
    timing = _timing({0.0: (1.4, 1.3)}, {0.0: [1.2, 1.5]}, depth=1)
    verdict = decide(COUNTS, timing, draft="d")
    assert (verdict["ship"], verdict["num_draft_tokens"]) == (False, 2)
    assert "1 draft tokens were timed, not the 2 to serve with" in verdict["reasons"][0]


def test_the_depth_to_serve_with_is_best_at_its_worst() -> None:
    plans = _timing({}, {0.0: [1.2, 1.5, 1.6], 1.0: [1.1, 1.3, 0.9]})["plans"]
    assert serving_depth(plans) == 2
    assert serving_depth(plans[:1]) == 3
    assert serving_depth([]) is None


def test_two_close_temperatures_keep_a_depth_each() -> None:
    close = 0.7000001
    timing = _timing({}, {0.7: [1.2, 1.5], close: [1.2, 1.5]})
    timing["plans"][1]["num_draft_tokens"] = 2
    verdict = decide(COUNTS, timing, draft="d")
    assert verdict["num_draft_tokens_by_temperature"] == {"0.7": 1, "0.7000001": 2}
    failures = _gate(COUNTS | {"laws": []}, 0.7, close)
    assert ["0.7: no" in f or "0.7000001: no" in f for f in failures] == [True, True]
    assert failures[0] != failures[1]


# ------------------------------------------------------------------------------ the interval


@pytest.mark.parametrize(("num_prompts", "is_said"), [(7, True), (8, False)])
def test_an_interval_over_few_prompts_is_told_beside_a_bound_that_was_missed(
    num_prompts: int, is_said: bool
) -> None:
    estimate = {"value": 0.4, "low": 0.3, "high": 0.5, "num_prompts": num_prompts}
    bounds = {"min_speedup": None, "min_alpha": 0.6, "lossless": False}
    cell = {"draft": "d", "task": None, "temperature": 0.0, "analytic_acceptance_rate": estimate}
    (failure,) = gate_failures(bounds, [cell], COUNTS, {}, draft="d")
    assert ("; fewer than 8 prompts are too few to rely on)" in failure) is is_said


@pytest.mark.parametrize(
    ("speed", "words", "is_shipped"),
    [
        ((1.4, 1.1), "above 1x", True),
        ((1.4, 0.9), "not shown to be faster than 1x", False),
        ((1.4, None), "not shown to be faster than 1x", False),
        ((0.9, 0.8), "not above 1x", False),
    ],
)
def test_a_speedup_whose_interval_reaches_plain_decoding_is_not_shown_to_be_one(
    speed: tuple[float, float | None], words: str, is_shipped: bool
) -> None:
    timing = _timing({0.0: speed}, {0.0: [1.4, 1.2]})
    timing["runs"][0]["caveat"] = "fewer than 8 prompts are too few to rely on"
    verdict = decide(COUNTS, timing, draft="d")
    assert verdict["ship"] is is_shipped
    assert f"draft token, {words};" in verdict["reasons"][0]
    assert verdict["reasons"][0].endswith("fewer than 8 prompts are too few to rely on")
