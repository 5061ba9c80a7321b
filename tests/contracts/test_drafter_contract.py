"""Owns what every registered drafter must do; a new one is tested here without being named.

Refuses to know any drafter by name. Fault classes covered: q of other logits than the tokens came
from, drafts beyond what was asked, state that a rejection, a failure or a neighbour leaves behind.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from distill.drafters.base import CacheSharer, Drafter, Proposal, registry
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig
from tests.helpers import make_llama

SIZE = 60
GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 6, 7, 5, 6], [9, 10] * 12, [33], [40, 3, 40, 4]]
SAMPLINGS = [
    SamplingConfig(temperature=0.9),
    GREEDY,
    SamplingConfig(temperature=0.7, repetition_penalty=1.2),
    SamplingConfig(temperature=1.1, top_k=20),
]
K = 3


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(vocab_size=SIZE, layers=3, seed=0)


def make(name: str) -> Any:
    """A drafter from its constructor's required arguments, whatever they are."""
    known = {"model": make_llama(vocab_size=SIZE, seed=1), "num_layers": 1}
    cls = registry.get(name)
    required = [
        p.name
        for p in inspect.signature(cls).parameters.values()
        if p.default is inspect.Parameter.empty
    ]
    unknown = set(required) - set(known)
    assert not unknown, f"{name} needs {sorted(unknown)}: give this test a value for each"
    return cls(**{argument: known[argument] for argument in required})


def request(prompt: list[int], length: int = 40, **changes: Any) -> DecodeRequest:
    settings: dict[str, Any] = {"sampling": GREEDY, "seed": 0, "stop_token_ids": frozenset()}
    return DecodeRequest(prompt, length, **(settings | changes))


def engine_for(target: Any, drafter: Any, batch: int = 3) -> DecodeEngine:
    return DecodeEngine(target, drafter, num_draft_tokens=K, max_batch_size=batch, max_length=200)


def tokens(target: Any, drafter: Any, requests: list[DecodeRequest], batch: int = 3) -> Any:
    results = decode_batch(engine_for(target, drafter, batch), requests)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("name", registry.names())
def test_it_has_the_methods_and_says_how_far_it_can_look(name):
    drafter = make(name)
    assert isinstance(drafter, Drafter)
    assert drafter.max_length is None or drafter.max_length > 0


@pytest.mark.parametrize("name", registry.names())
def test_greedy_answers_of_rows_that_come_and_go_are_the_targets_own(target, name):
    requests = [request(prompt, 20 + 15 * n) for n, prompt in enumerate(PROMPTS)]
    plain = tokens(target, None, requests)
    assert tokens(target, make(name), requests) == plain
    assert tokens(target, make(name), requests, batch=2) == plain


@pytest.mark.parametrize("name", registry.names())
def test_a_seeded_row_gives_the_same_text_alone_and_in_any_batch(target, name):
    requests = [
        request(prompt, sampling=SAMPLINGS[n], seed=n, num_draft_tokens=(3, 2, 0, 1)[n])
        for n, prompt in enumerate(PROMPTS)
    ]
    alone = [tokens(target, make(name), [one], batch=1)[0] for one in requests]
    assert tokens(target, make(name), requests, batch=4) == alone
    assert tokens(target, make(name), requests[::-1], batch=2) == alone[::-1]


@pytest.mark.parametrize("name", registry.names())
def test_proposals_keep_to_what_was_asked_and_q_is_of_the_tokens(target, name):
    drafter = make(name)
    original = drafter.propose
    num_seen = 0

    def watched(handles: Any, token_ids: Any, wanted: Any) -> Proposal:
        nonlocal num_seen
        before = [list(row) for row in token_ids]
        proposal: Proposal = original(handles, token_ids, wanted)
        assert [list(row) for row in token_ids] == before
        assert len(proposal.num_tokens_B) == len(handles)
        for index, number in enumerate(proposal.num_tokens_B):
            assert 0 <= number <= wanted[index]
            drafts = proposal.tokens_BK[index, :number]
            num_seen += number
            assert all(0 <= int(token) < SIZE for token in drafts)
            if proposal.probs_BKV is not None and handles[index] in sampled:
                q_KV = proposal.probs_BKV[index, :number]
                assert q_KV.dtype == torch.float32
                torch.testing.assert_close(q_KV.sum(-1), torch.ones(number), atol=1e-5, rtol=0)
                assert (q_KV.gather(1, drafts.unsqueeze(1)) > 0).all()
        return proposal

    drafter.propose = watched
    engine = engine_for(target, drafter, batch=4)
    handles = [
        engine.add(request(prompt, sampling=SAMPLINGS[n], seed=n))
        for n, prompt in enumerate(PROMPTS)
    ]
    sampled = {h for h, sampling in zip(handles, SAMPLINGS, strict=True) if sampling.temperature}
    while engine.has_work:
        engine.step()
    assert num_seen > 10


@pytest.mark.parametrize("name", registry.names())
def test_cancelled_rows_and_failed_rounds_leave_nothing_behind(target, name, monkeypatch):
    requests = [request(prompt) for prompt in PROMPTS]
    plain = tokens(target, None, requests)
    engine = engine_for(target, make(name))
    handles = [engine.add(one) for one in requests]
    engine.step()
    engine.cancel(handles[1])
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr("distill.runtime.decode.judge", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    for n in (0, 2, 3):
        assert engine.result(handles[n]).token_ids == plain[n]


@pytest.mark.parametrize("name", [n for n in registry.names() if hasattr(registry.get(n), "share")])
def test_a_drafter_that_borrows_the_cache_gives_it_back_as_it_was(target, name):
    drafter = make(name)
    assert isinstance(drafter, CacheSharer)
    engine = engine_for(target, drafter, batch=4)
    for prompt in PROMPTS:
        engine.add(request(prompt))
    original = drafter.propose

    def watched(*arguments: Any) -> Any:
        before = list(engine._cache.lengths)
        proposal = original(*arguments)
        assert engine._cache.lengths == before
        return proposal

    drafter.propose = watched
    while engine.has_work:
        engine.step()
