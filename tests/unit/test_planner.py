"""Owns the tests of the speed model: published tables to the printed digit, and the limits.

Refuses to know models or clocks: every number here is worked out by hand or printed in a paper.
"""

from __future__ import annotations

import pytest

from distill.errors import ConfigError
from distill.metrics import planner
from distill.metrics.planner_tables import Rates, improvements, plan_batches, speedups_by_alpha

# Leviathan et al. 2023 (arXiv 2211.17192), Table 1, c = c_hat = 0.
LEVIATHAN_TABLE_1 = [
    (0.6, 2, "1.53", "1.96"),
    (0.7, 3, "1.58", "2.53"),
    (0.8, 2, "1.23", "2.44"),
    (0.8, 5, "1.63", "3.69"),
    (0.9, 2, "1.11", "2.71"),
    (0.9, 10, "1.60", "6.86"),
]


@pytest.mark.parametrize(("alpha", "depth", "operations", "speed"), LEVIATHAN_TABLE_1)
def test_reproduces_leviathan_table_1_to_the_printed_digit(
    alpha: float, depth: int, operations: str, speed: str
) -> None:
    assert f"{planner.speedup(alpha, depth, draft_cost_ratio=0.0):.2f}" == speed
    assert f"{planner.operations_ratio(alpha, depth, draft_operations_ratio=0.0):.2f}" == operations


def test_chinchilla_xsum_speed_from_published_cost() -> None:
    # Chen et al. 2023 (arXiv 2302.01318): c = .128, K = 4; at alpha = .8 the model gives 2.22x.
    assert f"{planner.speedup(0.8, 4, draft_cost_ratio=0.128):.2f}" == "2.22"


def test_expected_tokens_by_hand() -> None:
    assert planner.expected_tokens(0.5, 3) == 1 + 0.5 + 0.25 + 0.125


def test_perfect_draft_emits_every_token_and_the_bonus() -> None:
    assert planner.expected_tokens(1.0, 4) == 5.0


def test_hopeless_draft_emits_only_the_correction() -> None:
    assert planner.expected_tokens(0.0, 4) == 1.0


def test_no_drafting_is_plain_decoding() -> None:
    assert planner.speedup(0.7, 0, draft_cost_ratio=0.3) == 1.0


@pytest.mark.parametrize(("alpha", "depth"), [(0.7, 3), (0.7, 4), (0.7, 5), (0.31, 7)])
def test_proposed_rate_is_block_efficiency_less_one_over_depth(alpha: float, depth: int) -> None:
    from_tau = (planner.expected_tokens(alpha, depth) - 1) / depth
    assert planner.draft_acceptance_rate(alpha, depth) == pytest.approx(from_tau, abs=1e-12)


@pytest.mark.parametrize(("depth", "percent"), [(3, "51"), (4, "44"), (5, "39")])
def test_alpha_point_seven_reads_lower_under_the_proposed_rate(depth: int, percent: str) -> None:
    assert f"{100 * planner.draft_acceptance_rate(0.7, depth):.0f}" == percent


def test_bigram_draft_at_no_cost_from_the_papers_own_rate() -> None:
    # Leviathan et al., Table 3 and section 4.2: alpha = .2 with a bigram model, 1.25x at gamma 3.
    assert f"{planner.speedup(0.2, 3, draft_cost_ratio=0.0):.2f}" == "1.25"


def test_a_published_server_run_reads_the_same_here() -> None:
    # vLLM, K = 4, accepted by position 71.4 / 49.8 / 36.3 / 27.0%: length 2.85, rate 46.13%.
    reach = [0.714, 0.498, 0.363, 0.270]
    conditional = [b / a for a, b in zip([1.0, *reach], reach, strict=False)]
    tokens = planner.tokens_from_positions(conditional, tail_rate=0.7)
    assert f"{tokens(4):.2f}" == "2.85"
    assert f"{100 * (tokens(4) - 1) / 4:.1f}" == "46.1"


def test_time_per_token_of_a_published_loop() -> None:
    # 70B with a 1B draft: 2.50 ms a draft step, 24.36 ms a verify pass, plain 23.65 ms, K = 4.
    cost = planner.call_cost(
        4, draft_cost_ratio=2.50 / 23.65, verify_cost_ratio=lambda n: 24.36 / 23.65
    )
    assert cost * 23.65 == pytest.approx(4 * 2.50 + 24.36)


# Best depth and speed with a free verify pass (v = 1): (c, alpha) -> (K, speed). At c = .2 and
# alpha = .5 depths 1 and 2 tie (1.5 / 1.2 and 1.75 / 1.4), and the smaller is taken.
BEST = [
    (cost, alpha, depth, speed)
    for cost, row in {
        0.02: [(4, "1.79"), (6, "2.17"), (8, "2.76"), (11, "3.82"), (19, "6.37")],
        0.05: [(3, "1.63"), (4, "1.92"), (6, "2.35"), (8, "3.09"), (13, "4.67")],
        0.10: [(2, "1.46"), (3, "1.67"), (4, "1.98"), (6, "2.47"), (10, "3.43")],
        0.20: [(1, "1.25"), (2, "1.40"), (3, "1.58"), (4, "1.87"), (7, "2.37")],
        0.30: [(1, "1.15"), (1, "1.23"), (2, "1.37"), (3, "1.55"), (5, "1.87")],
    }.items()
    for alpha, (depth, speed) in zip((0.5, 0.6, 0.7, 0.8, 0.9), row, strict=True)
]


@pytest.mark.parametrize(("cost", "alpha", "depth", "speed"), BEST)
def test_best_depth_with_free_verification(
    cost: float, alpha: float, depth: int, speed: str
) -> None:
    plan = planner.best_num_draft_tokens(
        lambda k: planner.expected_tokens(alpha, k), draft_cost_ratio=cost, max_draft_tokens=32
    )
    assert plan.num_draft_tokens == depth
    assert f"{plan.speedup:.2f}" == speed


def test_a_draft_slower_than_its_acceptance_is_not_worth_using() -> None:
    plan = planner.best_num_draft_tokens(
        lambda k: planner.expected_tokens(0.3, k), draft_cost_ratio=0.4
    )
    assert (plan.num_draft_tokens, plan.speedup) == (0, 1.0)


@pytest.mark.parametrize(
    ("alpha", "speed"), [(0.6, "1.34"), (0.7, "1.50"), (0.8, "1.75"), (0.9, "2.13")]
)
def test_costly_verification_caps_the_speed(alpha: float, speed: str) -> None:
    # A published CPU curve: v(2) = 1.21, v(4) = 1.63, v(8) = 2.56, with c = .02.
    # By hand at alpha = .9: K = 5 gives 4.68559 / (5 * .02 + v(6) = 2.095) = 2.1347.
    verify = planner.interpolate({1: 1.0, 2: 1.21, 4: 1.63, 8: 2.56})
    plan = planner.best_num_draft_tokens(
        lambda k: planner.expected_tokens(alpha, k),
        draft_cost_ratio=0.02,
        verify_cost_ratio=verify,
        max_draft_tokens=7,
    )
    assert f"{plan.speedup:.2f}" == speed


def test_interpolation_is_linear_between_and_beyond_the_measured_widths() -> None:
    verify = planner.interpolate({1: 1.0, 3: 2.0, 5: 2.5})
    assert [verify(n) for n in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 2.25, 2.5, 3.0]


def test_break_even_without_verify_cost_is_the_draft_cost() -> None:
    # Leviathan et al., Corollary 3.9: an improvement exists iff alpha > c.
    assert planner.break_even_acceptance_rate(draft_cost_ratio=0.3) == pytest.approx(0.3, abs=1e-6)


def test_break_even_is_none_when_even_a_perfect_draft_loses() -> None:
    assert (
        planner.break_even_acceptance_rate(
            draft_cost_ratio=0.9, verify_cost_ratio=lambda n: float(n), max_draft_tokens=4
        )
        is None
    )


def test_chain_of_conditional_rates_by_hand() -> None:
    tokens = planner.tokens_from_positions([0.5, 0.8], tail_rate=0.25)
    assert tokens(0) == 1.0
    assert tokens(1) == 1.5
    assert tokens(2) == 1 + 0.5 + 0.5 * 0.8
    assert tokens(3) == 1 + 0.5 + 0.4 + 0.1


def test_positions_nobody_reached_fall_back_to_the_pooled_rate() -> None:
    tokens = planner.tokens_from_positions([0.5, None], tail_rate=0.5)
    assert tokens(2) == 1.75


def test_a_lookup_that_rarely_matches_neither_gains_nor_pays_much() -> None:
    # One call in four is drafted: cost .25 * (2 * .1 + 1) + .75 * 1.
    tokens = planner.tokens_from_positions([0.4, 0.25], tail_rate=0.0, draft_coverage=0.25)
    assert tokens(2) == 1 + 0.25 * (0.4 + 0.4 * 0.25)
    assert planner.call_cost(2, draft_cost_ratio=0.1, draft_coverage=0.25) == pytest.approx(1.05)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_the_unit_interval_is_refused_with_its_value(alpha: float) -> None:
    with pytest.raises(ConfigError, match="acceptance_rate"):
        planner.expected_tokens(alpha, 3)


def test_negative_depth_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens"):
        planner.expected_tokens(0.5, -1)


def test_do_not_speculate_is_an_answer_at_every_alpha() -> None:
    rows = speedups_by_alpha(draft_cost_ratio=0.35, max_draft_tokens=4, alphas=(0.3, 0.9))
    assert (rows[0]["num_draft_tokens"], rows[0]["predicted_speedup"]) == (0, 1.0)
    assert rows[1]["num_draft_tokens"] > 0
    assert rows[1]["curve"][0] == planner.speedup(0.9, 1, draft_cost_ratio=0.35)


def test_what_a_change_would_buy_is_at_its_own_best_depth() -> None:
    # alpha .5 everywhere, c .1, v = 1: best K = 2, 1.75 / 1.2; at .55: (1 + .55 + .3025) / 1.2.
    found = {
        row["change"]: row
        for row in improvements(
            Rates([0.5], 0.5),
            draft_cost_ratio=0.1,
            verify_cost_ratio=planner.free_verification,
            max_draft_tokens=8,
        )
    }
    assert found["as measured"]["predicted_speedup"] == pytest.approx(1.75 / 1.2)
    better = found["acceptance 5 points higher"]
    assert better["num_draft_tokens"] == 3
    assert better["predicted_speedup"] == pytest.approx((1.8525 + 0.55**3) / 1.3)
    assert found["draft at half the cost"]["predicted_speedup"] == pytest.approx(1.875 / 1.15)


def test_a_batch_whose_wide_passes_cost_their_width_ends_speculation() -> None:
    costs = [
        {"batch_size": 1, "draft_cost_ratio": 0.1, "verify_cost_ratio": {"1": 1.0, "5": 1.0}},
        {"batch_size": 64, "draft_cost_ratio": 0.1, "verify_cost_ratio": {"1": 1.0, "5": 5.0}},
    ]
    rows = plan_batches(Rates([0.7], 0.7), costs, max_draft_tokens=4)
    assert [row["num_draft_tokens"] for row in rows] == [4, 0]
    assert f"{rows[0]['predicted_speedup']:.2f}" == "1.98"
