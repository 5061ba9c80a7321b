"""Owns the proofs about sampling settings and probability primitives.
Refuses to know decoding. Oracles: hand-computed values, transformers' own warpers, plain loops.
"""

from __future__ import annotations

import math

import numpy as np
import pydantic
import pytest
import torch
from scipy import stats

from distill.config import dump_config, parse_config
from distill.errors import ConfigError, SamplingError
from distill.sampling import (
    ACCEPT_LANE,
    DRAFT_LANE,
    RESIDUAL_LANE,
    SamplingConfig,
    argmax_last,
    log_normalizer,
    logits_to_probs,
    overlap,
    probs_by_row,
    residual,
    sample,
    uniforms,
)

SMALLEST_U, LARGEST_U = 2.0**-53, 1 - 2.0**-53


# --- settings ---------------------------------------------------------------------------------


def test_settings_survive_a_round_trip_through_yaml(tmp_path):
    config = SamplingConfig(
        temperature=0.7,
        logit_bias={5: -1.5, 2: 3.0},
        bad_token_ids=(1, 2),
        bad_words_ids=((4, 5), (6,)),
    )
    import yaml

    assert parse_config(yaml.safe_load(dump_config(config)), SamplingConfig) == config


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"logit_bias": {-1: 2.0}},
        {"bad_token_ids": [-3]},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": [[2, -1]]},
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        parse_config(wrong, SamplingConfig)


def test_settings_are_frozen():
    with pytest.raises(pydantic.ValidationError):
        SamplingConfig().temperature = 0.5  # type: ignore[misc]


# --- logits -> probabilities ------------------------------------------------------------------


def test_temperature_one_is_the_softmax_and_temperature_zero_the_argmax():
    logits = torch.tensor([0.0, math.log(2.0), math.log(5.0)])
    torch.testing.assert_close(
        logits_to_probs(logits, SamplingConfig()), torch.tensor([1 / 8, 2 / 8, 5 / 8])
    )
    assert logits_to_probs(logits, SamplingConfig(temperature=0.0)).tolist() == [0.0, 0.0, 1.0]


def test_temperature_half_squares_the_odds():
    probs = logits_to_probs(
        torch.tensor([0.0, math.log(3.0)], dtype=torch.float64), SamplingConfig(temperature=0.5)
    )
    assert probs.dtype == torch.float64
    assert probs.tolist() == pytest.approx([0.1, 0.9])


def test_top_k_keeps_ties_at_its_border():
    probs = logits_to_probs(torch.tensor([1.0, 3.0, 1.0, 0.0]), SamplingConfig(top_k=2))
    assert (probs > 0).tolist() == [True, True, True, False]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    kept = logits_to_probs(logits, SamplingConfig(top_p=0.6)) > 0
    assert kept.tolist() == [True, True, False, False]
    kept = logits_to_probs(logits, SamplingConfig(top_p=0.01)) > 0
    assert kept.tolist() == [True, False, False, False]


def test_top_p_keeps_ties_at_its_border():
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    probs = logits_to_probs(logits, SamplingConfig(top_p=0.5))
    assert probs.tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2])


def test_many_rows_get_what_each_row_gets_alone():
    """Large batches are worked on in blocks of rows."""
    logits = torch.randn(3, 5, 70_000, generator=torch.Generator().manual_seed(4)) * 3
    sampling = SamplingConfig(temperature=0.8, top_k=900, top_p=0.9, min_p=0.001)
    together = logits_to_probs(logits, sampling)
    alone = torch.stack([logits_to_probs(row, sampling) for row in logits[1]])
    torch.testing.assert_close(together[1], alone)


def test_logits_are_left_as_they_were():
    logits = torch.randn(2, 30)
    before = logits.clone()
    logits_to_probs(logits, SamplingConfig(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_log_normalizer_is_the_log_sum_exp(dtype):
    logits = (torch.randn(70, 5000, generator=torch.Generator().manual_seed(4)) * 5).to(dtype)
    logits[0] = 0.0
    logits[1, 7] = 300.0
    logits[2, :4000] = -torch.inf
    got = log_normalizer(logits)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, logits.float().logsumexp(-1), atol=1e-5, rtol=1e-6)


def test_min_p_drops_tokens_below_a_share_of_the_largest():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    probs = logits_to_probs(logits, SamplingConfig(min_p=0.35))
    assert probs.tolist() == pytest.approx([0.625, 0.375, 0.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "make_warpers"),
    [
        ({"temperature": 0.6}, lambda t: [t.TemperatureLogitsWarper(0.6)]),
        ({"top_k": 7}, lambda t: [t.TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, lambda t: [t.TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, lambda t: [t.MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
            lambda t: [
                t.TemperatureLogitsWarper(1.4),
                t.TopKLogitsWarper(30),
                t.TopPLogitsWarper(0.9),
                t.MinPLogitsWarper(0.05),
            ],
        ),
    ],
)
def test_shaping_equals_the_warpers_of_transformers(settings, make_warpers):
    from transformers.generation import logits_process

    scores = torch.randn(16, 50, generator=torch.Generator().manual_seed(3)) * 2
    probs = logits_to_probs(scores, SamplingConfig(**settings))
    for warper in make_warpers(logits_process):
        scores = warper(None, scores)
    torch.testing.assert_close(probs, scores.softmax(-1))


def test_half_precision_logits_give_float32_probabilities_that_sum_to_one():
    logits = torch.randn(3, 2, 5000, generator=torch.Generator().manual_seed(0)).bfloat16() * 4
    probs = logits_to_probs(logits, SamplingConfig(top_p=0.95))
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 2))


def test_rows_with_different_settings_get_what_each_gets_alone():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    settings = [
        SamplingConfig(),
        SamplingConfig(temperature=0.0),
        SamplingConfig(top_k=3),
        SamplingConfig(),
        SamplingConfig(top_p=0.5, temperature=2.0),
    ]
    together = probs_by_row(logits, settings)
    for row, sampling in enumerate(settings):
        torch.testing.assert_close(together[row], logits_to_probs(logits[row], sampling))


@pytest.mark.parametrize("size", [3, 2047, 2048, 4096, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blockwise_argmax_is_the_first_maximum(size, dtype):
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(4, 3, size, generator=generator) * 3).to(dtype)  # bfloat16: many ties
    logits[0, 0] = 1.0
    logits[0, 1, -1] = 99.0
    logits[1, 0, :] = -torch.inf
    logits[1, 0, size // 2] = -5.0
    expected = [[int(np.argmax(row)) for row in part] for part in logits.double().numpy()]
    assert argmax_last(logits).tolist() == expected


# --- drawing ----------------------------------------------------------------------------------


def test_a_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]], dtype=torch.float64).expand(6, 4)
    u = torch.tensor([SMALLEST_U, 0.25, 0.2500001, 0.75, 0.7500001, LARGEST_U])
    assert sample(probs, u.double()).tolist() == [0, 0, 2, 2, 3, 3]


def test_weights_need_not_be_normalised():
    weights = torch.tensor([[3.0, 1.0]]).expand(2, 2)
    assert sample(weights, torch.tensor([0.74, 0.76]).double()).tolist() == [0, 1]


# Above 2**14 the search has two levels; the last block is full, short, or one token.
@pytest.mark.parametrize("size", [5, 9001, 2**14, 2**14 + 128, 2**14 + 1, 20001])
def test_extreme_random_numbers_never_draw_a_token_of_probability_zero(size):
    probs = torch.zeros(4, size)
    probs[0, size // 2] = 1.0
    probs[1, -1] = 1e-30
    probs[2, 0] = 1.0
    probs[3, :] = 1.0 / size
    probs[3, :3] = probs[3, -1] = 0.0
    for u in (SMALLEST_U, 0.5, LARGEST_U):
        drawn = sample(probs, torch.full((4,), u, dtype=torch.float64))
        assert (probs.gather(1, drawn.unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("size", [2048, 2**14, 2**14 + 128, 20001])
def test_blockwise_draws_equal_a_plain_search(size):
    generator = torch.Generator().manual_seed(7)
    probs = (torch.randn(40, size, generator=generator) * 3).softmax(-1).double()
    u = torch.rand(40, generator=generator, dtype=torch.float64)
    cumulative = probs.numpy().cumsum(axis=1)
    plain = [
        int(np.searchsorted(row, x * row[-1]))
        for row, x in zip(cumulative, u.tolist(), strict=True)
    ]
    assert sample(probs, u).tolist() == plain


def test_draws_from_a_large_vocabulary_follow_its_law():
    probs = torch.zeros(1, 20000)
    probs[0, 10], probs[0, 10000], probs[0, 19999] = 0.2, 0.3, 0.5
    u = uniforms(5, np.arange(4000), DRAFT_LANE)
    drawn = sample(probs.expand(4000, -1), u)
    counts = [int((drawn == token).sum()) for token in (10, 10000, 19999)]
    assert sum(counts) == 4000
    assert stats.chisquare(counts, [800, 1200, 2000]).pvalue > 1e-3


# --- overlap and residual ---------------------------------------------------------------------


def test_overlap_is_one_minus_total_variation():
    p = torch.tensor([[0.5, 0.3, 0.2]])
    q = torch.tensor([[0.2, 0.2, 0.6]])
    assert overlap(p, q).item() == pytest.approx(0.6)
    assert overlap(p, p).item() == pytest.approx(1.0)


def test_residual_is_the_normalised_positive_part():
    p = torch.tensor([[0.5, 0.3, 0.2]])
    q = torch.tensor([[0.2, 0.2, 0.6]])
    assert residual(p, q)[0].tolist() == pytest.approx([0.75, 0.25, 0.0])


def test_residual_of_equal_distributions_is_the_target():
    """faults: a zero-sum residual is reached by rounding only; p is the limit, not uniform."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.5, 0.0]])
    assert torch.equal(residual(p, p.clone()), p)


# --- random numbers ---------------------------------------------------------------------------


def reference_uniform(seed: int, counter: int, lane: int) -> float:
    """The documented construction with Python's unbounded integers."""
    mask, golden, odd = 2**64 - 1, 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    z = mix((seed + golden) & mask)
    z = mix(z ^ ((counter * golden + odd) & mask))
    z = mix(z ^ (2 * lane + 1))
    return ((z >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, 2**63, 2**64 + 5, -(2**70)])
def test_random_numbers_equal_the_reference_construction(seed):
    for lane in (DRAFT_LANE, ACCEPT_LANE, RESIDUAL_LANE):
        numbers = uniforms([[seed]], [[0, 1, 77]], lane)[0].tolist()
        assert numbers == [reference_uniform(seed % 2**64, c, lane) for c in (0, 1, 77)]


def test_random_numbers_depend_on_their_own_row_alone():
    together = uniforms([[3], [9], [-4]], [[0, 1], [5, 6], [0, 1]], ACCEPT_LANE)
    assert torch.equal(together[1], uniforms(9, [5, 6], ACCEPT_LANE))
    assert together.dtype == torch.float64


def test_random_numbers_lie_in_the_open_interval():
    numbers = uniforms(0, np.arange(200_000), DRAFT_LANE)
    assert 0.0 < float(numbers.min()) < 1e-4
    assert 1 - 1e-4 < float(numbers.max()) < 1.0
    assert (2**52 - 0.5) / 2**52 < 1.0  # the largest possible one


@pytest.mark.parametrize("vary", ["seed", "counter"])
def test_random_numbers_are_uniform_and_uncorrelated(vary):
    index = np.arange(40_000)
    rows = [
        uniforms(index, 3, lane) if vary == "seed" else uniforms(3, index, lane)
        for lane in (DRAFT_LANE, ACCEPT_LANE, RESIDUAL_LANE)
    ]
    for numbers in rows:
        counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-4
        neighbours = np.histogram2d(numbers[:-1], numbers[1:], bins=8, range=[(0, 1)] * 2)[0]
        assert stats.chisquare(neighbours.ravel()).pvalue > 1e-4
    for one, other in ((0, 1), (0, 2), (1, 2)):
        pairs = np.histogram2d(rows[one], rows[other], bins=8, range=[(0, 1)] * 2)[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-38},
        {"temperature": 1e39},
        {"repetition_penalty": 1e-38},
        {"logit_bias": {5: 1e39}},
    ],
)
def test_settings_that_would_leave_float32_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        parse_config(settings, SamplingConfig)


def test_the_lowest_temperature_keeps_large_logits_finite() -> None:
    logits = torch.tensor([[3e38, 20.0, -3e38]])
    probs = logits_to_probs(logits, SamplingConfig(temperature=1e-4))
    assert probs.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("size", [300, 20000])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_token_is_drawn_from_what_is_no_distribution(size, bad):
    """A search in a sum that is NaN ends behind the last id: token V, which is nobody's."""
    probs_BV = torch.full((3, size), 1 / size)
    u_B = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    assert sample(probs_BV, u_B).max() < size
    probs_BV[1, size // 2] = bad
    with pytest.raises(SamplingError, match="row 1 of 3 are not numbers"):
        sample(probs_BV, u_B)
    with pytest.raises(SamplingError, match="row 0 of 1"):
        sample(logits_to_probs(torch.full((1, size), math.nan), SamplingConfig()), u_B[:1])
