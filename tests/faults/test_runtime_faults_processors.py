"""Owns faults of others with penalties, processors, seeds, grammar: dropped, late, counted twice.
Refuses silence: a setting is honoured exactly or refused by name.

Shown in tests/exactness/test_greedy.py: vllm-project/vllm PR#33251 and sgl-project/sglang PR#33643
(penalties counted twice, or once per block),
test_penalties_see_the_drafted_tokens_before_each_position; and by law in test_enumeration.py,
test_a_round_has_the_law_of_edits_on_prefix_and_drafted_tokens.
In test_sampled.py: vllm-project/vllm#6038, NVIDIA/TensorRT-LLM PR#17599 (seeds ignored),
vllm-project/vllm#9441, #11123 (different seeds in a batch),
test_a_seed_gives_the_same_text_alone_and_in_any_batch; a missing seed:
tests/unit/test_server.py, test_a_request_without_a_seed_gets_a_fresh_one_and_is_told.
In test_processors.py: vllm-project/vllm#44006, PR#44297 (a grammar asked about a draft it forbids),
test_a_grammar_is_never_asked_about_a_text_it_forbids.
In test_server.py: NVIDIA/TensorRT-LLM PR#17701 (parameters ignored),
test_unsupported_parameters_are_a_400_that_names_them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.errors import LogitsProcessorError
from distill.runtime.decode import DecodeRequest
from distill.sampling import SamplingConfig
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

PROMPTS = [[5, 6, 7], [9] * 12, [33], [8, 9] * 10]


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=0)


@pytest.fixture(scope="module")
def draft() -> Any:
    return disturbed(make_llama(seed=0), 0.02)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", ["token", "word", "allowed"])
def test_what_is_banned_never_appears_and_what_is_not_allowed_neither(
    target, draft, temperature, how
):
    """vllm-project/vllm PR#19482 (#18902): bans and allow-lists were dropped with speculation."""
    favourites = {token for text in tokens(decode(target, None, PROMPTS)) for token in text}
    banned = sorted(favourites)[::2]
    settings: dict[str, Any] = {"temperature": temperature}
    processors: tuple[Any, ...] = ()
    if how == "token":
        settings["bad_token_ids"] = tuple(banned)
    elif how == "word":
        settings["bad_words_ids"] = tuple((token,) for token in banned)
    else:

        def allow(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.index_fill(1, torch.tensor(banned), -torch.inf)

        processors = (allow,)
    for drafter in (None, CausalLMDrafter(draft), CausalLMDrafter(target), PromptLookupDrafter()):
        results = decode(
            target,
            drafter,
            PROMPTS,
            sampling=SamplingConfig(**settings),
            logits_processors=processors,
        )
        assert not set(banned) & {token for result in results for token in result.token_ids}


@pytest.mark.parametrize("penalty", [1.2, 1.6])
def test_a_looping_prompt_is_led_out_of_its_loop_with_any_draft(target, penalty):
    """sgl-project/sglang#28180: the penalty was accepted and ignored, and the loop had no end."""
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=penalty)
    prompts = PROMPTS[1::2]
    expected = [generate(target, p, 60, repetition_penalty=penalty) for p in prompts]
    for drafter in (PromptLookupDrafter(), CausalLMDrafter(target)):
        got = decode(target, drafter, prompts, sampling=sampling, length=60)
        assert tokens(got) == expected
    assert all(len(set(text)) > 20 for text in expected)


def test_rejected_drafts_leave_no_ghosts_in_penalties_and_bans(target):
    """ggml-org/llama.cpp, test_spec_checkpoint_sampler.py: the cache was rolled back, the ring of
    penalised tokens and the grammar were not."""
    sampling = SamplingConfig(
        temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, bad_words_ids=((7, 8), (5,))
    )
    expected = decode(target, None, PROMPTS, sampling=sampling)
    # Wrong in every second place, with tokens that the answers do hold: as ghosts they would count.
    scripts = {
        tuple(prompt): [
            token if n % 2 else result.token_ids[(n + 7) % 40]
            for n, token in enumerate(result.token_ids)
        ]
        for prompt, result in zip(PROMPTS, expected, strict=True)
    }
    got = decode(target, ScriptedDrafter(scripts), PROMPTS, sampling=sampling)
    assert tokens(got) == tokens(expected)
    assert sum(r.stats.num_tested - r.stats.num_accepted for r in got) > 20


def test_a_processor_that_needs_its_own_calls_in_order_is_refused_not_fed_rejected_drafts(target):
    """ggml-org/llama.cpp, the same: what advances with each call cannot be rolled back."""

    class Grammar:
        def __init__(self) -> None:
            self.state = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.state += 1
            return scores.index_fill(1, torch.tensor([self.state % 300]), -torch.inf)

    with pytest.raises(LogitsProcessorError, match="Grammar remembers"):
        decode(target, None, PROMPTS, logits_processors=(Grammar(),))


@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_a_round_that_is_thrown_away_uses_up_no_random_numbers(target, draft, num_rounds):
    """microsoft/onnxruntime-genai PR#2314: numbers drawn for tokens that were discarded later had
    moved the generator on."""
    request = DecodeRequest([5, 6], 40, SamplingConfig(temperature=0.9), 7, frozenset())

    def answer(*, fails_after: int | None) -> list[int]:
        engine = engine_for(target, CausalLMDrafter(draft), k=3, batch=1)
        handle = engine.add(request)
        rounds = 0
        while engine.has_work:
            if rounds == fails_after:
                hook = target.lm_head.register_forward_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):  # after the drafts were drawn
                    engine.step()
                hook.remove()
                fails_after = None
            engine.step()
            rounds += 1
        result: list[int] = engine.result(handle).token_ids
        return result

    assert answer(fails_after=num_rounds) == answer(fails_after=None)


def test_what_predicted_each_token_is_kept_for_every_token_of_a_block(target):
    """ggml-org/llama.cpp#27972: log-probability 0 for every token of a speculative answer. None
    are offered to clients; what the engine keeps for training has to be right in every block."""
    engine = engine_for(target, CausalLMDrafter(target), k=4, keep_hidden=True)
    handle = engine.add(DecodeRequest([5, 6], 13, GREEDY, 0, frozenset()))
    while engine.has_work:
        engine.step()
    result = engine.result(handle)
    with torch.no_grad():
        logits_TV = target(torch.tensor([[5, 6, *result.token_ids]])).logits[0, 1:-1]
    expected_T = logits_TV.log_softmax(-1)[range(13), result.token_ids]
    chosen_T = target.lm_head(result.hidden_TD)[range(13), result.token_ids] - result.logsumexp_T
    torch.testing.assert_close(chosen_T, expected_T, atol=1e-4, rtol=1e-4)
    assert (chosen_T < 0).all()


@pytest.mark.parametrize("k", [1, 3, 4, 6])
def test_rules_that_begin_with_a_token_hold_for_the_rest_of_its_own_block(target, draft, k):
    """vllm-project/vllm PR#34241 (#31858): a grammar was off for the tokens that followed the end
    of the reasoning inside the same block."""
    plain = tokens(decode(target, None, PROMPTS))
    marker = plain[0][4]

    def odd_after_marker(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if marker not in input_ids[0].tolist():
            return scores
        masked = torch.full_like(scores, -torch.inf)
        masked[:, 1::2] = scores[:, 1::2]
        return masked

    settings: dict[str, Any] = {"logits_processors": (odd_after_marker,)}
    expected = tokens(decode(target, None, PROMPTS, **settings))
    for drafter in (CausalLMDrafter(draft), CausalLMDrafter(target), PromptLookupDrafter()):
        assert tokens(decode(target, drafter, PROMPTS, k=k, **settings)) == expected
    after = expected[0][expected[0].index(marker) + 1 :]
    assert len(after) > 20
    assert all(token % 2 for token in after)
