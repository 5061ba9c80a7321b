"""Owns the tests of the draft length policies: what they choose, learn, probe, and what that costs.
Refuses models where a coin will do; that the law stays exact is proved in tests/exactness.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from distill.drafters.causal_lm import CausalLMDrafter
from distill.errors import ConfigError
from distill.metrics.planner import best_num_draft_tokens, expected_tokens
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.runtime.draft_length import (
    AdaptiveDraftLength,
    DraftLength,
    FixedDraftLength,
    RowDraftLength,
    SpeedModel,
)
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig
from tests.helpers import make_llama

CHEAP = SpeedModel(0.1, {1: 1.0, 9: 1.08})
DEAR = SpeedModel(0.25, {1: 1.0, 2: 1.5, 4: 1.4, 9: 1.7})
DEEPEST = 8


def adaptive(speed: SpeedModel, **settings: Any) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(speed, DEEPEST, **settings)


def planned(speed: SpeedModel, alpha: float) -> Any:
    """The planner's answer for one acceptance rate: the oracle that knows it beforehand."""
    return best_num_draft_tokens(
        lambda k: expected_tokens(alpha, k),
        draft_cost_ratio=speed.draft_cost_ratio,
        verify_cost_ratio=speed.verify,
        max_draft_tokens=DEEPEST,
    )


def simulate(
    policy: DraftLength, alpha_at: Callable[[int], float], num_tokens: int, seed: int = 0
) -> list[tuple[int, int]]:
    """(drafted, accepted) of every round of one answer, each draft accepted by a coin."""
    coin = random.Random(seed)
    row = policy.start()
    rounds: list[tuple[int, int]] = []
    emitted = 0
    while emitted < num_tokens:
        drafted = row.choose()
        accepted = 0
        while accepted < drafted and coin.random() < alpha_at(emitted + accepted):
            accepted += 1
        row.observe(drafted, accepted)
        rounds.append((drafted, accepted))
        emitted += accepted + 1
    return rounds


def speed_of(rounds: list[tuple[int, int]], speed: SpeedModel, alpha: float) -> float:
    """Tokens per plain target step that the chosen depths are worth, the coin's luck left out."""
    tokens = sum(expected_tokens(alpha, drafted) for drafted, _ in rounds)
    return tokens / sum(speed.round_cost(drafted) for drafted, _ in rounds)


def after(rounds: list[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """The rounds that began when so many tokens were out."""
    ends = itertools.accumulate(accepted + 1 for _, accepted in rounds)
    starts = [0, *ends][:-1]
    return [one for one, start in zip(rounds, starts, strict=True) if start >= num_tokens]


def choices(row: RowDraftLength, rounds: list[tuple[int, int]]) -> list[int]:
    chosen = [row.choose()]
    for one in rounds:
        row.observe(*one)
        chosen.append(row.choose())
    return chosen


# --- speed model ------------------------------------------------------------------------------


def test_a_plain_round_costs_one_and_a_round_with_drafts_what_was_measured():
    speed = SpeedModel(0.2, {1: 1.0, 3: 1.4, 5: 1.6})
    assert speed.round_cost(0) == 1.0
    assert speed.round_cost(1) == pytest.approx(0.2 + 1.2)  # v(2) is between v(1) and v(3)
    assert speed.round_cost(4) == pytest.approx(0.8 + 1.6)
    assert speed.round_cost(6) == pytest.approx(1.2 + 1.8)  # the last slope goes on


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"verify_cost_ratio": {}}, "at least one width"),
        ({"draft_cost_ratio": -0.1}, "draft_cost_ratio is -0.1"),
        ({"verify_cost_ratio": {1: 1.0, 2: -3.0}}, "-3.0"),
        ({"draft_cost_ratio": float("nan")}, "draft_cost_ratio is nan"),
    ],
)
def test_costs_that_no_clock_gives_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        SpeedModel(**({"draft_cost_ratio": 0.1, "verify_cost_ratio": {1: 1.0}} | settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_draft_tokens": -1}, "max_draft_tokens is -1"),
        ({"prior_acceptance_rate": 1.5}, "prior_acceptance_rate 1.5"),
        ({"half_life": 0.0}, "half_life is 0.0"),
        ({"probe_loss": -1.0}, "probe_loss is -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        AdaptiveDraftLength(**({"speed_model": CHEAP, "max_draft_tokens": 4} | settings))


def test_a_speed_model_that_would_pay_for_drafting_is_refused():
    falling = SpeedModel(0.01, {1: 1.0, 2: 0.7})  # v(9) would be below zero
    with pytest.raises(ConfigError, match=r"Measure v\(n\) up to 9"):
        adaptive(falling)


# --- choosing ---------------------------------------------------------------------------------


def test_the_policies_fulfil_the_contract_and_a_fixed_one_never_changes():
    fixed = FixedDraftLength(3)
    assert isinstance(fixed, DraftLength)
    assert isinstance(adaptive(CHEAP), DraftLength)
    assert isinstance(adaptive(CHEAP).start(), RowDraftLength)
    assert choices(fixed.start(), [(3, 0)] * 20) == [3] * 21


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("speed", [CHEAP, DEAR])
def test_a_new_row_starts_at_the_planners_depth_for_the_prior(speed, alpha):
    row = adaptive(speed, prior_acceptance_rate=alpha).start()
    assert row.choose() == planned(speed, alpha).num_draft_tokens


def test_choosing_changes_nothing():
    row = adaptive(CHEAP).start()
    row.observe(4, 2)
    assert len({row.choose() for _ in range(50)}) == 1


def test_rows_of_one_policy_do_not_share_what_they_learn():
    policy = adaptive(CHEAP)
    first, second = policy.start(), policy.start()
    before = second.choose()
    for _ in range(30):
        first.observe(4, 0)
    assert first.choose() == 0
    assert second.choose() == before


def test_a_second_token_that_never_stands_limits_the_depth_to_one():
    """One rate for all positions would see 2 of 3 accepted, and ask for more."""
    speed = SpeedModel(0.1, {1: 1.0, 9: 1.0})
    row = adaptive(speed).start()
    for _ in range(60):
        row.observe(2, 1)
    assert row.choose() == 1
    assert planned(speed, 0.5).num_draft_tokens > 1


def test_tokens_behind_the_first_refused_one_are_not_counted():
    policy = adaptive(CHEAP, half_life=1e12)
    short, long = policy.start(), policy.start()
    assert choices(long, [(8, 1)] * 40) == choices(short, [(2, 1)] * 40)


def test_no_drafts_are_ever_asked_for_where_the_most_is_none():
    row = AdaptiveDraftLength(CHEAP, 0).start()
    assert choices(row, [(0, 0)] * 300) == [0] * 301


# --- what it gains and loses ------------------------------------------------------------------


@pytest.mark.parametrize("speed", [CHEAP, DEAR])
@pytest.mark.parametrize("alpha", [0.6, 0.8, 0.95])
def test_a_good_draft_runs_as_fast_as_if_its_rate_had_been_known(speed, alpha):
    rounds = [
        one for seed in range(12) for one in simulate(adaptive(speed), lambda _: alpha, 500, seed)
    ]
    oracle = planned(speed, alpha)
    assert speed_of(rounds, speed, alpha) > 0.97 * oracle.speedup
    if oracle.speedup > 1.1:  # nearer to 1 every depth is as good as another
        depth = sum(drafted for drafted, _ in rounds) / len(rounds)
        assert abs(depth - oracle.num_draft_tokens) < 2


def test_a_draft_that_is_always_right_gets_the_deepest_rounds():
    rounds = simulate(adaptive(CHEAP), lambda _: 1.0, 300)
    assert [drafted for drafted, _ in rounds[5:]] == [DEEPEST] * len(rounds[5:])


@pytest.mark.parametrize("speed", [CHEAP, DEAR])
def test_a_draft_that_is_always_wrong_costs_less_than_a_hundredth_of_the_time(speed):
    rounds = simulate(adaptive(speed), lambda _: 0.0, 4000)
    assert 0.99 < speed_of(rounds, speed, 0.0) < 1.0
    assert speed_of(rounds[:100], speed, 0.0) > 0.9


def test_probes_of_a_draft_that_is_always_wrong_become_rare():
    rounds = simulate(adaptive(DEAR), lambda _: 0.0, 2000)
    probes = [n for n, (drafted, _) in enumerate(rounds) if drafted]
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert gaps == sorted(gaps)
    # A refused probe costs 0.25 + 1.5 - 1, and 0.25 for what the draft has to catch up with: one
    # hundredth of the time is one probe in a hundred rounds.
    assert gaps[-1] == 101
    assert {drafted for drafted, _ in rounds[20:]} == {0, 1}


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.3])
def test_a_poor_draft_costs_little_more_than_plain_decoding(alpha):
    rounds = [
        one for seed in range(8) for one in simulate(adaptive(DEAR), lambda _: alpha, 1000, seed)
    ]
    assert planned(DEAR, alpha).num_draft_tokens == 0
    assert speed_of(rounds, DEAR, alpha) > 0.98


@pytest.mark.parametrize("speed", [CHEAP, DEAR])
def test_a_draft_that_becomes_good_in_the_middle_is_used_again(speed):
    for seed in range(8):
        rounds = simulate(adaptive(speed), lambda n: 0.9 if n >= 600 else 0.0, 1200, seed)
        assert speed_of(after(rounds, 750), speed, 0.9) > 0.95 * planned(speed, 0.9).speedup
        assert all(drafted for drafted, _ in after(rounds, 750))


@pytest.mark.parametrize("speed", [CHEAP, DEAR])
def test_a_draft_that_becomes_bad_in_the_middle_is_dropped_soon(speed):
    for seed in range(8):
        rounds = after(simulate(adaptive(speed), lambda n: 0.9 * (n < 400), 1000, seed), 400)
        assert sum(drafted > 0 for drafted, _ in rounds[:60]) < 40
        assert speed_of(rounds[60:], speed, 0.0) > 0.98


def test_a_probe_that_is_accepted_is_followed_by_another_at_once():
    row = adaptive(DEAR, prior_acceptance_rate=0.0, prior_weight=50.0).start()
    assert choices(row, [(0, 0)] * 4)[-1] == 1
    assert choices(row, [(1, 1)])[-1] == 1
    assert choices(row, [(1, 0)])[-1] == 0


def test_rounds_for_which_nothing_was_found_to_draft_teach_nothing():
    """A lookup without a match costs a plain round and says nothing of its acceptance."""
    row = adaptive(CHEAP, prior_acceptance_rate=0.8).start()
    assert len(set(choices(row, [(0, 0)] * 100))) == 1


# --- in the engine ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=0)


def request(prompt: list[int], length: int = 120, **changes: Any) -> DecodeRequest:
    settings: dict[str, Any] = {"sampling": SamplingConfig(temperature=0.0), "seed": 0}
    return DecodeRequest(prompt, length, stop_token_ids=frozenset(), **(settings | changes))


def engine_for(target: Any, draft: Any, policy: DraftLength | None) -> DecodeEngine:
    return DecodeEngine(
        target,
        CausalLMDrafter(draft),
        num_draft_tokens=DEEPEST,
        max_batch_size=4,
        max_length=256,
        draft_length=policy,
    )


def test_an_engine_stops_asking_a_stranger_and_goes_deep_with_a_twin(target):
    stranger, twin = (
        decode_batch(engine_for(target, draft, adaptive(DEAR)), [request([5, 6, 7])])[0]
        for draft in (make_llama(seed=77), target)
    )
    assert stranger.token_ids == twin.token_ids
    assert stranger.stats.num_rounds < 0.2 * stranger.stats.num_target_calls
    assert stranger.stats.block_efficiency == pytest.approx(1.0, abs=0.1)
    assert twin.stats.acceptance_rate == 1.0
    assert twin.stats.block_efficiency > 7


def test_each_row_has_its_own_draft_length_and_a_request_may_fix_it(target):
    policy = adaptive(DEAR)
    engine = engine_for(target, make_llama(seed=77), policy)
    rows = decode_batch(
        engine,
        [request([5, 6, 7]), request([5, 6, 7], num_draft_tokens=2), request([9] * 20)],
    )
    assert rows[0].token_ids == rows[1].token_ids
    assert rows[1].stats.num_rounds == rows[1].stats.num_target_calls - 1  # the last has no room
    assert rows[0].stats.num_rounds < 0.2 * rows[0].stats.num_target_calls


def test_a_draft_length_beyond_the_engines_is_refused(target):
    with pytest.raises(ConfigError, match="up to 8 draft tokens and num_draft_tokens is 3"):
        DecodeEngine(
            target,
            None,
            num_draft_tokens=3,
            max_batch_size=1,
            max_length=64,
            draft_length=adaptive(CHEAP),
        )


def test_a_round_that_failed_is_repeated_with_the_same_draft_length(target, monkeypatch):
    expected = decode_batch(engine_for(target, target, adaptive(CHEAP)), [request([5, 6, 7])])[0]
    engine = engine_for(target, target, adaptive(CHEAP))
    handle = engine.add(request([5, 6, 7]))
    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr("distill.runtime.decode.judge", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    result = engine.result(handle)
    assert result.token_ids == expected.token_ids
    assert result.stats == expected.stats
