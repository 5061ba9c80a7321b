"""Owns the proof for int8 weights: lossless means the law of the target that runs, rounded or not.
Refuses to ask that a rounded model writes what the one it was made from writes; it need not.

The oracles do not share the int8 layers: stock ``generate``, and the stock forward over every
possible text, of a plain model that holds the rounded weights in float32.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.early_exit import EarlyExitDrafter
from distill.models import ModelConfig, load_draft, load_target
from distill.models.quantization import Int8Linear, is_quantized, quantize_model
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult
from distill.runtime.speculative import decode_batch, speculative_decode
from distill.sampling import SamplingConfig
from tests.helpers import make_llama

GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 6, 7], [9, 10, 11, 12] * 6, [33], [100, 3, 100, 4]]
LENGTH = 260
SHORT = 80


def int8(model: Any) -> Any:
    quantize_model(model, "int8")
    return model


def rounded(model: Any) -> Any:
    """The same model, plain, with each weight where int8 puts it; worked out apart, in numpy."""
    for layer in [m for m in model.modules() if type(m) is torch.nn.Linear]:
        weight = layer.weight.detach().numpy()
        scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
        layer.weight = torch.nn.Parameter(torch.from_numpy(np.rint(weight / scale) * scale))
    return model


def disturbed(seed: int = 0) -> Any:
    """A draft that often agrees with ``make_llama(seed=0)`` and often does not."""
    model = make_llama(seed=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def generate(model: Any) -> list[list[int]]:
    outputs = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=LENGTH,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def decode(target: Any, drafter: Any, *, length: int = SHORT, k: int = 4) -> list[DecodeResult]:
    """Four prompts in three rows: rows differ in length, and one joins late."""
    engine = DecodeEngine(target, drafter, num_draft_tokens=k, max_batch_size=3, max_length=512)
    requests = [
        DecodeRequest(prompt, length, GREEDY, seed=n, stop_token_ids=frozenset())
        for n, prompt in enumerate(PROMPTS)
    ]
    return decode_batch(engine, requests)


def texts(results: list[DecodeResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def shortened(outputs: list[list[int]]) -> list[list[int]]:
    return [output[:SHORT] for output in outputs]


def acceptance(results: list[DecodeResult]) -> float:
    merged = sum((result.stats for result in results[1:]), results[0].stats)
    return merged.acceptance_rate


@pytest.fixture(scope="module")
def exact() -> list[list[int]]:
    return generate(make_llama(seed=0))


@pytest.fixture(scope="module")
def exact_int8() -> list[list[int]]:
    return generate(rounded(make_llama(seed=0)))


def test_rounding_the_target_changes_what_it_writes(exact, exact_int8):
    """Otherwise the tests here could not tell a rounded target from the other."""
    assert exact != exact_int8


def test_a_rounded_target_decoded_plainly_writes_what_its_weights_say(exact_int8):
    target = int8(make_llama(seed=0))
    assert texts(decode(target, None, length=LENGTH, k=0)) == exact_int8


@pytest.mark.parametrize(("is_target_int8", "is_draft_int8"), [(1, 0), (0, 1), (1, 1)])
def test_a_draft_that_disagrees_changes_nothing(exact, exact_int8, is_target_int8, is_draft_int8):
    target, draft = make_llama(seed=0), disturbed()
    target = int8(target) if is_target_int8 else target
    draft = int8(draft) if is_draft_int8 else draft
    results = decode(target, CausalLMDrafter(draft), length=LENGTH)
    assert texts(results) == (exact_int8 if is_target_int8 else exact)
    assert 0.2 < acceptance(results) < 0.9  # it does disagree, and it does agree


@pytest.mark.parametrize("is_target_int8", [False, True])
def test_a_model_and_its_rounded_copy_draft_for_each_other(exact, exact_int8, is_target_int8):
    plain, copied = make_llama(seed=0), int8(make_llama(seed=0))
    target, draft = (copied, plain) if is_target_int8 else (plain, copied)
    results = decode(target, CausalLMDrafter(draft))
    assert texts(results) == shortened(exact_int8 if is_target_int8 else exact)
    assert acceptance(results) > 0.85  # random weights have near ties, which rounding decides


def test_a_rounded_draft_with_a_smaller_vocabulary_changes_nothing(exact):
    copied = int8(make_llama(seed=0))
    drafter = CausalLMDrafter(copied, vocabulary_token_ids=range(0, 300, 2))
    results = decode(make_llama(seed=0), drafter)
    assert texts(results) == shortened(exact)
    assert 0.1 < acceptance(results) < 0.9
    # The rows kept are bytes as well, and the model has its whole head back.
    assert isinstance(drafter._head, Int8Linear)
    assert drafter._head.out_features == 150
    assert copied.lm_head.out_features == 300


def test_a_rounded_target_may_exit_early(exact_int8):
    results = decode(int8(make_llama(seed=0)), EarlyExitDrafter(num_layers=1))
    assert texts(results) == shortened(exact_int8)


def test_a_bfloat16_draft_changes_nothing_about_a_rounded_target(exact_int8):
    draft = int8(make_llama(seed=0, dtype=torch.bfloat16))
    results = decode(int8(make_llama(seed=0)), CausalLMDrafter(draft))
    assert texts(results) == shortened(exact_int8)
    assert acceptance(results) > 0.8


VOCABULARY, NUM_TOKENS, NUM_SEEDS = 5, 3, 2000
PROMPT = [1, 3, 1, 2, 1]
SMALL = {"vocab_size": VOCABULARY, "hidden": 32, "layers": 1}


@torch.no_grad()
def law(target: Any, temperature: float) -> np.ndarray:
    """Probability of each of the V ** NUM_TOKENS texts."""
    probs = np.ones([VOCABULARY] * NUM_TOKENS)
    for size in range(NUM_TOKENS):
        prefixes = list(itertools.product(range(VOCABULARY), repeat=size))
        logits = target(torch.tensor([PROMPT + list(p) for p in prefixes])).logits[:, -1].double()
        rows = torch.softmax(logits / temperature, dim=-1).numpy()
        for prefix, row in zip(prefixes, rows, strict=True):
            probs[prefix] *= row.reshape([VOCABULARY] + [1] * (NUM_TOKENS - size - 1))
    return probs.ravel()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("is_target_int8", "is_draft_int8"), [(1, 0), (0, 1), (1, 1)])
def test_sampled_texts_follow_the_law_of_the_target_that_runs(
    is_target_int8, is_draft_int8, temperature
):
    target, oracle = (make_llama(seed=3, initializer_range=0.2, **SMALL) for _ in range(2))
    draft = make_llama(seed=8, initializer_range=0.2, **SMALL)
    target, oracle = (int8(target), rounded(oracle)) if is_target_int8 else (target, oracle)
    draft = int8(draft) if is_draft_int8 else draft
    engine = DecodeEngine(
        target,
        CausalLMDrafter(draft),
        num_draft_tokens=2,
        max_batch_size=NUM_SEEDS,
        max_length=64,
    )
    sampling = SamplingConfig(temperature=temperature)
    requests = [
        DecodeRequest(PROMPT, NUM_TOKENS, sampling, seed=n, stop_token_ids=frozenset())
        for n in range(NUM_SEEDS)
    ]
    counts = np.zeros([VOCABULARY] * NUM_TOKENS)
    for result in decode_batch(engine, requests):
        counts[tuple(result.token_ids)] += 1
    expected = law(oracle, temperature) * NUM_SEEDS
    is_common = expected >= 5
    assert is_common.sum() > 15
    pooled = [np.append(x[is_common], x[~is_common].sum()) for x in (counts.ravel(), expected)]
    assert stats.chisquare(*pooled).pvalue > 1e-4  # six comparisons
    assert 0.1 < engine.stats.acceptance_rate < 0.95


def test_loaded_pairs_speculate_between_precisions(tiny_pair_dirs):
    config = ModelConfig(model=str(tiny_pair_dirs[0]), dtype="float32", quantize="int8")
    plain, quantized = load_target(config.unquantized), load_target(config)
    draft = load_draft(tiny_pair_dirs[0], dtype="float32", quantize="int8")
    assert [is_quantized(one.model) for one in (plain, quantized, draft)] == [False, True, True]
    prompts = ["the sea and the wind", "what is"]
    for target in (plain, quantized):
        alone = speculative_decode(target, None, prompts, GREEDY, max_new_tokens=60)
        paired = speculative_decode(target, draft, prompts, GREEDY, max_new_tokens=60)
        assert [a.token_ids for a in paired] == [a.token_ids for a in alone]
        assert paired.stats.acceptance_rate > 0.8
