"""Owns the tests of the decode engine's behaviour: joining, leaving, stops, text, failures.
Refuses to prove losslessness: tests/exactness does.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distill.drafters.base import Proposal
from distill.drafters.causal_lm import CausalLMDrafter
from distill.errors import (
    CacheRollbackError,
    ConfigError,
    ContextLengthError,
    PairMismatchError,
    SamplingError,
)
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.runtime.draft_length import FixedDraftLength
from distill.runtime.speculative import decode_batch, speculative_decode
from distill.sampling import SamplingConfig
from tests.helpers import make_llama, make_tokenizer

GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def request(prompt: list[int] | None = None, length: int = 12, **changes: Any) -> DecodeRequest:
    settings: dict[str, Any] = {"sampling": GREEDY, "seed": 0, "stop_token_ids": frozenset()}
    return DecodeRequest(prompt or [5, 6, 7], length, **(settings | changes))


def engine_for(target: Any, drafter: Any = None, **changes: Any) -> DecodeEngine:
    settings: dict[str, Any] = {
        "num_draft_tokens": 0 if drafter is None else 4,
        "max_batch_size": 4,
        "max_length": 256,
    }
    return DecodeEngine(target, drafter, **(settings | changes))


def one(engine: DecodeEngine, *requests: DecodeRequest) -> Any:
    return decode_batch(engine, list(requests))[0]


class ScriptedDrafter:
    """Proposes what it is told, deterministically; optionally fails."""

    max_length = None

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.is_failing = False
        self.committed: list[int] = []

    def start(self, **_: Any) -> None: ...

    def join(self, *_: Any, **__: Any) -> None: ...

    def leave(self, handle: int) -> None: ...

    def commit(self, handle: int, num_valid_tokens: int) -> None:
        self.committed.append(num_valid_tokens)

    def propose(self, handles: Any, token_ids: Any, num_draft_tokens_B: Any) -> Proposal:
        if self.is_failing:
            raise RuntimeError("the draft is broken")
        width = max(num_draft_tokens_B)
        rows = [self.script[len(tokens) : len(tokens) + width] for tokens in token_ids]
        rows = [row + [0] * (width - len(row)) for row in rows]
        return Proposal(torch.tensor(rows), list(num_draft_tokens_B), None)


# --- rounds -----------------------------------------------------------------------------------


def test_updates_add_up_to_the_result_and_the_last_one_says_why(target):
    engine = engine_for(target, CausalLMDrafter(target))
    handle = engine.add(request())
    updates = []
    while engine.has_work:
        updates.extend(engine.step())
    result = engine.result(handle)
    assert [token for update in updates for token in update.new_token_ids] == result.token_ids
    assert [update.finish_reason for update in updates] == [None, None, "length"]
    assert [len(update.new_token_ids) for update in updates] == [5, 5, 2]
    assert result.finish_reason == "length"


def test_a_step_without_work_does_nothing(target):
    engine = engine_for(target)
    assert not engine.has_work
    assert engine.step() == []


def test_a_result_is_handed_out_once(target):
    engine = engine_for(target)
    handle = engine.add(request())
    with pytest.raises(KeyError):
        engine.result(handle)
    while engine.has_work:
        engine.step()
    engine.result(handle)
    with pytest.raises(KeyError):
        engine.result(handle)


def test_rows_join_and_leave_between_rounds(target):
    alone = [one(engine_for(target), request([9, n], 6 + n)).token_ids for n in range(6)]
    engine = engine_for(target, max_batch_size=2)
    handles = [engine.add(request([9, n], 6 + n)) for n in range(3)]
    for _ in range(4):
        engine.step()
    handles += [engine.add(request([9, n], 6 + n)) for n in range(3, 6)]
    while engine.has_work:
        assert len(engine.step()) <= 2
    assert [engine.result(handle).token_ids for handle in handles] == alone


def test_a_batch_is_rejected_whole_when_one_request_is_wrong(target):
    engine = engine_for(target)
    with pytest.raises(ConfigError):
        decode_batch(engine, [request(), request(length=0)])
    assert not engine.has_work


def test_requests_keep_their_ids_and_input_order(target):
    requests = [request([4, n], 3 + n % 3, request_id=f"r{n}") for n in range(7)]
    results = decode_batch(engine_for(target, max_batch_size=2), requests)
    assert [result.request_id for result in results] == [f"r{n}" for n in range(7)]
    assert [len(result.token_ids) for result in results] == [3 + n % 3 for n in range(7)]


def test_engine_counts_are_the_sum_over_rows_finished_or_not(target):
    engine = engine_for(target, CausalLMDrafter(target))
    engine.add(request(length=5))
    engine.add(request([8, 9], length=30))
    engine.step()
    assert engine.stats.num_emitted == 10
    engine.step()
    assert engine.stats.num_emitted == 15
    assert engine.stats.num_target_calls == 3


# --- cancelling and failing -------------------------------------------------------------------


def test_a_cancelled_row_returns_what_it_has_and_leaves_the_others_alone(target):
    """faults: cancel and retry disturbed an unrelated request."""
    drafter = CausalLMDrafter(make_llama(seed=1))
    expected = [one(engine_for(target), request([n, 4], 20)).token_ids for n in (5, 6, 7)]
    engine = engine_for(target, drafter)
    first, second, third = (engine.add(request([n, 4], 20)) for n in (5, 6, 7))
    engine.step()
    partial = engine.cancel(first)
    assert partial.finish_reason is None
    assert partial.token_ids == expected[0][: len(partial.token_ids)]
    again = engine.add(request([5, 4], 20))
    while engine.has_work:
        engine.step()
    assert [engine.result(h).token_ids for h in (second, third, again)] == [
        expected[1],
        expected[2],
        expected[0],
    ]


def test_a_waiting_request_can_be_cancelled(target):
    engine = engine_for(target, max_batch_size=1)
    engine.add(request())
    waiting = engine.add(request())
    engine.step()
    assert engine.cancel(waiting).token_ids == []
    with pytest.raises(KeyError):
        engine.cancel(waiting)


def test_a_failed_round_leaves_every_row_where_it_was(target):
    expected = one(engine_for(target), request(length=20)).token_ids
    drafter = ScriptedDrafter([5, 6, 7, *expected[:6], 0, 0])
    engine = engine_for(target, drafter)
    handle = engine.add(request(length=20))
    engine.step()
    drafter.is_failing = True
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    drafter.is_failing = False
    while engine.has_work:
        engine.step()
    assert engine.result(handle).token_ids == expected


def test_a_failed_prefill_puts_the_request_back(target, monkeypatch):
    import distill.runtime.decode as module

    engine = engine_for(target)
    handle = engine.add(request())
    original = module.prefill

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "prefill", broken)
    with pytest.raises(MemoryError):
        engine.step()
    monkeypatch.setattr(module, "prefill", original)
    while engine.has_work:
        engine.step()
    assert len(engine.result(handle).token_ids) == 12


def three_rows(target: Any, engine: DecodeEngine, **changes: Any) -> tuple[list[int], list[Any]]:
    """Handles of three requests, and the plain answers to them."""
    requests = [request([n, 4], 20, **changes) for n in (5, 6, 7)]
    expected = [one(engine_for(target), request([n, 4], 20)).token_ids for n in (5, 6, 7)]
    return [engine.add(asked) for asked in requests], expected


def all_updates(engine: DecodeEngine, error: type[BaseException]) -> dict[int, list[int]]:
    """Step to the end, through errors of one kind; the tokens that were told, by handle."""
    told: dict[int, list[int]] = {}
    while engine.has_work:
        with contextlib.suppress(error):
            for update in engine.step():
                told.setdefault(update.handle, []).extend(update.new_token_ids)
    return told


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("k", [0, 4])
def test_a_draft_length_that_fails_in_the_middle_of_a_round_loses_no_token(target, error, k):
    calls = itertools.count(1)

    class Failing(FixedDraftLength):
        def observe(self, num_drafted: int, num_accepted: int) -> None:
            if next(calls) in (2, 7, 9):
                raise error

    drafter = CausalLMDrafter(make_llama(seed=1)) if k else None
    engine = engine_for(target, drafter, draft_length=Failing(k))
    handles, expected = three_rows(target, engine)
    told = all_updates(engine, error)
    assert [told[handle] for handle in handles] == expected
    assert [engine.result(handle).token_ids for handle in handles] == expected
    assert next(calls) > 9


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["commit", "leave"])
def test_a_drafter_that_fails_after_a_round_loses_no_token(target, monkeypatch, error, method):
    drafter = CausalLMDrafter(make_llama(seed=1))
    engine = engine_for(target, drafter)
    handles, expected = three_rows(target, engine)
    original, calls = getattr(drafter, method), itertools.count()

    def failing(*arguments: Any) -> None:
        if next(calls) in (0, 2):
            raise error
        original(*arguments)

    monkeypatch.setattr(drafter, method, failing)
    told = all_updates(engine, error)
    assert [told[handle] for handle in handles] == expected
    assert [engine.result(handle).token_ids for handle in handles] == expected
    assert engine.stats.num_emitted == 60
    assert next(calls) > 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_tokenizer_that_fails_leaves_every_row_where_it_was(target, tokenizer, error):
    class Failing:
        num_calls = 0

        def __len__(self) -> int:
            return len(tokenizer)

        def decode(self, *arguments: Any, **settings: Any) -> str:
            self.num_calls += 1
            if self.num_calls in (2, 8):  # the second row of a round
                raise error
            text: str = tokenizer.decode(*arguments, **settings)
            return text

    engine = engine_for(target, CausalLMDrafter(target), tokenizer=Failing())
    handles, expected = three_rows(target, engine, stop_strings=("never said",))
    with pytest.raises(error):
        engine.step()
    assert engine.stats.num_emitted == 0
    told = all_updates(engine, error)
    assert [told[handle] for handle in handles] == expected


def test_a_row_cancelled_after_a_failure_is_told_of_no_more(target):
    class Failing(FixedDraftLength):
        def observe(self, num_drafted: int, num_accepted: int) -> None:
            raise RuntimeError

    engine = engine_for(target, CausalLMDrafter(target), draft_length=Failing(4))
    first = engine.add(request([5, 4], 20))
    with pytest.raises(RuntimeError):
        engine.step()
    assert len(engine.cancel(first).token_ids) == 5
    assert not engine.has_work
    assert engine.step() == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_drafter_that_cannot_take_a_row_in_loses_no_request_nor_its_place(
    target, monkeypatch, error
):
    drafter = CausalLMDrafter(make_llama(seed=1))
    engine = engine_for(target, drafter, max_batch_size=2)
    prompts = [[9] * 6, [5, 4], [6, 4], [8] * 4]
    handles = [engine.add(request(prompt, 20)) for prompt in prompts]
    original, calls = drafter.join, itertools.count()

    def failing(*arguments: Any, **settings: Any) -> None:
        if next(calls) in (0, 2, 5):
            raise error
        original(*arguments, **settings)

    monkeypatch.setattr(drafter, "join", failing)
    for _ in range(2):
        with pytest.raises(error):
            engine.step()
    # The two that came first, whichever is shorter.
    assert {update.handle for update in engine.step()} == set(handles[:2])
    all_updates(engine, error)
    expected = [one(engine_for(target), request(prompt, 20)).token_ids for prompt in prompts]
    assert [engine.result(handle).token_ids for handle in handles] == expected


def test_what_is_drafted_behind_a_stop_token_is_never_fed(target):
    expected = one(engine_for(target), request(length=20)).token_ids
    drafter = ScriptedDrafter([5, 6, 7, *expected])
    stop = frozenset({expected[1]})
    result = one(engine_for(target, drafter), request(length=20, stop_token_ids=stop))
    assert result.token_ids == expected[:2]
    assert result.stats.num_proposed == 2


def test_a_draft_length_is_not_told_how_many_drafts_followed_a_refused_one(target):
    """How many came may follow from drafts that were thrown away, see ``RowDraftLength``."""
    expected = one(engine_for(target), request(length=20)).token_ids
    stop = 299
    assert stop not in expected
    seen: list[list[tuple[int, int]]] = []

    class Recording(FixedDraftLength):
        def observe(self, num_drafted: int, num_accepted: int) -> None:
            seen[-1].append((num_drafted, num_accepted))

    for behind in (stop, 298):  # the first is cut short by it, the second is not
        seen.append([])
        drafter = ScriptedDrafter([5, 6, 7, expected[0], 298, behind, *expected[3:]])
        engine = engine_for(target, drafter, draft_length=Recording(4))
        result = one(engine, request(length=20, stop_token_ids=frozenset({stop})))
        assert result.token_ids == expected
    assert seen[0] == seen[1]
    assert seen[0][0] == (4, 1)


def test_the_drafter_is_told_how_many_tokens_stand(target):
    expected = one(engine_for(target), request(length=20)).token_ids
    drafter = ScriptedDrafter([5, 6, 7, *expected[:3], 299, *expected[4:]])
    engine = engine_for(target, drafter)
    engine.add(request(length=20))
    engine.step()  # three accepted, the fourth wrong: prompt + 3 stand, the correction is new
    assert drafter.committed == [6]


# --- stops and text ---------------------------------------------------------------------------


def test_text_leaves_out_special_tokens_and_the_stop_token(target, tokenizer):
    ids = one(engine_for(target), request(length=8)).token_ids
    stop = ids[5]
    result = one(engine_for(target, tokenizer=tokenizer), request(stop_token_ids=frozenset({stop})))
    shown = ids[: ids.index(stop)]
    assert result.token_ids == [*shown, stop]
    assert result.text == tokenizer.decode(shown, skip_special_tokens=True)


def test_without_a_tokenizer_there_is_no_text(target):
    assert one(engine_for(target), request()).text is None


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("start", range(1, 7))
def test_a_stop_string_inside_a_block_trims_tokens_and_text(target, tokenizer, k, start):
    """faults: text trimmed at the stop while token ids still held the tail."""
    full = one(engine_for(target, tokenizer=tokenizer), request([5, 6], 30))
    stop = tokenizer.decode(full.token_ids[start : start + 2], skip_special_tokens=True)
    if not stop:
        pytest.skip("these tokens have no text")
    drafter = CausalLMDrafter(target) if k else None
    engine = engine_for(target, drafter, tokenizer=tokenizer, num_draft_tokens=k)
    result = one(engine, request([5, 6], 30, stop_strings=(stop,)))
    assert result.finish_reason == "stop"
    assert result.text == full.text[: full.text.index(stop)]
    whole = tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert stop in whole
    assert stop not in tokenizer.decode(result.token_ids[:-1], skip_special_tokens=True)
    assert result.stats.num_emitted == len(result.token_ids)


def test_ids_behind_the_end_of_the_tokenizer_are_never_emitted(tokenizer):
    """faults: padded rows of the output head won the argmax."""
    target = make_llama(vocab_size=len(tokenizer) + 20)
    with torch.no_grad():
        target.lm_head.weight[len(tokenizer) :] *= 50
    result = one(engine_for(target, tokenizer=tokenizer), request(length=40))
    assert max(result.token_ids) < len(tokenizer)
    assert max(one(engine_for(target), request(length=40)).token_ids) >= len(tokenizer)


# --- kept hidden states -----------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 3])
def test_kept_hidden_states_predict_their_tokens(target, k):
    drafter = CausalLMDrafter(make_llama(seed=1)) if k else None
    engine = engine_for(target, drafter, keep_hidden=True, num_draft_tokens=k)
    stop = one(engine_for(target), request([5, 6], 20)).token_ids[13]
    requests = [
        request([5, 6], 20, stop_token_ids=frozenset({stop})),
        request([9] * 9, 11, sampling=SamplingConfig(temperature=0.8)),
    ]
    for asked, result in zip(requests, decode_batch(engine, requests), strict=True):
        tokens = [*asked.prompt_token_ids, *result.token_ids]
        with torch.no_grad():
            output = target(torch.tensor([tokens]), output_hidden_states=True)
        first = len(asked.prompt_token_ids) - 1
        span = slice(first, first + len(result.token_ids))
        hidden = output.hidden_states[-1][0, span]
        assert result.hidden_TD is not None
        assert result.logsumexp_T is not None
        torch.testing.assert_close(result.hidden_TD, hidden, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(
            result.logsumexp_T, output.logits[0, span].logsumexp(-1), atol=1e-4, rtol=1e-4
        )
        assert result.logsumexp_T.dtype == torch.float32


def test_kept_hidden_states_can_be_trained_on(target):
    result = one(engine_for(target, keep_hidden=True), request(length=3))
    head = torch.nn.Linear(32, 4)
    head(result.hidden_TD).sum().backward()
    assert head.weight.grad is not None


def test_kept_hidden_states_of_a_long_row_do_not_hold_those_of_the_others(target):
    engine = engine_for(target, keep_hidden=True)
    long = engine.add(request([5, 6], 12))
    for n in range(3):
        engine.add(request([7, n], 2))
    for _ in range(4):
        engine.step()
    row = next(row for row in engine._rows if row.handle == long)
    kept = [t for part in (*row.hidden, *row.logsumexp) for t in [part.untyped_storage().nbytes()]]
    assert sum(kept) == 4 * (32 + 1) * 4  # rounds, width and log-sum-exp, bytes of a float


def test_hidden_states_are_not_kept_unless_asked_for(target):
    assert one(engine_for(target), request()).hidden_TD is None


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prompt": [1] * 256}, ContextLengthError, r"256 tokens; the context holds 256"),
        ({"prompt": [1, 300]}, PairMismatchError, r"300"),
        ({"prompt": [-1]}, PairMismatchError, r"-1"),
        ({"length": 0}, ConfigError, r"one new token"),
        ({"stop_strings": ("x",)}, ConfigError, r"tokenizer"),
        ({"num_draft_tokens": -1}, ConfigError, r"-1"),
        ({"sampling": SamplingConfig(logit_bias={300: 1.0})}, SamplingError, r"300"),
        ({"sampling": SamplingConfig(bad_token_ids=tuple(range(300)))}, SamplingError, r"all 300"),
    ],
)
def test_a_request_that_cannot_be_decoded_is_refused_at_once(target, changes, error, words):
    engine = engine_for(target)
    with pytest.raises(error, match=words):
        engine.add(request(**changes))
    assert not engine.has_work


def test_an_empty_prompt_and_an_empty_stop_string_are_refused(target, tokenizer):
    engine = engine_for(target, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="prompt token"):
        engine.add(DecodeRequest([], 3, GREEDY, 0, frozenset()))
    with pytest.raises(ConfigError, match="empty stop"):
        engine.add(request(stop_strings=("",)))


def test_the_context_of_the_engine_is_never_longer_than_the_targets(target):
    assert engine_for(target, max_length=100_000).max_length == 512
    assert engine_for(target, max_length=100).max_length == 100


def test_a_recurrent_target_is_refused_before_anything_is_computed():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=90, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(CacheRollbackError, match="Mamba"):
        engine_for(MambaForCausalLM(config).eval())


# --- one call ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(target, tokenizer) -> tuple[Any, Any]:
    def loaded(model: Any) -> Any:
        stops = frozenset({tokenizer.eos_token_id})
        return SimpleNamespace(model=model, tokenizer=tokenizer, stop_token_ids=stops)

    return loaded(target), loaded(make_llama(seed=1))


def test_one_call_answers_text_ids_and_messages_alike(pair, tokenizer):
    target, draft = pair
    messages = [{"role": "user", "content": "the sea"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    greedy = speculative_decode(target, draft, [messages, ids, text], GREEDY, max_new_tokens=9)
    assert [result.token_ids for result in greedy] == [greedy[0].token_ids] * 3
    assert greedy[0].text is not None
    assert [result.request_id for result in greedy] == ["0", "1", "2"]


@pytest.mark.parametrize("draft_kind", ["model", "lookup", "subset"])
def test_one_call_gives_the_plain_answer_with_any_draft(pair, draft_kind):
    target, draft = pair
    prompts = ["the sea and the wind", [9, 8, 7]]
    plain = speculative_decode(target, None, prompts, GREEDY, max_new_tokens=20)
    chosen = {"model": draft, "lookup": "prompt_lookup", "subset": draft}[draft_kind]
    ids = list(range(0, 300, 3)) if draft_kind == "subset" else None
    got = speculative_decode(
        target, chosen, prompts, GREEDY, max_new_tokens=20, vocabulary_token_ids=ids
    )
    assert [r.token_ids for r in got] == [r.token_ids for r in plain]
    assert plain[0].stats.num_proposed == 0


def test_one_call_samples_by_default_and_repeats_with_its_seed(pair):
    target, draft = pair
    first = speculative_decode(target, draft, [[5, 6], [5, 6]], max_new_tokens=20, seed=3)
    again = speculative_decode(target, draft, [[5, 6]], max_new_tokens=20, seed=4)
    assert first[0].token_ids != first[1].token_ids  # prompt i uses seed + i
    assert first[1].token_ids == again[0].token_ids


def test_one_call_without_prompts_returns_nothing(pair):
    assert speculative_decode(pair[0], None, []) == []


def test_a_dropped_engine_frees_its_caches_without_the_garbage_collector(
    target: Any, tokenizer: Any
) -> None:
    engine = engine_for(target, tokenizer=tokenizer)
    one(engine, request())
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("changes", [{"max_batch_size": 0}, {"num_draft_tokens": -1}])
def test_an_engine_without_rows_or_with_negative_drafts_is_refused(
    target: Any, changes: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match="at least"):
        engine_for(target, **changes)


def loaded(target: Any, tokenizer: Any) -> Any:
    return SimpleNamespace(model=target, tokenizer=tokenizer, stop_token_ids=frozenset({1}))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_prompt_of_ids_may_be_a_list_an_array_or_a_tensor(
    target: Any, tokenizer: Any, kind: Any
) -> None:
    pair = loaded(target, tokenizer)
    (expected,) = speculative_decode(pair, None, [[5, 6, 7]], GREEDY, max_new_tokens=4)
    (got,) = speculative_decode(pair, None, [kind([5, 6, 7])], GREEDY, max_new_tokens=4)
    assert got.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("Hello", "give a list of prompts"),
        ([[5, "six"]], "list of token ids"),
        ([[{"role": "user", "content": "hi"}, "hi"]], "list of messages"),
    ],
)
def test_prompts_that_mean_nothing_are_refused(
    target: Any, tokenizer: Any, prompts: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        speculative_decode(loaded(target, tokenizer), None, prompts)


def test_messages_for_a_tokenizer_without_a_template_are_refused(target: Any) -> None:
    plain = make_tokenizer()
    plain.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        speculative_decode(loaded(target, plain), None, [[{"role": "user", "content": "hi"}]])
