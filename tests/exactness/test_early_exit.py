"""Owns the proof that drafting with the target's own first layers, in its own cache, loses nothing.
Refuses to trust the cache: what it holds after every round is compared with a fresh forward.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from distill.drafters.early_exit import EarlyExitDrafter
from distill.errors import ConfigError, PairMismatchError
from distill.runtime.cache import RaggedCache
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult
from distill.runtime.draft_length import AdaptiveDraftLength, SpeedModel
from distill.runtime.forward import forward
from distill.runtime.speculative import decode_batch
from distill.runtime.stats import DecodeStats
from distill.sampling import SamplingConfig, logits_to_probs
from tests.helpers import make_llama

LAYERS = 4
GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 6, 7], [9, 10, 11, 12] * 6, [33], [100, 3, 100, 4]]


@pytest.fixture(scope="module")
def target() -> Any:
    """A target whose first layers say something of its last: the later ones are quiet."""
    model = make_llama(layers=LAYERS, seed=0)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    return model


@pytest.fixture(scope="module")
def plain(target: Any) -> list[list[int]]:
    """The target's own greedy texts; a shorter one is the beginning of a longer one."""
    return [generate(target, prompt, 256) for prompt in PROMPTS]


def shortened(texts: list[list[int]], length: int) -> list[list[int]]:
    return [text[:length] for text in texts]


def engine_for(target: Any, num_layers: int | None, **changes: Any) -> DecodeEngine:
    ids = changes.pop("vocabulary_token_ids", None)
    drafter = None
    if num_layers is not None:
        drafter = EarlyExitDrafter(num_layers=num_layers, vocabulary_token_ids=ids)
    settings = {"num_draft_tokens": 3, "max_batch_size": 3, "max_length": 400}
    return DecodeEngine(target, drafter, **(settings | changes))


def request(prompt: list[int], length: int = 60, **changes: Any) -> DecodeRequest:
    settings: dict[str, Any] = {"sampling": GREEDY, "seed": 0, "stop_token_ids": frozenset()}
    return DecodeRequest(prompt, length, **(settings | changes))


def decode(
    target: Any, num_layers: int | None, requests: list[DecodeRequest], **changes: Any
) -> list[DecodeResult]:
    return decode_batch(engine_for(target, num_layers, **changes), requests)


def tokens(results: list[DecodeResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def generate(target: Any, prompt: list[int], length: int, **settings: Any) -> list[int]:
    output = target.generate(
        torch.tensor([prompt]),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=None,
        **settings,
    )
    return output[0, len(prompt) :].tolist()


def merged(results: list[DecodeResult]) -> DecodeStats:
    return sum((result.stats for result in results), DecodeStats())


# --- losslessness -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 3])
def test_greedy_rows_are_the_targets_own_over_256_tokens(target, plain, num_layers):
    results = decode(target, num_layers, [request(p, 256) for p in PROMPTS])
    assert tokens(results) == plain
    assert 0.05 < merged(results).acceptance_rate < 0.95  # it does disagree, and it does agree


def test_all_layers_are_always_accepted(target, plain):
    results = decode(target, LAYERS, [request(p, 40) for p in PROMPTS])
    assert tokens(results) == shortened(plain, 40)
    for result in results:
        assert result.stats.acceptance_rate == 1.0
        assert result.stats.num_target_calls == 10


def test_penalties_reach_the_early_layers_too(target):
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=1.3)
    requests = [request(p, sampling=sampling) for p in PROMPTS]
    expected = [generate(target, prompt, 60, repetition_penalty=1.3) for prompt in PROMPTS]
    assert tokens(decode(target, 2, requests)) == expected
    whole = decode(target, LAYERS, requests)
    assert tokens(whole) == expected
    assert merged(whole).acceptance_rate == 1.0


def test_a_vocabulary_subset_changes_nothing_but_acceptance(target, plain):
    requests = [request(p) for p in PROMPTS]
    results = decode(target, 3, requests, vocabulary_token_ids=range(0, 300, 2))
    assert tokens(results) == shortened(plain, 60)
    assert merged(results).acceptance_rate < merged(decode(target, 3, requests)).acceptance_rate


SMALL, LENGTH, NUM_SEEDS = 4, 4, 2000
PROMPT = [1, 3, 1, 2, 1]


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=0.7, top_k=3)], ids=["plain", "top_k"]
)
def test_sampled_texts_follow_the_target_law(sampling):
    model = make_llama(vocab_size=SMALL, layers=3, hidden=16, seed=3, initializer_range=0.4)
    law = np.ones([SMALL] * LENGTH)
    for size in range(LENGTH):
        prefixes = list(itertools.product(range(SMALL), repeat=size))
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + list(p) for p in prefixes])).logits[:, -1]
        rows = logits_to_probs(logits, sampling).double().numpy()
        rows /= rows.sum(axis=-1, keepdims=True)
        for prefix, probs in zip(prefixes, rows, strict=True):
            for token in range(SMALL):
                law[(*prefix, token)] *= probs[token]
    engine = engine_for(model, 1, num_draft_tokens=2, max_batch_size=NUM_SEEDS)
    requests = [request(PROMPT, LENGTH, sampling=sampling, seed=n) for n in range(NUM_SEEDS)]
    counts = np.zeros([SMALL] * LENGTH)
    for result in decode_batch(engine, requests):
        counts[tuple(result.token_ids)] += 1
    assert counts[law == 0].sum() == 0
    assert 0.1 < engine.stats.acceptance_rate < 0.95
    expected = law.ravel() * NUM_SEEDS
    is_common = expected >= 5
    pooled = [np.append(x[is_common], x[~is_common].sum()) for x in (counts.ravel(), expected)]
    assert pooled[1][-1] > 0
    assert stats.chisquare(*pooled).pvalue > 1e-3


def test_all_layers_are_accepted_at_any_temperature(target):
    sampling = SamplingConfig(temperature=1.3, top_p=0.9)
    results = decode(target, LAYERS, [request(p, sampling=sampling, seed=3) for p in PROMPTS])
    assert merged(results).acceptance_rate > 0.995


# --- rows that come and go --------------------------------------------------------------------


def test_a_seed_gives_the_same_text_alone_and_in_any_batch(target):
    samplings = [
        SamplingConfig(temperature=0.9),
        GREEDY,
        SamplingConfig(temperature=0.7, repetition_penalty=1.2),
        SamplingConfig(temperature=1.1, top_k=20),
    ]
    requests = [
        request(prompt, 20 + 9 * n, sampling=samplings[n], seed=n, num_draft_tokens=(3, 1, 0, 4)[n])
        for n, prompt in enumerate(PROMPTS)
    ]
    alone = [decode(target, 2, [one], max_batch_size=1)[0].token_ids for one in requests]
    assert tokens(decode(target, 2, requests, max_batch_size=4)) == alone
    assert tokens(decode(target, 2, requests, max_batch_size=2)) == alone
    assert tokens(decode(target, 2, requests[::-1], max_batch_size=3)) == alone[::-1]


def test_rows_join_leave_and_are_cancelled_and_the_others_go_on(target):
    expected = {n: generate(target, [9, n], 40) for n in range(3, 10)}
    engine = engine_for(target, 2)
    handles = {n: engine.add(request([9, n], 40)) for n in range(3, 8)}
    engine.step()
    first = engine.cancel(handles.pop(3))
    assert first.token_ids == expected[3][: len(first.token_ids)]
    engine.step()
    handles |= {n: engine.add(request([9, n], 40)) for n in (8, 9)}
    engine.cancel(handles.pop(5))
    while engine.has_work:
        engine.step()
    assert {n: engine.result(h).token_ids for n, h in handles.items()} == {
        n: expected[n] for n in handles
    }


@pytest.mark.parametrize("place", ["draft", "judge"])
def test_a_round_that_fails_leaves_every_row_where_it_was(target, plain, monkeypatch, place):
    engine = engine_for(target, 2)
    handles = [engine.add(request(prompt, 30)) for prompt in PROMPTS[:3]]
    engine.step()
    for _ in range(3):
        with monkeypatch.context() as patch:
            if place == "judge":
                patch.setattr("distill.runtime.decode.judge", lambda *_: 1 / 0)
            else:  # after the first of the drafted tokens was read
                patch.setattr(EarlyExitDrafter, "_draw", _failing_at_the_second_token())
            with pytest.raises(ZeroDivisionError):
                engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    assert [engine.result(h).token_ids for h in handles] == shortened(plain[:3], 30)


def _failing_at_the_second_token() -> Any:
    original = EarlyExitDrafter._draw

    def draw(self: Any, stepping: Any, logits: Any, uniforms: Any, step: int, probs: Any) -> Any:
        if step == 1:
            raise ZeroDivisionError
        return original(self, stepping, logits, uniforms, step, probs)

    return draw


def test_it_drafts_up_to_the_end_of_the_targets_context():
    model = make_llama(layers=3, seed=0, max_positions=40)
    prompts = [[5, 6, 7], [9] * 30]
    results = decode(model, 2, [request(p, 100) for p in prompts], num_draft_tokens=5)
    assert [len(p) + len(r.token_ids) for p, r in zip(prompts, results, strict=True)] == [40, 40]
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == generate(model, prompt, 40 - len(prompt))


def test_an_adaptive_row_may_stop_and_start_again(target, plain):
    policy = AdaptiveDraftLength(
        SpeedModel(0.4, {1: 1.0, 4: 1.2}), 3, half_life=4.0, min_probe_interval=2
    )
    results = decode(target, 2, [request(p, 80) for p in PROMPTS], draft_length=policy)
    assert tokens(results) == shortened(plain, 80)
    assert 0 < merged(results).num_rounds < merged(results).num_target_calls


# --- one set of weights, one cache ------------------------------------------------------------


@torch.no_grad()
def test_after_every_round_the_cache_is_what_the_target_alone_would_hold(target):
    """No hole and no trace of the early layers, in any layer of any row."""
    engine = engine_for(target, 2, max_batch_size=3)
    for n, prompt in enumerate(PROMPTS):
        engine.add(request(prompt, 14 + 5 * n))
    while engine.has_work:
        engine.step()
        cache = engine._cache
        for index, row in enumerate(engine._rows):
            assert cache.lengths[index] == len(row.token_ids) - 1
            fresh = RaggedCache(target, max_rows=1)
            fresh.join()
            forward(target, fresh, [row.token_ids[:-1]])
            for layer in range(LAYERS):
                for held, expected in zip(cache._memory[layer], fresh._memory[layer], strict=True):
                    length = cache.lengths[index]
                    torch.testing.assert_close(
                        held[index, :, :length], expected[0, :, :length], atol=1e-5, rtol=1e-4
                    )


def test_it_holds_no_weights_and_no_cache_of_its_own(target):
    engine = engine_for(target, 2)
    drafter = engine._drafter
    engine.add(request([5, 6, 7], 8))
    engine.step()
    assert drafter.model is target
    assert drafter._cache is engine._cache
    held = [
        value for value in vars(drafter).values() if isinstance(value, torch.Tensor | nn.Module)
    ]
    assert held == [target]


def test_only_the_first_layers_run_for_a_draft(target):
    """Counted at the cache: every layer that runs writes into it."""
    engine = engine_for(target, 2, num_draft_tokens=3)
    engine.add(request([5, 6, 7], 40))
    engine.step()
    written: list[int] = []
    update = engine._cache.update

    def counted(keys: Any, values: Any, layer_idx: int, **settings: Any) -> Any:
        written.append(layer_idx)
        return update(keys, values, layer_idx, **settings)

    engine._cache.update = counted  # type: ignore[method-assign]
    engine.step()
    assert written == [0, 1] * 3 + [0, 1, 2, 3]


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [0, -2, LAYERS + 1])
def test_layers_the_target_does_not_have_are_refused(target, num_layers):
    with pytest.raises(ConfigError, match=rf"num_layers = {num_layers}.*has {LAYERS} layers"):
        engine_for(target, num_layers)


def test_a_subset_of_ids_that_do_not_exist_is_refused(target):
    with pytest.raises(PairMismatchError, match="0 to 299"):
        engine_for(target, 2, vocabulary_token_ids=[5, 300])
