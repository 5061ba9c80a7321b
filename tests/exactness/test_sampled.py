"""Owns the proof above temperature 0: the engine's output law, and what a seed promises.
Refuses to trust the sampling code: the expected law is computed here, with numpy, from the
target's stock forward over every possible text of a five-token vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig
from tests.helpers import make_llama
from tests.law_helpers import numpy_probs

VOCABULARY, LENGTH, NUM_SEEDS = 5, 3, 2000
PROMPT = [1, 3, 1, 2, 1]


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(vocab_size=VOCABULARY, seed=3, hidden=16, layers=1, initializer_range=0.5)


@pytest.fixture(scope="module")
def draft() -> Any:
    return make_llama(vocab_size=VOCABULARY, seed=8, hidden=16, layers=1, initializer_range=0.4)


@torch.no_grad()
def exact_law(target: Any, sampling: SamplingConfig) -> np.ndarray:
    """Probability of each of the V ** LENGTH texts."""
    law = np.ones([VOCABULARY] * LENGTH)
    for size in range(LENGTH):
        prefixes = list(itertools.product(range(VOCABULARY), repeat=size))
        logits = target(torch.tensor([PROMPT + list(p) for p in prefixes])).logits[:, -1].numpy()
        for prefix, row in zip(prefixes, logits, strict=True):
            probs = numpy_probs(row, sampling, tuple(PROMPT), prefix)
            for token in range(VOCABULARY):
                law[(*prefix, token)] *= probs[token]
    return law


def observed(
    target: Any, drafter: Any, sampling: SamplingConfig, k: int, num_seeds: int = NUM_SEEDS
) -> tuple[Any, Any]:
    engine = DecodeEngine(
        target, drafter, num_draft_tokens=k, max_batch_size=num_seeds, max_length=64
    )
    requests = [
        DecodeRequest(PROMPT, LENGTH, sampling, seed=n, stop_token_ids=frozenset())
        for n in range(num_seeds)
    ]
    counts = np.zeros([VOCABULARY] * LENGTH)
    for result in decode_batch(engine, requests):
        counts[tuple(result.token_ids)] += 1
    return counts, engine.stats


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square over all texts; rare ones are pooled, impossible ones must not occur."""
    assert counts[law == 0].sum() == 0
    expected = law.ravel() * NUM_SEEDS
    is_common = expected >= 5
    pooled = [np.append(x[is_common], x[~is_common].sum()) for x in (counts.ravel(), expected)]
    if pooled[1][-1] == 0:
        pooled = [x[:-1] for x in pooled]
    return float(stats.chisquare(*pooled).pvalue)


SETTINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.6, top_k=3),
    SamplingConfig(temperature=1.5, top_p=0.7),
    SamplingConfig(repetition_penalty=1.8, frequency_penalty=0.6, presence_penalty=0.3),
    SamplingConfig(min_p=0.3, bad_words_ids=((1, 2), (2, 4, 0), (3, 3))),
]


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *(("draft", sampling) for sampling in SETTINGS),
        *((kind, SETTINGS[n]) for n in (0, 3, 4) for kind in ("plain", "subset", "lookup")),
    ],
)
def test_the_output_follows_the_target_law(target, draft, sampling, kind):
    drafter = {
        "plain": lambda: None,
        "draft": lambda: CausalLMDrafter(draft),
        "subset": lambda: CausalLMDrafter(draft, vocabulary_token_ids=[0, 2, 3]),
        "lookup": lambda: PromptLookupDrafter(),
    }[kind]()
    counts, ledger = observed(target, drafter, sampling, 0 if drafter is None else 2)
    assert p_value(counts, exact_law(target, sampling)) > 1e-4  # fourteen comparisons
    if kind in ("draft", "subset"):
        assert 0.1 < ledger.acceptance_rate < 0.95
    if kind == "lookup":
        assert ledger.num_tested > 100


def test_the_chi_square_notices_a_law_that_is_slightly_off(target):
    counts, _ = observed(target, None, SamplingConfig(temperature=1.25), 0)
    assert p_value(counts, exact_law(target, SamplingConfig())) < 1e-6


@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_target_as_its_own_draft_is_accepted_at_any_temperature(target, sampling):
    """faults: q was of the raw logits while tokens came from the processed ones."""
    _, ledger = observed(target, CausalLMDrafter(target), sampling, 2, num_seeds=300)
    assert ledger.acceptance_rate > 0.995


def test_measured_acceptance_is_the_mean_overlap(target, draft):
    """alpha = sum_v min(p, q), for the first drafted position of the same prompt."""
    with torch.no_grad():
        p, q = (m(torch.tensor([PROMPT])).logits[0, -1].softmax(-1) for m in (target, draft))
    # Later rounds of a row start at other prefixes, hence only the first round of each is used.
    engine = DecodeEngine(
        target,
        CausalLMDrafter(draft),
        num_draft_tokens=1,
        max_batch_size=NUM_SEEDS,
        max_length=64,
    )
    for n in range(NUM_SEEDS):
        engine.add(DecodeRequest(PROMPT, LENGTH, SamplingConfig(), n, frozenset()))
    engine.step()
    sigma = 0.5 / np.sqrt(NUM_SEEDS)
    expected = torch.minimum(p, q).sum().item()
    assert engine.stats.acceptance_rate == pytest.approx(expected, abs=4 * sigma)


# --- seeds --------------------------------------------------------------------------------------

WIDE = SamplingConfig(temperature=0.9, top_p=0.95)


@pytest.fixture(scope="module")
def wide_pair() -> tuple[Any, Any]:
    return make_llama(seed=0), make_llama(seed=1)


def decode(pair: Any, requests: list[DecodeRequest], *, k: int, batch: int) -> list[list[int]]:
    drafter = CausalLMDrafter(pair[1]) if k else None
    engine = DecodeEngine(
        pair[0], drafter, num_draft_tokens=k, max_batch_size=batch, max_length=256
    )
    return [result.token_ids for result in decode_batch(engine, requests)]


def request(prompt: list[int], seed: int, sampling: SamplingConfig = WIDE) -> DecodeRequest:
    return DecodeRequest(prompt, 40, sampling, seed=seed, stop_token_ids=frozenset())


@pytest.mark.parametrize("k", [0, 3])
def test_a_seed_gives_the_same_text_alone_and_in_any_batch(wide_pair, k):
    """faults: per-request seeds ignored; parallel requests with other seeds disturb each other."""
    requests = [
        request([5, 6, 7], 1),
        request([9] * 20, 2, SamplingConfig(temperature=0.0)),
        request([5, 6, 7], 3, SamplingConfig(temperature=0.7, repetition_penalty=1.2)),
        request([44], 1),
        request([5, 6, 7], 1),
    ]
    alone = [decode(wide_pair, [one], k=k, batch=1)[0] for one in requests]
    assert decode(wide_pair, requests, k=k, batch=5) == alone
    assert decode(wide_pair, requests, k=k, batch=2) == alone
    assert decode(wide_pair, requests[::-1], k=k, batch=3) == alone[::-1]
    assert alone[0] == alone[4]


def test_different_seeds_give_different_texts(wide_pair):
    texts = decode(wide_pair, [request([5, 6, 7], n) for n in range(8)], k=3, batch=8)
    assert len({tuple(text) for text in texts}) == 8


def test_greedy_text_does_not_depend_on_the_seed(wide_pair):
    greedy = SamplingConfig(temperature=0.0)
    texts = decode(wide_pair, [request([5, 6], n, greedy) for n in (0, 123)], k=3, batch=2)
    assert texts[0] == texts[1]
