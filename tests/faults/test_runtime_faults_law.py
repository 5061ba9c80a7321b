"""Owns faults of others in the acceptance rule: laws that are nearly the target's, silently.
Refuses to sample where it can enumerate.

Shown in tests/unit/test_verify.py: ohdearquant/lattice#243 (the first draft committed unverified),
test_an_always_wrong_single_draft_leaves_plain_decoding (and test_lossless.py catches such a rule);
jaymody/speculative-sampling#3, #9 (p / q beside an argmax draft at temperature 0),
test_at_temperature_zero_the_sampled_rule_gives_the_greedy_answer; duoan/TorchCode#16 (a residual of
sum zero), test_equal_distributions_up_to_rounding_fall_back_to_the_target; the note on uniforms in
vllm-project/vllm's rejection_sampler.py (a uniform of exactly 0),
test_a_draft_of_target_probability_zero_is_rejected_whatever_the_random_number, and
test_random_numbers_lie_in_the_open_interval in test_sampling.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.early_exit import EarlyExitDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.logit_edits import edit_logits
from distill.runtime import decode as loop
from distill.runtime.decode import DecodeRequest
from distill.sampling import SamplingConfig, logits_to_probs
from tests.helpers import make_llama
from tests.law_helpers import (
    argmax_law,
    emitted_law,
    joint_law,
    law_of,
    random_law,
    random_logits,
)
from tests.runtime_helpers import ScriptedDrafter, decode, engine_for

PROMPTS = [[5, 6, 7], [9] * 12, [33]]


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=0)


def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[list[int]], Any, Any]]:
    """What every round was judged on: drafts, q, and the answer."""
    seen: list[Any] = []
    original = loop.judge

    def judge(rows: Any, drafts: Any, logits_NV: Any, probs_BKV: Any) -> Any:
        kept = None if probs_BKV is None else probs_BKV.clone()
        found = original(rows, drafts, logits_NV, probs_BKV)
        seen.append((drafts, kept, found))
        return found

    monkeypatch.setattr(loop, "judge", judge)
    return seen


def test_a_claim_of_the_raw_distribution_for_drafts_of_the_processed_one_would_be_caught():
    """huggingface/transformers#47932, PR#48007: q was of the raw logits, while the draft drew with
    its top_k of 50. V = 8, top_k = 3."""
    sampling = SamplingConfig(top_k=3)
    logits = random_logits(8, 2, seed=1)
    raw, drawn_from = law_of(logits, SamplingConfig()), law_of(logits, sampling)
    target = law_of(random_logits(8, 2, seed=2), sampling)
    expected = joint_law(target, 8, 2)
    law, _ = emitted_law(target, drawn_from, 8, 1)
    torch.testing.assert_close(law, expected, atol=1e-12, rtol=0)
    wrong, _ = emitted_law(target, drawn_from, 8, 1, claimed=raw)
    assert 0.5 * (wrong - expected).abs().sum() > 0.02  # in total variation


def test_a_greedy_draft_that_claims_its_softmax_would_be_caught():
    """huggingface/transformers PR#33534, which reverts #30778: p / q is only valid for the q that
    the draft was drawn from; an argmax has the one-hot q."""
    target, soft = random_law(4, 3, seed=3), random_law(4, 3, seed=4)
    expected = joint_law(target, 4, 3)
    law, _ = emitted_law(target, argmax_law(soft), 4, 2, deterministic=True)
    torch.testing.assert_close(law, expected, atol=1e-12, rtol=0)
    wrong, _ = emitted_law(target, argmax_law(soft), 4, 2, claimed=soft)
    assert 0.5 * (wrong - expected).abs().sum() > 0.02


@pytest.mark.parametrize("kind", ["causal_lm", "subset", "early_exit"])
def test_the_probabilities_that_were_drawn_from_reach_the_rule(monkeypatch, target, kind):
    """vllm-project/vllm#40149: sampled drafts were judged without their probabilities."""
    sampling = SamplingConfig(temperature=0.8, top_k=20, repetition_penalty=1.2)
    draft = target if kind == "early_exit" else make_llama(seed=1)
    ids = range(0, 300, 3) if kind == "subset" else None
    drafter = (
        EarlyExitDrafter(num_layers=2)
        if kind == "early_exit"
        else CausalLMDrafter(draft, vocabulary_token_ids=ids)
    )
    seen = judged(monkeypatch)
    engine = engine_for(target, drafter, k=2)
    engine.add(DecodeRequest([5, 6, 7], 9, sampling, 3, frozenset()))
    engine.step()
    (((draft_ids,), probs_BKV, _),) = seen
    assert len(draft_ids) == 2
    text = [5, 6, 7]
    for step, token in enumerate(draft_ids):
        with torch.no_grad():
            logits_V = draft(torch.tensor([text])).logits[0, -1]
        if ids is not None:
            kept = torch.full_like(logits_V, -torch.inf)
            kept[list(ids)] = logits_V[list(ids)]
            logits_V = kept
        edited = edit_logits(
            logits_V, sampling, prompt_token_ids=[5, 6, 7], output_token_ids=text[3:]
        )
        expected = logits_to_probs(edited, sampling)
        torch.testing.assert_close(probs_BKV[0, step], expected, atol=1e-5, rtol=1e-4)
        assert probs_BKV[0, step, token] > 0
        text.append(token)


def test_a_drafter_that_does_not_draw_claims_nothing(monkeypatch, target):
    """huggingface/transformers PR#33534: no q stands for the one-hot of what was copied."""
    seen = judged(monkeypatch)
    decode(target, PromptLookupDrafter(), [[8, 9] * 6], sampling=SamplingConfig(), length=12)
    assert any(drafts[0] for drafts, _, _ in seen)
    assert all(probs is None for _, probs, _ in seen)


def test_draft_and_target_are_asked_about_the_same_texts_by_the_same_processors(target):
    """huggingface/transformers PR#40976: a clean-up changed which processors the draft had."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    def named(name: str) -> Any:
        def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            calls.append((name, tuple(input_ids[0].tolist())))
            return scores

        return processor

    engine = engine_for(target, CausalLMDrafter(make_llama(seed=1)), k=3)
    processors = (named("first"), named("second"))
    engine.add(
        DecodeRequest([5, 6, 7], 9, SamplingConfig(), 3, frozenset(), logits_processors=processors)
    )
    calls.clear()  # the probes of ``add``
    engine.step()
    texts = [text for name, text in calls if name == "first"]
    assert [text for name, text in calls if name == "second"] == texts
    assert [len(text) for text in texts] == [3, 4, 5, 3, 4, 5, 6]  # draft, then target
    assert texts[:3] == texts[3:6]


def test_the_token_chosen_after_a_rejection_is_kept(monkeypatch, target):
    """openvinotoolkit/openvino.genai PR#4490 (#4190): it was dropped and drawn again, from p."""
    seen = judged(monkeypatch)
    stranger = make_llama(seed=77)
    with torch.no_grad():
        stranger.lm_head.weight.copy_(-target.lm_head.weight)
    (result,) = decode(
        target, CausalLMDrafter(stranger), [[5, 6]], sampling=SamplingConfig(top_k=5), length=30
    )
    emitted: list[int] = []
    for drafts, _, found in seen:
        accepted = int(found.num_accepted_B[0])
        emitted += [*drafts[0][:accepted], int(found.next_token_B[0])]
    assert result.token_ids == emitted[:30]
    assert result.stats.accepted_length_histogram[0] > 20  # rejected at once, round after round


def test_drafts_of_probability_zero_leave_what_the_seed_gives_without_a_draft(target):
    """huggingface/transformers' p / q >= u accepts them at u = 0. Here they are rejected, and what
    replaces them is drawn from p with the random number that plain decoding uses."""

    def even_only(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, ::2] = scores[:, ::2]
        return masked

    settings: dict[str, Any] = {
        "sampling": SamplingConfig(),
        "logits_processors": (even_only,),
        "length": 40,
    }
    plain = decode(target, None, PROMPTS, **settings)
    odd = ScriptedDrafter({tuple(prompt): [2 * n + 1 for n in range(40)] for prompt in PROMPTS})
    got = decode(target, odd, PROMPTS, **settings)
    assert [r.token_ids for r in got] == [r.token_ids for r in plain]
    assert all(r.stats.num_tested >= 39 and r.stats.num_accepted == 0 for r in got)
