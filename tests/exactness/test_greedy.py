"""Owns the proof at temperature 0: equal token ids, against a draft that DISAGREES, at length.
Refuses to promise bits in bfloat16, where a forward of K + 1 tokens may round a tie differently
from one of a single token; there the promise is that nothing but ties is ever decided differently.

The oracle is transformers' own ``generate`` on the same weights, one prompt at a time. Faults of
others that cannot happen here: quantised kernels that switch with the number of rows (no quantised
targets yet), grammar and log-probability state (not offered), prefix caches shared between
requests (there are none), ring buffers (a window is a mask here), reasoning-token counters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig
from tests.helpers import make_llama

GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 6, 7], [9, 10, 11, 12] * 6, [33], [100, 3, 100, 4]]
LENGTH = 260  # divergence was once seen only after 200 tokens
SHORT = 80


def disturbed(model: Any, scale: float, seed: int = 0) -> Any:
    """A draft that often agrees with ``model`` and often does not."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=0)


@pytest.fixture(scope="module")
def draft() -> Any:
    return disturbed(make_llama(seed=0), 0.02)


@pytest.fixture(scope="module")
def plain(target: Any) -> list[list[int]]:
    return [generate(target, prompt, LENGTH) for prompt in PROMPTS]


@torch.no_grad()
def generate(model: Any, prompt: list[int], length: int, **settings: Any) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=length,
        do_sample=False,
        **({"eos_token_id": None, "pad_token_id": 0} | settings),
    )
    return output[0, len(prompt) :].tolist()


def decode(
    target: Any,
    drafter: Any,
    prompts: list[list[int]],
    *,
    k: int,
    batch: int = 8,
    length: int = SHORT,
    max_length: int = 512,
    stops: frozenset[int] = frozenset(),
    sampling: SamplingConfig = GREEDY,
) -> list[DecodeResult]:
    engine = DecodeEngine(
        target, drafter, num_draft_tokens=k, max_batch_size=batch, max_length=max_length
    )
    requests = [
        DecodeRequest(prompt, length, sampling, seed=n, stop_token_ids=stops)
        for n, prompt in enumerate(prompts)
    ]
    return decode_batch(engine, requests)


def tokens(results: list[DecodeResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def shortened(outputs: list[list[int]]) -> list[list[int]]:
    return [output[:SHORT] for output in outputs]


def test_plain_decoding_equals_generate(target, plain):
    results = decode(target, None, PROMPTS, k=0, length=LENGTH)
    assert tokens(results) == plain
    assert all(result.stats.block_efficiency == 1.0 for result in results)


@pytest.mark.parametrize(("k", "batch"), [(4, 4), (7, 3)])
def test_a_draft_that_disagrees_changes_nothing(target, draft, plain, k, batch):
    results = decode(target, CausalLMDrafter(draft), PROMPTS, k=k, batch=batch, length=LENGTH)
    assert tokens(results) == plain
    merged = results[0].stats + results[1].stats + results[2].stats + results[3].stats
    assert 0.2 < merged.acceptance_rate < 0.9  # it does disagree, and it does agree
    assert merged.num_emitted == LENGTH * len(PROMPTS)


def test_a_draft_that_disagrees_changes_nothing_for_a_row_alone(target, draft, plain):
    results = decode(target, CausalLMDrafter(draft), PROMPTS[:1], k=4, batch=1, length=LENGTH)
    assert tokens(results) == plain[:1]


def test_a_draft_that_knows_nothing_changes_nothing_and_accepts_almost_nothing(target, plain):
    """faults: 'always 100% acceptance' is a broken counter."""
    stranger = make_llama(seed=77)
    results = decode(target, CausalLMDrafter(stranger), PROMPTS, k=3)
    assert tokens(results) == shortened(plain)
    assert max(result.stats.acceptance_rate for result in results) < 0.2


def test_the_target_as_its_own_draft_is_always_accepted(target, plain):
    results = decode(target, CausalLMDrafter(target), PROMPTS, k=4)
    assert tokens(results) == shortened(plain)
    for result in results:
        assert result.stats.acceptance_rate == 1.0
        assert result.stats.num_target_calls == SHORT / 5


def test_prompt_lookup_changes_nothing(target, plain):
    results = decode(target, PromptLookupDrafter(), PROMPTS, k=4, length=LENGTH)
    assert tokens(results) == plain
    assert sum(result.stats.num_accepted for result in results) > 0


def test_repeated_token_prompts_change_nothing(target):
    """faults: an n-gram drafter changed greedy text on repeated tokens."""
    prompts = [[8] * 30, [8, 9] * 20]
    expected = [generate(target, prompt, 80) for prompt in prompts]
    assert tokens(decode(target, PromptLookupDrafter(), prompts, k=5, length=80)) == expected


def test_more_requests_than_places_come_back_in_input_order(target, draft, plain):
    prompts = [PROMPTS[n % 4][: 1 + n] or [1] for n in range(11)]
    expected = [generate(target, prompt, 30) for prompt in prompts]
    for batch in (2, 3):
        results = decode(target, CausalLMDrafter(draft), prompts, k=3, batch=batch, length=30)
        assert tokens(results) == expected


@pytest.mark.parametrize("offset", range(6))
def test_an_end_of_sequence_at_every_index_of_a_block_ends_there(target, draft, plain, offset):
    """faults: EOS accepted inside a block, and generation went on."""
    for prompt, output in zip(PROMPTS, plain, strict=True):
        stop = output[12 + offset]
        expected = output[: output.index(stop) + 1]
        assert generate(target, prompt, 60, eos_token_id=stop) == expected
        for drafter in (None, CausalLMDrafter(draft), CausalLMDrafter(target)):
            k = 0 if drafter is None else 5
            result = decode(target, drafter, [prompt], k=k, length=60, stops=frozenset({stop}))[0]
            assert result.token_ids == expected
            assert result.finish_reason == "stop"
            assert result.stats.num_emitted == len(expected)


def test_a_draft_that_proposes_the_end_ends_nothing(target, plain):
    """faults: the DRAFT's end of sequence finished the request."""
    stop = next(token for token in range(300) if all(token not in output for output in plain))
    biased = make_llama(seed=0)
    head = biased.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(300), requires_grad=False)
    head.bias[stop] = 100.0
    results = decode(target, CausalLMDrafter(biased), PROMPTS, k=4, stops=frozenset({stop}))
    assert tokens(results) == shortened(plain)
    assert all(result.stats.num_accepted == 0 for result in results)


@pytest.mark.parametrize("minimum", [3, 7])
def test_min_tokens_holds_the_end_back_inside_blocks(target, draft, plain, minimum):
    """faults: min_tokens not a multiple of K, while the end is the argmax."""
    prompt, stops = PROMPTS[0], frozenset(plain[0][:2])
    sampling = SamplingConfig(temperature=0.0, min_tokens=minimum)
    expected = decode(target, None, [prompt], k=0, length=40, stops=stops, sampling=sampling)
    got = decode(
        target, CausalLMDrafter(draft), [prompt], k=4, length=40, stops=stops, sampling=sampling
    )
    assert tokens(got) == tokens(expected)
    assert not stops & set(got[0].token_ids[:minimum])
    assert (
        generate(target, prompt, 40, eos_token_id=sorted(stops), min_new_tokens=minimum)
        == tokens(got)[0]
    )


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_a_budget_smaller_than_a_block_is_respected_and_counted(target, draft, plain, length):
    """faults: fewer tokens delivered than charged for."""
    results = decode(target, CausalLMDrafter(draft), PROMPTS, k=4, length=length)
    assert tokens(results) == [output[:length] for output in plain]
    assert all(result.finish_reason == "length" for result in results)
    assert all(result.stats.num_emitted == length for result in results)


@pytest.mark.parametrize("room", [1, 2, 4, 5, 6])
def test_generation_fills_the_context_to_its_last_token(room):
    """faults: prompt length = context - K + 1 overflowed."""
    target = make_llama(seed=0, max_positions=40)
    draft = disturbed(make_llama(seed=0, max_positions=40), 0.02)
    prompt = list(range(3, 3 + 40 - room))
    expected = generate(target, prompt, room)
    for drafter in (CausalLMDrafter(draft), PromptLookupDrafter()):
        result = decode(target, drafter, [prompt], k=4, length=100)[0]
        assert result.token_ids == expected
        assert result.finish_reason == "length"


def test_a_draft_with_a_shorter_context_falls_back_to_the_target_row_by_row(target, plain):
    """faults: one long row switched drafting off for the whole batch, or crashed."""
    short = disturbed(make_llama(seed=0, max_positions=48), 0.02)
    results = decode(target, CausalLMDrafter(short), [PROMPTS[0], PROMPTS[1] * 3], k=4)
    assert results[0].token_ids == plain[0][:SHORT]
    assert results[1].token_ids == generate(target, PROMPTS[1] * 3, SHORT)
    assert results[0].stats.num_accepted > 0
    assert results[1].stats.num_proposed == 0
    assert results[0].stats.num_rounds < results[0].stats.num_target_calls  # plain at the end


@pytest.mark.parametrize("draft_vocabulary", [290, 300, 310])
def test_a_draft_with_a_padded_or_shorter_vocabulary_changes_nothing(
    target, plain, draft_vocabulary
):
    """faults: 152064 against 151936 ids; ids the target lacks must never be proposed."""
    draft = make_llama(vocab_size=draft_vocabulary, seed=0)
    with torch.no_grad():  # the common rows are the target's, so that it does get accepted
        common = min(draft_vocabulary, 300)
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            if mine.shape == theirs.shape:
                mine.copy_(theirs)
            else:
                mine[:common] = theirs[:common]
                mine[common:] = 5.0
    results = decode(target, CausalLMDrafter(draft), PROMPTS[:1] + PROMPTS[2:], k=3)
    assert tokens(results) == [output[:SHORT] for output in (plain[0], plain[2], plain[3])]
    assert sum(result.stats.num_accepted for result in results) > 0


def test_a_permuted_draft_vocabulary_costs_acceptance_only(target, plain):
    permuted = make_llama(seed=0)
    with torch.no_grad():
        head = permuted.get_output_embeddings().weight
        head.copy_(head.roll(1, dims=0).clone())
    results = decode(target, CausalLMDrafter(permuted), PROMPTS, k=3)
    assert tokens(results) == shortened(plain)
    assert all(result.stats.acceptance_rate < 0.1 for result in results)


def test_a_draft_restricted_to_some_ids_changes_nothing(target, plain):
    ids = sorted({token for output in plain for token in output[::2]})
    results = decode(target, CausalLMDrafter(target, vocabulary_token_ids=ids), PROMPTS, k=3)
    assert tokens(results) == shortened(plain)
    assert sum(result.stats.num_accepted for result in results) > 0


PENALTIES = [
    SamplingConfig(temperature=0.0, repetition_penalty=1.3),
    SamplingConfig(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4),
    SamplingConfig(temperature=0.0, logit_bias={7: 4.0, 9: -3.0}, bad_token_ids=(100, 3)),
]


@pytest.mark.parametrize("sampling", PENALTIES)
def test_penalties_see_the_drafted_tokens_before_each_position(target, draft, sampling):
    """faults: penalties ignored, counted twice, or updated once per block."""
    expected = decode(target, None, PROMPTS, k=0, sampling=sampling)
    for drafter in (CausalLMDrafter(draft), CausalLMDrafter(target), PromptLookupDrafter()):
        got = decode(target, drafter, PROMPTS, k=4, sampling=sampling)
        assert tokens(got) == tokens(expected)
    own = decode(target, CausalLMDrafter(target), PROMPTS, k=4, sampling=sampling)
    assert all(result.stats.acceptance_rate == 1.0 for result in own)


def test_repetition_penalty_equals_generate(target, draft):
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=1.3)
    expected = [generate(target, prompt, SHORT, repetition_penalty=1.3) for prompt in PROMPTS]
    got = decode(target, CausalLMDrafter(draft), PROMPTS, k=4, sampling=sampling)
    assert tokens(got) == expected


def test_a_banned_argmax_never_appears(target, draft, plain):
    banned = plain[0][0]
    sampling = SamplingConfig(temperature=0.0, bad_token_ids=(banned,))
    results = decode(target, CausalLMDrafter(draft), PROMPTS, k=4, sampling=sampling)
    assert all(banned not in result.token_ids for result in results)


def test_num_draft_tokens_may_change_from_request_to_request(target, draft, plain):
    engine = DecodeEngine(
        target, CausalLMDrafter(draft), num_draft_tokens=4, max_batch_size=4, max_length=512
    )
    requests = [
        DecodeRequest(prompt, SHORT, GREEDY, seed=0, stop_token_ids=frozenset(), num_draft_tokens=k)
        for prompt, k in zip(PROMPTS, (0, 2, None, 6), strict=True)
    ]
    results = decode_batch(engine, requests)
    assert tokens(results) == shortened(plain)
    assert results[0].stats.num_proposed == 0
    assert [len(r.stats.proposed_by_position) for r in results] == [0, 2, 4, 6]


def test_concurrent_rows_accept_as_much_as_each_row_alone(target, draft):
    """faults: drafts got worse as more sequences were drafted for at once."""
    prompts = [[3 + n] * (1 + n % 5) + [200 - n] for n in range(16)]
    together = decode(target, CausalLMDrafter(draft), prompts, k=3, batch=16, length=40)
    for n in (0, 7, 15):
        alone = decode(target, CausalLMDrafter(draft), prompts[n : n + 1], k=3, length=40)[0]
        assert together[n].token_ids == alone.token_ids
        assert together[n].stats == alone.stats


def test_in_bfloat16_only_ties_are_decided_differently():
    """faults: greedy divergence in half precision; every first one must be within rounding."""
    target = make_llama(seed=0, dtype=torch.bfloat16, initializer_range=0.06)
    draft = disturbed(make_llama(seed=0, dtype=torch.bfloat16, initializer_range=0.06), 0.005)
    prompts = [[5 + n, 6, 7 + n] for n in range(6)]
    plain = tokens(decode(target, None, prompts, k=0, batch=1))
    fast = decode(target, CausalLMDrafter(draft), prompts, k=4)
    assert sum(result.stats.num_accepted for result in fast) > 0
    for prompt, expected, got in zip(prompts, plain, tokens(fast), strict=True):
        differing = [n for n in range(SHORT) if expected[n] != got[n]]
        if differing:
            with torch.no_grad():
                prefix = torch.tensor([prompt + expected[: differing[0]]])
                logits = target(prefix).logits[0, -1].float()
            gap = logits.max() - logits[[expected[differing[0]], got[differing[0]]]].min()
            assert gap <= 4 * 2**-8 * logits.abs().max()  # a few units in the last place


def test_a_sliding_window_smaller_than_the_text_changes_nothing():
    """faults: ring buffers that could not be rolled back after they wrapped."""
    from transformers import MistralConfig, MistralForCausalLM

    def mistral(seed: int) -> Any:
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

    target, draft = mistral(0), disturbed(mistral(0), 0.02)
    prompts = [[5, 6, 7], list(range(20, 60))]
    expected = [generate(target, prompt, 120) for prompt in prompts]
    for k in (0, 4):
        drafter = CausalLMDrafter(draft) if k else None
        results = decode(target, drafter, prompts, k=k, length=120)
        assert tokens(results) == expected
    assert 0.1 < results[0].stats.acceptance_rate < 1.0
