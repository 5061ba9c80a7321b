"""Owns faults of others between target and draft: vocabularies, special ids, contexts, devices.
Refuses to load anything: what a pair's files say is checked in tests/unit/test_vocab.py.

Shown in test_vocab.py: sgl-project/sglang#24051 and ggml-org/llama.cpp PR#3812 (equal sizes, other
ids), test_a_permuted_vocabulary_of_the_right_size_is_refused, and in test_greedy.py what it would
cost, test_a_permuted_draft_vocabulary_costs_acceptance_only; modelscope/ms-swift#9526 (another end
of sequence), test_another_special_token_is_refused_with_both_ids.
In test_drafters.py: ggml-org/llama.cpp#17480 (a draft's id fed to the target),
test_ids_the_target_lacks_are_never_proposed, test_a_copied_id_that_the_target_lacks_ends_the_draft;
vllm-project/vllm#57941, #5342 (a draft with a shorter context),
test_the_end_of_the_drafts_context_ends_the_drafts_of_that_row_only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.errors import PairMismatchError
from distill.runtime.decode import DecodeRequest
from distill.runtime.speculative import speculative_decode
from distill.sampling import SamplingConfig
from tests.helpers import make_llama, make_tokenizer
from tests.runtime_helpers import GREEDY, decode, disturbed, engine_for, generate, tokens


def resized(model: Any, vocab_size: int) -> Any:
    """The same model with more rows of padding, which its head likes best, or with fewer rows."""
    other = make_llama(vocab_size=vocab_size, seed=0)
    common = min(vocab_size, model.config.vocab_size)
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            if mine.shape == theirs.shape:
                mine.copy_(theirs)
            else:
                mine[:common] = theirs[:common]
                mine[common:] = 5.0
    return other


@pytest.mark.parametrize("sizes", [(72, 64), (64, 72), (72, 72)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_rows_of_either_side_are_never_drawn(sizes, temperature):
    """vllm-project/vllm#10913, #5203, #7252, PR#13849, QwenLM/Qwen3#326, mlc-ai/mlc-llm#3212:
    152064 against 151936 ids were an assertion, a stop after one word, or refused as too far apart.
    Here 72 against 64 ids, of a tokenizer of 60."""
    plain = make_llama(vocab_size=64, seed=0)
    target, draft = (resized(plain, size) for size in sizes)
    tokenizer = make_tokenizer()
    short = SimpleNamespace(decode=tokenizer.decode)
    short_tokenizer = type("Short", (), {"__len__": lambda self: 60, "decode": short.decode})()
    sampling = SamplingConfig(temperature=temperature)
    prompts = [[5, 6, 7], [9] * 12]
    found = []
    for drafter in (None, CausalLMDrafter(draft)):
        engine = engine_for(target, drafter, tokenizer=short_tokenizer)
        handles = [
            engine.add(DecodeRequest(prompt, 60, sampling, n, frozenset()))
            for n, prompt in enumerate(prompts)
        ]
        while engine.has_work:
            engine.step()
        results = [engine.result(handle) for handle in handles]
        assert max(token for result in results for token in result.token_ids) < 60
        found.append(results)
    if temperature == 0:
        assert tokens(found[0]) == tokens(found[1])
    accepted = sum(result.stats.num_accepted for result in found[1])
    assert accepted > 0.5 * sum(result.stats.num_proposed for result in found[1])


def test_an_id_beyond_the_target_s_rows_is_refused_before_anything_is_computed():
    """ggml-org/llama.cpp#17480: id 49250 went into a target of 32767 ids."""
    target = make_llama(seed=0)
    engine = engine_for(target, PromptLookupDrafter())
    with pytest.raises(PairMismatchError, match=r"5 to 49250; the target has 300"):
        engine.add(DecodeRequest([5, 49250], 9, GREEDY, 0, frozenset()))


@pytest.mark.parametrize("target_length", [40, 33, 32, 31])
def test_a_draft_of_32_positions_serves_a_target_that_goes_on(target_length):
    """vllm-project/vllm#57941, #5342; huggingface/transformers raises an IndexError at 33."""
    target = make_llama(seed=0)
    draft = disturbed(make_llama(seed=0, max_positions=32), 0.02)
    (result,) = decode(target, CausalLMDrafter(draft), [[5, 6, 7]], length=target_length - 3)
    assert result.token_ids == generate(target, [5, 6, 7], target_length - 3)
    assert result.stats.num_accepted > 0


def test_one_long_row_takes_no_drafts_from_three_short_ones():
    """vllm-project/vllm#58080: one row past the draft's context had the drafts of the WHOLE batch
    replaced by token 0."""
    target = make_llama(seed=0)
    draft = disturbed(make_llama(seed=0, max_positions=64), 0.02)
    prompts = [[9, 10, 11, 12] * 20, [5, 6, 7], [33], [100, 3]]
    together = decode(target, CausalLMDrafter(draft), prompts, length=30)
    assert tokens(together) == [generate(target, prompt, 30) for prompt in prompts]
    assert together[0].stats.num_proposed == 0
    for prompt, result in zip(prompts[1:], together[1:], strict=True):
        (alone,) = decode(target, CausalLMDrafter(draft), [prompt], length=30)
        assert alone.stats == result.stats
        assert result.stats.num_accepted > 0


def test_only_the_target_s_end_of_sequence_ends_an_answer():
    """modelscope/ms-swift#9526: a base draft ends with another id than its chat target."""
    model, tokenizer = make_llama(seed=0), make_tokenizer()
    text = generate(model, [5, 6, 7], 30)
    ours, theirs = text[12], text[3]

    def loaded(stop: int) -> Any:
        return SimpleNamespace(model=model, tokenizer=tokenizer, stop_token_ids=frozenset({stop}))

    (result,) = speculative_decode(
        loaded(ours), loaded(theirs), [[5, 6, 7]], GREEDY, max_new_tokens=30
    )
    assert result.token_ids == text[: text.index(ours) + 1]
    assert theirs in result.token_ids[:-1]
    assert result.finish_reason == "stop"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_on_another_device_changes_nothing(temperature):
    """huggingface/transformers PR#31401: tensors of two devices met in the processors."""
    sampling = SamplingConfig(
        temperature=temperature, repetition_penalty=1.2, bad_words_ids=((5, 6),)
    )
    target, draft = make_llama(seed=0).cuda(), disturbed(make_llama(seed=0), 0.02)
    prompts = [[5, 6, 7], [9] * 12]
    same = decode(target, CausalLMDrafter(draft.cuda()), prompts, sampling=sampling)
    apart = decode(target, CausalLMDrafter(draft.cpu()), prompts, sampling=sampling)
    if temperature == 0:
        assert tokens(apart) == tokens(same)
    assert sum(result.stats.num_accepted for result in apart) > 0
