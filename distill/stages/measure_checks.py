"""Owns running the self-tests on the two models at hand, on the target's own text.

Refuses to know what the tests expect (``metrics.self_tests``) and the acceptance tables.

Shape suffixes: N flat positions, T positions of a text, V vocabulary, B rows, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distill.drafters.base import CacheSharer
from distill.metrics import self_tests
from distill.metrics.self_tests import Drawn, SelfTest
from distill.models import LoadedModel
from distill.runtime.cache import RaggedCache
from distill.runtime.forward import prefill
from distill.runtime.stats import DecodeStats
from distill.sampling import SamplingConfig
from distill.stages import measure_runs as runs
from distill.stages.measure_audit import Answers
from distill.stages.measure_forced import Text, completion_logits, draft_logits
from distill.stages.measure_runs import Contestant, HeldOutPrompt

_NUM_PROMPTS = 2
_POSITIONS = 8
_NEW_TOKENS = 16
_DRAFT_TOKENS = 3
_MIN_TESTED = 20
"""Fewer tokens tested cannot tell a rate from a single flip."""

# In half precision a pass over K + 1 tokens and one over a single token disagree in their last
# bits, so a target that drafts for itself is rejected now and then; in float32 it is not.
_LEAST_SELF_ACCEPTANCE = {torch.float32: 0.99, torch.float64: 0.99}
_LEAST_IN_HALF = 0.9
_LEAST_OVERLAP = {torch.float32: 0.999, torch.float64: 0.999}
_LEAST_OVERLAP_IN_HALF = 0.93

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_k": (0,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
}


def check_models(
    target: LoadedModel,
    draft: Contestant,
    prompts: Sequence[HeldOutPrompt],
    answers: Answers,
    temperature: float,
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """The self-tests of one temperature that need the models; a few positions are enough."""
    sampling = SamplingConfig(temperature=temperature)
    texts = [(p.token_ids, answers[temperature, p.prompt_id][:_POSITIONS]) for p in prompts]
    texts = [text for text in texts if text[1]][:_NUM_PROMPTS]
    logits = completion_logits(target, texts) if texts else []
    tests: list[SelfTest] = []
    if logits:
        itself = _itself(target)
        target_NV = torch.cat(logits)
        drawn = draw(target, itself, texts, [len(one) for one in logits], sampling)
        bounds = _bounds(target.dtype, target_NV)
        tests += [
            self_tests.same_model(target_NV, drawn, sampling, **bounds),
            self_tests.disjoint_support(target_NV, sampling),
            self_tests.neutral_processors(
                "target", target_NV, drawn, sampling, ignored_settings(target.model), **bounds
            ),
        ]
        if not draft.is_lookup:
            tests.append(_neutral_draft(target, draft, texts, logits, sampling))
    tests.append(_self_draft(target, prompts[:_NUM_PROMPTS], sampling, seed=seed))
    return [test.to_dict() for test in tests]


def _itself(target: LoadedModel) -> Contestant:
    """The target as its own draft: it proposes whatever it emits, as no shipped draft may."""
    return Contestant("target", replace(target, vocabulary=None))


def _neutral_draft(
    target: LoadedModel,
    draft: Contestant,
    texts: Sequence[Text],
    target_TV: Sequence[Tensor],
    sampling: SamplingConfig,
) -> SelfTest:
    drafted = draft_logits(target, draft, texts, target_TV)
    loaded = draft.model or target
    logits_NV = torch.cat([one.logits_NV for one in drafted])
    return self_tests.neutral_processors(
        draft.name,
        logits_NV,
        draw(target, draft, texts, [len(one.logits_NV) for one in drafted], sampling),
        sampling,
        ignored_settings(loaded.model),
        **_bounds(loaded.dtype, logits_NV),
    )


def draw(
    target: LoadedModel,
    contestant: Contestant,
    texts: Sequence[Text],
    num_positions: Sequence[int],
    sampling: SamplingConfig,
) -> Drawn:
    """One draft token at each of a text's first positions, by the drafter that decoding uses."""
    width = min(target.shape.vocab_size, len(target.tokenizer))
    tokens: list[int] = []
    probs: list[Tensor] = []
    for (prompt, completion), number in zip(texts, num_positions, strict=True):
        drafter = contestant.make_drafter()
        cache = None
        if isinstance(drafter, CacheSharer):
            cache = RaggedCache(target.model, max_rows=1)
            cache.reserve(len(prompt) + number + 1)
            drafter.share(target.model, cache)
        drafter.start(vocabulary_size=width, max_batch_size=1)
        row = cache.join() if cache is not None else 0
        drafter.join(0, prompt, sampling, seed=0)
        for position in range(number):
            prefix = [*prompt, *completion[:position]]
            if cache is not None:
                prefill(target.model, cache, {row: prefix[cache.lengths[row] : -1]})
            proposal = drafter.propose([0], [prefix], [1])
            tokens.append(int(proposal.tokens_BK[0, 0]))
            if proposal.probs_BKV is not None:
                # Valid until the next proposal only.
                probs.append(proposal.probs_BKV[0, 0].clone())
            drafter.commit(0, len(prefix))
    tokens_N = torch.tensor(tokens, dtype=torch.long, device=target.device)
    return Drawn(tokens_N, torch.stack(probs) if probs else None)


def _bounds(dtype: torch.dtype, logits_NV: Tensor) -> dict[str, float]:
    """What rounding explains: a rate below 1, and a distance to the largest logit."""
    kept_NV = logits_NV[logits_NV.isfinite()].abs()
    largest = float(kept_NV.max()) if kept_NV.numel() else 0.0
    return {
        "least": _LEAST_OVERLAP.get(dtype, _LEAST_OVERLAP_IN_HALF),
        "slack": runs.TIE_ULPS.get(dtype, 0) * torch.finfo(dtype).eps * largest,
    }


def ignored_settings(model: Any) -> dict[str, Any]:
    """What a model's generation config would do to its logits, were it asked: it is not, here."""
    config = getattr(model, "generation_config", None)
    found = {}
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral and value != []:
            found[name] = value
    return found


def _self_draft(
    target: LoadedModel, prompts: Sequence[HeldOutPrompt], sampling: SamplingConfig, *, seed: int
) -> SelfTest:
    """The target drafts for itself, through the real loop."""
    results = runs.decode(
        target,
        _itself(target),
        prompts,
        sampling,
        num_draft_tokens=_DRAFT_TOKENS,
        max_new_tokens=_NEW_TOKENS,
        seed=seed,
    )
    stats = sum((result.stats for result in results), DecodeStats())
    rate = stats.acceptance_rate
    few = f"; fewer than {_MIN_TESTED} cannot tell"
    least = _LEAST_SELF_ACCEPTANCE.get(target.dtype, _LEAST_IN_HALF)
    return SelfTest(
        "draft == target, decoded",
        sampling.temperature,
        f"acceptance rate {least:g} or more (1, but for rounding)",
        "nothing was tested" if rate is None else f"{rate:.4f}",
        None if rate is None or stats.num_tested < _MIN_TESTED else rate >= least,
        f"{stats.num_tested} tokens tested, in {str(target.dtype).removeprefix('torch.')}"
        f"{few if stats.num_tested < _MIN_TESTED else ''}",
    )
