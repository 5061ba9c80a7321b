"""Owns faults of others at the end of an answer: end of sequence, stop strings, budgets, context.
Refuses to trust one layer: token ids, text, counts and streamed pieces are compared.

Shown in tests/exactness/test_greedy.py: huggingface/transformers#47912, PR#31301,
LostRuins/koboldcpp#1276 (an end inside a block),
test_an_end_of_sequence_at_every_index_of_a_block_ends_there; openvinotoolkit/openvino.genai PR#3293
(the draft's end finished a request), test_a_draft_that_proposes_the_end_ends_nothing.
In tests/unit/test_commit.py: sgl-project/sglang PR#23802, PR#27637 (a stop early in the accepted
run), test_a_one_token_stop_string_is_seen_anywhere_in_a_long_block; #31599, PR#33758 (the cap
before the stop), test_a_stop_before_the_budget_is_a_stop.

Cannot happen: sgl-project/sglang#39826, PR#37450 (reasoning tokens counted past the end): no such
counter is offered; what is counted is what was emitted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.runtime.decode import DecodeRequest
from distill.runtime.speculative import decode_batch, speculative_decode
from distill.sampling import SamplingConfig
from tests.helpers import make_llama, make_tokenizer
from tests.runtime_helpers import GREEDY, decode, disturbed, engine_for, generate, tokens

END = 17


def ending_at_once() -> Any:
    """A target whose most likely token is the end of sequence, everywhere."""
    model = make_llama(seed=0)
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(300), requires_grad=False)
    head.bias[END] = 100.0
    return model


@pytest.mark.parametrize("minimum", [1, 2, 3, 5, 6, 7, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_end_is_likeliest_everywhere_it_comes_right_after_min_tokens(
    minimum, temperature
):
    """vllm-project/vllm PR#32642, PR#26317, PR#41768: the mask of the end was off by one row, and
    a minimum that is no multiple of K was passed over."""
    target = ending_at_once()
    sampling = SamplingConfig(temperature=temperature, min_tokens=minimum)
    drafts = (None, CausalLMDrafter(target), CausalLMDrafter(make_llama(seed=1)))
    for drafter in (*drafts, PromptLookupDrafter()):
        (result,) = decode(
            target, drafter, [[5, 6]], sampling=sampling, stop_token_ids=frozenset({END})
        )
        assert result.token_ids.index(END) == minimum == len(result.token_ids) - 1
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("k", [3, 4, 7])
def test_what_is_delivered_is_what_is_counted(k):
    """ikawrakow/ik_llama.cpp PR#2358: blocks were charged before they were cut, so the usage said
    8 where fewer tokens had come."""
    target, tokenizer = make_llama(seed=0), make_tokenizer()
    loaded = SimpleNamespace(model=target, tokenizer=tokenizer, stop_token_ids=frozenset())
    stream = speculative_decode(
        loaded, loaded, [[5, 6, 7], [9]], GREEDY, num_draft_tokens=k, max_new_tokens=8, stream=True
    )
    delivered = [0, 0]
    for piece in stream:
        delivered[piece.index] += len(piece.token_ids)
        if piece.result is not None:
            assert piece.result.stats.num_emitted == delivered[piece.index] == 8
            assert len(piece.result.token_ids) == 8
    assert stream.stats.num_emitted == 16
    assert stream.stats.num_accepted + stream.stats.num_target_calls >= 16


def test_a_stop_string_that_completes_in_any_block_leaves_ids_text_and_kept_states_alike():
    """vllm-project/vllm PR#47616: text ended at the stop, ids and log-probabilities behind it."""
    target, tokenizer = make_llama(seed=0), make_tokenizer()
    full = decode(target, None, [[5, 6]], length=30)[0].token_ids
    for end in range(3, 12):
        stop = tokenizer.decode(full[end - 2 : end], skip_special_tokens=True)
        if not stop or "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        found = []
        for drafter in (None, CausalLMDrafter(target)):
            engine = engine_for(target, drafter, k=6, tokenizer=tokenizer, keep_hidden=True)
            request = DecodeRequest([5, 6], 30, GREEDY, 0, frozenset(), stop_strings=(stop,))
            (result,) = decode_batch(engine, [request])
            assert result.hidden_TD is not None
            assert result.logsumexp_T is not None
            sizes = {len(result.hidden_TD), len(result.logsumexp_T), len(result.token_ids)}
            assert sizes == {result.stats.num_emitted}
            found.append((result.token_ids, result.text, result.finish_reason))
        assert found[0] == found[1]


@pytest.mark.parametrize("room", [1, 3, 4, 5])
def test_target_and_draft_share_a_context_to_its_last_position(room):
    """predibase/lorax#474, turboderp-org/exllamav2#274: the draft looked ahead past the end."""
    target = make_llama(seed=0, max_positions=32)
    draft = disturbed(make_llama(seed=0, max_positions=32), 0.02)
    prompts = [list(range(3, 3 + 32 - room)), [7, 8]]
    expected = [generate(target, prompts[0], room), generate(target, prompts[1], 30)]
    results = decode(target, CausalLMDrafter(draft), prompts, k=4, length=99)
    assert tokens(results) == expected
    assert [result.finish_reason for result in results] == ["length", "length"]
