"""Owns faults of others in caches, positions and rollback: what a rejected draft left behind.
Refuses to look at text alone where a cache can be counted.

Shown in tests/unit/test_cache.py: vllm-project/vllm#39273, PR#52942 (recurrent states), PR#50146
(convolutions), test_models_with_other_state_are_refused_by_name; ml-explore/mlx-swift-lm#424 (a
rollback that removed nothing), test_rolling_back_reports_how_much_and_never_forward, and
test_greedy.py, test_a_sliding_window_smaller_than_the_text_changes_nothing;
unslothai/unsloth#3699, ndif-team/nnsight PR#673 (shared positions of padded rows),
thu-nics/C2C PR#19 (masks of the current call only), test_ragged_rows_equal_each_row_alone.
In test_drafters.py: lablup/mlxcel#994 (rewound too far),
test_after_each_round_the_cache_holds_what_stands_and_no_more.
In test_decode.py: ml-explore/mlx-swift-lm PR#308 (a second buffer not trimmed),
test_kept_hidden_states_predict_their_tokens.
In test_greedy.py: ggml-org/llama.cpp#27117 (drafts corrupt as sequences grow),
test_concurrent_rows_accept_as_much_as_each_row_alone.

Cannot happen: Blaizzy/mlx-vlm#1715 (a ring buffer sliced by logical length) and
huggingface/text-generation-inference PR#2711 (slots of a shared prefix that do not follow each
other): no prefix is shared between requests, and position t of a row is always place t of its slot.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.early_exit import EarlyExitDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.runtime.decode import DecodeRequest
from tests.helpers import make_llama
from tests.runtime_helpers import (
    GREEDY,
    ScriptedDrafter,
    decode,
    disturbed,
    engine_for,
    generate,
    tokens,
)


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=0)


@pytest.fixture(scope="module")
def draft() -> Any:
    return disturbed(make_llama(seed=0), 0.02)


def mistral(seed: int = 0) -> Any:
    """A window of 16 tokens in every layer."""
    from transformers import MistralConfig, MistralForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = MistralConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=16,
            max_position_embeddings=512,
            initializer_range=0.2,
        )
        return MistralForCausalLM(config).eval()


def test_a_prompt_of_one_token_is_read_right_with_any_draft(target, draft):
    """huggingface/transformers#30042, #30413: positions of the verify pass were off by one."""
    prompts = [[n] for n in (0, 1, 33, 299)]
    expected = [generate(target, prompt, 30) for prompt in prompts]
    drafters = (CausalLMDrafter(draft), EarlyExitDrafter(num_layers=1), PromptLookupDrafter())
    for drafter in drafters:
        assert tokens(decode(target, drafter, prompts, length=30)) == expected
        assert tokens(decode(target, drafter, prompts[:1], length=30)) == expected[:1]


def test_rows_that_accept_none_and_all_stay_apart(target):
    """huggingface/transformers#29769, PR#32189: a batch whose rows accept different numbers needs
    positions and masks of its own per row."""
    prompts = [[5, 6, 7], [9] * 12, [33], [100, 3]]
    answers = [generate(target, prompt, 40) for prompt in prompts]
    wrong = [[(token + 1) % 300 for token in answer] for answer in answers]
    half = [a if n % 3 else w for n, (a, w) in enumerate(zip(answers[2], wrong[2], strict=True))]
    scripts = [wrong[0], answers[1], half, answers[3][:20] + wrong[3][20:]]
    drafter = ScriptedDrafter(dict(zip(map(tuple, prompts), scripts, strict=True)))
    results = decode(target, drafter, prompts, k=4)
    assert tokens(results) == answers
    assert [r.stats.num_target_calls for r in results[:2]] == [40, 8]
    assert results[0].stats.num_accepted == 0
    assert results[1].stats.acceptance_rate == 1.0


def test_acceptance_does_not_fall_with_the_length_of_the_context():
    """AEON-7/Qwen3.6-27B-AEON-Ultimate-Uncensored-DFlash#6: a draft's windowed layers attended to
    everything, and beyond the window nothing was accepted any more."""
    target = mistral()
    results = decode(target, CausalLMDrafter(mistral()), [[5, 6, 7], [9] * 40], length=120)
    assert tokens(results) == [generate(target, p, 120) for p in ([5, 6, 7], [9] * 40)]
    assert all(result.stats.acceptance_rate == 1.0 for result in results)


def test_rounds_without_drafts_between_rounds_with_them_cost_no_acceptance(target):
    """vllm-project/vllm-metal PR#734: an adaptive schedule of 4, 0, 0, 4 left holes in the draft's
    cache. A draft that is the target shows a hole at once: it stops being accepted."""
    drafter = CausalLMDrafter(target)
    schedule = iter([4, 0, 0, 4, 1, 0, 4, 0, 0, 0, 3])

    class Scheduled:
        max_draft_tokens = 4

        def start(self) -> Scheduled:
            return self

        def choose(self) -> int:
            return next(schedule, 4)

        def observe(self, num_drafted: int, num_accepted: int) -> None: ...

    engine = engine_for(target, drafter, k=4, batch=1, draft_length=Scheduled())
    handle = engine.add(DecodeRequest([5, 6, 7], 60, GREEDY, 0, frozenset()))
    while engine.has_work:
        engine.step()
        if engine.has_work:
            assert drafter.num_cached_tokens(handle) <= 3 + engine.stats.num_emitted
    result = engine.result(handle)
    assert result.token_ids == generate(target, [5, 6, 7], 60)
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.num_rounds < result.stats.num_target_calls


def test_a_request_told_twice_is_drafted_for_alike_both_times(target, draft):
    """ggml-org/llama.cpp#27852, #26100: the draft's cache outlived its request, which spoilt the
    next one's drafts, or made a repeated benchmark ten times too good."""
    for drafter in (CausalLMDrafter(draft), EarlyExitDrafter(num_layers=1), PromptLookupDrafter()):
        engine = engine_for(target, drafter, batch=1)
        found = []
        for prompt in ([5, 6, 7], [9] * 12, [5, 6, 7], [9] * 12):
            handle = engine.add(DecodeRequest(prompt, 30, GREEDY, 0, frozenset()))
            while engine.has_work:
                engine.step()
            result = engine.result(handle)
            found.append((result.token_ids, result.stats))
        assert found[:2] == found[2:]


def test_a_row_that_leaves_takes_nothing_of_its_neighbours_along(target, draft):
    """sgl-project/sglang#23392: a cancelled request corrupted one it shared a beginning with."""
    prompts = [[5, 6, 7, n] for n in (1, 2, 3, 4)]
    expected = [generate(target, prompt, 30) for prompt in prompts]
    for cancelled in range(4):
        engine = engine_for(target, CausalLMDrafter(draft), batch=4)
        handles = [engine.add(DecodeRequest(p, 30, GREEDY, 0, frozenset())) for p in prompts]
        engine.step()
        engine.cancel(handles.pop(cancelled))
        again = engine.add(DecodeRequest(prompts[cancelled], 30, GREEDY, 0, frozenset()))
        while engine.has_work:
            engine.step()
        handles.insert(cancelled, again)
        assert [engine.result(handle).token_ids for handle in handles] == expected


@pytest.mark.parametrize("window", [False, True])
def test_a_rejection_in_the_first_place_of_every_round_leaves_no_trace(target, window):
    """vllm-project/vllm PR#50146, ml-explore/mlx-swift-lm#424: a state without room for a rollback
    diverged at the first rejection; a wrapped window removed fewer tokens than it was asked to."""
    model = mistral() if window else target
    prompts = [[5, 6, 7], list(range(20, 60))]
    answers = [generate(model, prompt, 64) for prompt in prompts]
    scripts = {
        tuple(prompt): [(token + 1) % 300 for token in answer]
        for prompt, answer in zip(prompts, answers, strict=True)
    }
    results = decode(model, ScriptedDrafter(scripts), prompts, length=64, k=5)
    assert tokens(results) == answers
    assert all(result.stats.num_accepted == 0 for result in results)
    assert all(result.stats.num_proposed > 250 for result in results)
