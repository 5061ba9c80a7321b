"""Owns the proof that every edit of the logits is honoured: same greedy text as transformers' own
``generate`` with the same processors, whatever drafts. Refuses to look inside: texts are compared.

In float32, against drafts that disagree, agree, copy, or know a third of the vocabulary only.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.early_exit import EarlyExitDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.errors import LogitsProcessorError, SamplingError
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig
from tests.helpers import make_llama
from tests.runtime_helpers import ScriptedDrafter

GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 6, 7], [9, 10, 11, 12] * 3, [33, 4], [100, 3, 100, 4]]
LENGTH = 48


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=0)


@pytest.fixture(scope="module")
def draft() -> Any:
    model, generator = make_llama(seed=0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def drafters(target: Any, draft: Any) -> dict[str, Any]:
    return {
        "plain": None,
        "disagreeing": CausalLMDrafter(draft),
        "itself": CausalLMDrafter(target),
        "subset": CausalLMDrafter(draft, vocabulary_token_ids=range(0, 300, 3)),
        "early exit": EarlyExitDrafter(num_layers=1),
        "lookup": PromptLookupDrafter(),
    }


def decode(
    target: Any,
    drafter: Any,
    *,
    sampling: SamplingConfig = GREEDY,
    processors: tuple[Any, ...] = (),
    stops: frozenset[int] = frozenset(),
    prompts: list[list[int]] = PROMPTS,
) -> list[DecodeResult]:
    engine = DecodeEngine(
        target,
        drafter,
        num_draft_tokens=0 if drafter is None else 4,
        max_batch_size=4,
        max_length=256,
    )
    requests = [
        DecodeRequest(prompt, LENGTH, sampling, 0, stops, logits_processors=processors)
        for prompt in prompts
    ]
    return decode_batch(engine, requests)


@torch.no_grad()
def generate(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=LENGTH,
        do_sample=False,
        **({"eos_token_id": None, "pad_token_id": 0} | settings),
    )
    return output[0, len(prompt) :].tolist()


def plain_texts(target: Any) -> list[list[int]]:
    return [generate(target, prompt) for prompt in PROMPTS]


def processors(target: Any) -> dict[str, Any]:
    """Processors of transformers that bite on these prompts."""
    texts = plain_texts(target)
    words = [[texts[0][0]], texts[1][:2], texts[2][2:5], [texts[3][0], texts[3][1]]]
    return {
        "repetition": theirs.RepetitionPenaltyLogitsProcessor(1.3),
        "bad words": theirs.NoBadWordsLogitsProcessor(words, eos_token_id=299),
        "n-grams": theirs.NoRepeatNGramLogitsProcessor(2),
        "bias": theirs.SequenceBiasLogitsProcessor([[[texts[0][1]], -3.0], [texts[1][:2], -9.0]]),
        "suppressed": theirs.SuppressTokensLogitsProcessor(texts[0][:3], device="cpu"),
        "watermark": theirs.WatermarkLogitsProcessor(300, "cpu", bias=4.0),
        "normalised": theirs.LogitNormalization(),
    }


NAMES = ["repetition", "bad words", "n-grams", "bias", "suppressed", "watermark", "normalised"]


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_of_transformers_gives_the_text_of_generate_with_any_draft(target, draft, name):
    processor = processors(target)[name]
    expected = [
        generate(target, prompt, logits_processor=theirs.LogitsProcessorList([processor]))
        for prompt in PROMPTS
    ]
    assert (expected == plain_texts(target)) is (name == "normalised")  # it does change something
    for kind, drafter in drafters(target, draft).items():
        got = decode(target, drafter, processors=(processor,))
        assert [result.token_ids for result in got] == expected, kind
        if kind == "itself":
            assert all(result.stats.acceptance_rate == 1.0 for result in got)


def test_processors_run_after_the_settings_and_in_their_order(target, draft):
    """transformers appends given processors to those of its own settings, as we do."""
    chain = [theirs.NoRepeatNGramLogitsProcessor(3), theirs.WatermarkLogitsProcessor(300, "cpu")]
    expected = [
        generate(
            target,
            prompt,
            repetition_penalty=1.2,
            bad_words_ids=[[5, 6], [9]],
            logits_processor=theirs.LogitsProcessorList(chain),
        )
        for prompt in PROMPTS
    ]
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=1.2, bad_words_ids=((5, 6), (9,)))
    for drafter in drafters(target, draft).values():
        got = decode(target, drafter, sampling=sampling, processors=tuple(chain))
        assert [result.token_ids for result in got] == expected


def test_bad_words_give_the_text_of_generate_and_never_appear(target, draft):
    texts = plain_texts(target)
    words = [
        tuple(text[n : n + size])
        for text, n, size in zip(texts, (0, 1, 2, 3), (1, 2, 3, 4), strict=True)
    ]
    expected = [
        generate(target, prompt, bad_words_ids=[list(word) for word in words]) for prompt in PROMPTS
    ]
    assert all(a != b for a, b in zip(expected, texts, strict=True))
    sampling = SamplingConfig(temperature=0.0, bad_words_ids=tuple(words))
    for drafter in drafters(target, draft).values():
        got = [result.token_ids for result in decode(target, drafter, sampling=sampling)]
        assert got == expected
        for prompt, text in zip(PROMPTS, got, strict=True):
            row = [*prompt, *text]
            ends = range(len(prompt) + 1, len(row) + 1)
            assert not any(tuple(row[max(0, e - len(w)) : e]) == w for w in words for e in ends)


@pytest.mark.parametrize("minimum", [3, 7])
def test_min_new_tokens_as_a_processor_equals_min_tokens_as_a_setting(target, draft, minimum):
    prompt = PROMPTS[0]
    stops = frozenset(plain_texts(target)[0][:2])
    processor = theirs.MinNewTokensLengthLogitsProcessor(
        len(prompt), minimum, sorted(stops), device="cpu"
    )
    expected = generate(target, prompt, eos_token_id=sorted(stops), min_new_tokens=minimum)
    as_setting = SamplingConfig(temperature=0.0, min_tokens=minimum)
    for drafter in drafters(target, draft).values():
        for settings in ({"processors": (processor,)}, {"sampling": as_setting}):
            (got,) = decode(target, drafter, stops=stops, prompts=[prompt], **settings)
            assert got.token_ids == expected


@pytest.mark.parametrize("kind", ["disagreeing", "subset", "early exit", "lookup"])
def test_sampled_text_under_processors_is_the_same_alone_and_in_a_batch(target, draft, kind):
    chain = (theirs.NoRepeatNGramLogitsProcessor(2), theirs.RepetitionPenaltyLogitsProcessor(1.2))
    sampling = SamplingConfig(temperature=0.8, top_k=20)
    drafter = drafters(target, draft)[kind]
    together = decode(target, drafter, sampling=sampling, processors=chain)
    for prompt, result in zip(PROMPTS, together, strict=True):
        (alone,) = decode(target, drafter, sampling=sampling, processors=chain, prompts=[prompt])
        assert alone.token_ids == result.token_ids
        pairs = list(itertools.pairwise(result.token_ids))
        assert len(set(pairs)) == len(pairs)  # no pair of ids comes twice


def test_a_grammar_is_never_asked_about_a_text_it_forbids(target):
    """A drafter without a grammar proposes forbidden texts; the rows behind them are not asked."""

    def counting_up(input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[0].tolist()
        assert all(b in ((a + 1) % 40, (a + 2) % 40) for a, b in itertools.pairwise(text))
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, [(text[-1] + 1) % 40, (text[-1] + 2) % 40]] = 0.0
        return scores + allowed

    prompts = [[1, 2, 3], [7, 9, 11, 12]]
    plain = decode(target, None, processors=(counting_up,), prompts=prompts)
    # Right, right, forbidden, and something behind it: a row of the verify pass that nobody reads.
    scripts = {
        tuple(prompt): [77 if n % 4 == 2 else t for n, t in enumerate(result.token_ids)]
        for prompt, result in zip(prompts, plain, strict=True)
    }
    for drafter in (ScriptedDrafter(scripts), CausalLMDrafter(target)):
        got = decode(target, drafter, processors=(counting_up,), prompts=prompts)
        assert [r.token_ids for r in got] == [r.token_ids for r in plain]
        assert sum(r.stats.num_accepted for r in got) > 20


def test_a_processor_that_fails_in_a_round_leaves_the_rows_where_they_were(target):
    """The engine goes on after a failed round; this processor fails late, which no probe saw."""
    expected = decode(target, None, prompts=PROMPTS[:1])[0].token_ids
    is_broken = [False]

    def late(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, :5] if is_broken[0] else scores

    engine = DecodeEngine(target, None, num_draft_tokens=0, max_batch_size=1, max_length=256)
    handle = engine.add(
        DecodeRequest(PROMPTS[0], LENGTH, GREEDY, 0, frozenset(), logits_processors=(late,))
    )
    engine.step()
    is_broken[0] = True
    with pytest.raises(LogitsProcessorError, match="late"):
        engine.step()
    is_broken[0] = False
    while engine.has_work:
        engine.step()
    assert engine.result(handle).token_ids == expected


@pytest.mark.parametrize("failing", ["raises", "excludes everything"])
def test_a_text_that_has_ended_is_no_dead_end_with_any_draft(target, draft, failing):
    """A grammar knows nothing of a text that is over; drafts behind the end must not ask it."""
    plain = decode(target, None, prompts=PROMPTS[:2])
    stop = plain[0].token_ids[6]

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        if stop not in input_ids[0, 3:].tolist():
            return scores
        if failing == "raises":
            raise ValueError("the text is over")
        return scores - torch.inf

    settings: dict[str, Any] = {"processors": (grammar,), "stops": frozenset({stop})}
    expected = decode(target, None, prompts=PROMPTS[:1], **settings)[0].token_ids
    assert expected == plain[0].token_ids[: plain[0].token_ids.index(stop) + 1]
    # And one that goes on behind the end, whatever it is.
    scripted = ScriptedDrafter({tuple(PROMPTS[0]): plain[0].token_ids})
    for drafter in (scripted, *drafters(target, draft).values()):
        (got,) = decode(target, drafter, prompts=PROMPTS[:1], **settings)
        assert got.token_ids == expected


@pytest.mark.parametrize("failing", ["raises", "excludes everything"])
def test_a_dead_end_that_no_answer_reaches_stops_no_round(target, failing):
    plain = decode(target, None, prompts=PROMPTS[:2])
    wrong = next(t for t in range(300) if all(t not in r.token_ids for r in plain))

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        if wrong not in input_ids[0].tolist():
            return scores
        if failing == "raises":
            raise ValueError("no such text")
        return scores - torch.inf

    scripts = {
        tuple(prompt): [wrong if n % 3 == 1 else t for n, t in enumerate(result.token_ids)]
        for prompt, result in zip(PROMPTS, plain, strict=False)
    }
    drafter = ScriptedDrafter(scripts)
    got = decode(target, drafter, prompts=PROMPTS[:2], processors=(grammar,))
    assert [r.token_ids for r in got] == [r.token_ids for r in plain]
    assert sum(r.stats.num_accepted for r in got) > 20


@pytest.mark.parametrize("kind", ["disagreeing", "itself", "lookup"])
def test_a_dead_end_that_the_answer_reaches_fails_where_plain_decoding_does(target, draft, kind):
    plain = decode(target, None, prompts=PROMPTS[:1])[0].token_ids
    last = plain[10]
    length = plain.index(last) + 1

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - torch.inf if last in input_ids[0, 3:].tolist() else scores

    engine = DecodeEngine(
        target,
        drafters(target, draft)[kind],
        num_draft_tokens=4,
        max_batch_size=1,
        max_length=256,
    )
    handle = engine.add(
        DecodeRequest(PROMPTS[0], LENGTH, GREEDY, 0, frozenset(), logits_processors=(grammar,))
    )
    told: list[int] = []
    while len(told) < length:
        told.extend(token for update in engine.step() for token in update.new_token_ids)
    with pytest.raises(SamplingError):
        engine.step()
    assert told == plain[:length]
    assert engine.cancel(handle).token_ids == plain[:length]
