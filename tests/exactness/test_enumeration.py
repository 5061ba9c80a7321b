"""Owns the proof of the acceptance rule: the law of a whole block, by enumeration, not sampling.
Refuses models and random numbers. How cells are enumerated is in tests/law_helpers.py.

Twice: for ``verify`` on given laws, and for ``judge``, which makes the laws from logits and the
settings of a request, on prefix and drafted tokens. Also for the rules of other runtimes, whose
acceptance this library predicts: a draft that proposes its argmax, and sampling beside a draft and
keeping what is equal.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from distill.runtime import rounds
from distill.runtime.commit import CommitRules
from distill.runtime.draft_length import FixedDraftLength
from distill.runtime.requests import DecodeRequest, Row
from distill.runtime.verify import acceptance_probability, verify
from distill.sampling import RESIDUAL_LANE, SamplingConfig, overlap
from tests.law_helpers import (
    Table,
    all_cells,
    argmax_law,
    emitted_law,
    joint_law,
    law_of,
    random_law,
    random_logits,
)


def close(law: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.sum() == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(law, expected, atol=1e-12, rtol=0)


# --- the rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize(("vocabulary", "k"), [*itertools.product((2, 3, 4, 5), (1, 2, 3))])
def test_the_emitted_block_has_exactly_the_target_law(vocabulary, k, zeros):
    target = random_law(vocabulary, k + 1, seed=vocabulary, zeros=zeros)
    draft = random_law(vocabulary, k + 1, seed=100 + k, zeros=zeros)
    law, _ = emitted_law(target, draft, vocabulary, k)
    close(law, joint_law(target, vocabulary, k + 1))


@pytest.mark.parametrize("seed", range(6))
def test_so_it_has_for_other_pairs_of_laws(seed):
    target = random_law(4, 3, seed=1000 + seed, zeros=0.2)
    draft = random_law(4, 3, seed=2000 + seed, zeros=0.2)
    law, _ = emitted_law(target, draft, 4, 2)
    close(law, joint_law(target, 4, 3))


@pytest.mark.parametrize(("vocabulary", "k"), [(4, 1), (4, 2), (3, 3), (5, 3)])
def test_a_deterministic_draft_changes_nothing_either(vocabulary, k):
    target = random_law(vocabulary, k + 1, seed=1, zeros=0.2)
    draft = argmax_law(random_law(vocabulary, k + 1, seed=2))
    law, _ = emitted_law(target, draft, vocabulary, k, deterministic=True)
    close(law, joint_law(target, vocabulary, k + 1))


def test_a_draft_that_equals_the_target_is_always_accepted():
    target = random_law(3, 3, seed=4)
    law, expected_tokens = emitted_law(target, target, 3, 2)
    close(law, joint_law(target, 3, 3))
    assert expected_tokens == pytest.approx(3.0, abs=1e-12)


def test_a_draft_of_disjoint_support_is_never_accepted():
    target = {prefix: torch.tensor([0.3, 0.7, 0, 0]).double() for prefix in random_law(4, 3, 0)}
    draft = {prefix: torch.tensor([0, 0, 0.5, 0.5]).double() for prefix in target}
    law, expected_tokens = emitted_law(target, draft, 4, 2)
    torch.testing.assert_close(law, joint_law(target, 4, 3), atol=1e-12, rtol=0)
    assert expected_tokens == pytest.approx(1.0, abs=1e-12)


def test_block_efficiency_is_one_plus_the_chances_of_reaching_each_position():
    """tau = 1 + a1 + a1 a2 where the overlaps do not depend on the prefix (Leviathan eq. 1)."""
    p1, q1, p2, q2 = torch.tensor(
        [[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1], [0.4, 0.4, 0.2]], dtype=torch.float64
    )
    prefixes = random_law(3, 3, 0)
    target = {prefix: (p1, p2, p1)[len(prefix)] for prefix in prefixes}
    draft = {prefix: (q1, q2, q1)[len(prefix)] for prefix in prefixes}
    _, expected_tokens = emitted_law(target, draft, 3, 2)
    a1, a2 = overlap(p1, q1).item(), overlap(p2, q2).item()
    assert (a1, a2) == (pytest.approx(0.6), pytest.approx(0.6))
    assert expected_tokens == pytest.approx(1 + a1 + a1 * a2, abs=1e-12)


def test_a_row_padded_from_fewer_drafts_has_the_target_law_too():
    """Ragged K: the same two-token law whether one draft is alone or padded to three."""
    nonsense = torch.full((2, 4), float("nan"), dtype=torch.float64)

    def padded(p_SV: Any, q_KV: Any, drafts: Any, uniforms_NS: torch.Tensor) -> Any:
        number = len(uniforms_NS)
        middle = torch.full((number, 2), 0.5, dtype=torch.float64)
        return verify(
            torch.cat((p_SV, nonsense)).expand(number, -1, -1),
            torch.cat((q_KV, nonsense)).expand(number, -1, -1),
            torch.tensor([[*drafts, 0, 0]]).expand(number, -1),
            torch.cat((uniforms_NS[:, :1], middle, uniforms_NS[:, 1:]), dim=1),
            torch.ones(number, dtype=torch.long),
        )

    target, draft = random_law(4, 2, seed=8), random_law(4, 2, seed=9)
    law, _ = emitted_law(target, draft, 4, 1, decide=padded)
    close(law, joint_law(target, 4, 2))


def test_a_rule_that_skips_the_residual_would_be_caught():
    """The proof can fail: replacing rejected tokens from p instead of p - q is off by far."""

    def without_residual(p_SV: Any, q_KV: Any, drafts: Any, uniforms_NS: torch.Tensor) -> Any:
        found = verify(
            p_SV.expand(len(uniforms_NS), -1, -1),
            q_KV.expand(len(uniforms_NS), -1, -1),
            torch.tensor(drafts).expand(len(uniforms_NS), -1),
            uniforms_NS,
        )
        cumulative_NV = p_SV[found.num_accepted_B].cumsum(-1)
        found.next_token_B[:] = (cumulative_NV[:, :-1] < uniforms_NS[:, -1:]).sum(-1)
        return found

    target, draft = random_law(4, 2, seed=5), random_law(4, 2, seed=6)
    law, _ = emitted_law(target, draft, 4, 1, decide=without_residual)
    assert (law - joint_law(target, 4, 2)).abs().max() > 0.01


# --- rules that other runtimes use ----------------------------------------------------------------


def test_a_draft_that_proposes_its_argmax_is_accepted_with_the_target_s_chance_of_it():
    """vLLM's greedy drafts, llama.cpp: q is one-hot; the law is the target's all the same."""
    target, draft = random_law(5, 2, seed=11), random_law(5, 2, seed=12)
    law, expected_tokens = emitted_law(target, argmax_law(draft), 5, 1, deterministic=True)
    close(law, joint_law(target, 5, 2))
    named = acceptance_probability(target[()], draft[()], "draft_argmax")
    assert expected_tokens == pytest.approx(1 + float(named), abs=1e-12)


def test_a_sampled_draft_is_accepted_with_the_overlap():
    target, draft = random_law(5, 2, seed=11), random_law(5, 2, seed=12)
    _, expected_tokens = emitted_law(target, draft, 5, 1)
    named = acceptance_probability(target[()], draft[()], "speculative_sampling")
    assert expected_tokens == pytest.approx(1 + float(named), abs=1e-12)


def test_sample_and_match_has_the_target_law_and_accepts_equal_draws():
    """exllama: the target samples everywhere; a draft stands while it is what was sampled."""
    target, draft = random_law(4, 2, seed=13), random_law(4, 2, seed=14)
    law = torch.zeros(4, 4, dtype=torch.float64)
    expected_tokens = 0.0
    for drafted, first, second in itertools.product(range(4), repeat=3):
        # Drafted and sampled independently; ``second`` is drawn in the same pass when it is right,
        # and in the next one when it is not: its law does not depend on which.
        weight = draft[()][drafted] * target[()][first] * target[(first,)][second]
        law[first, second] += weight
        expected_tokens += float(weight) * (2 if drafted == first else 1)
    close(law, joint_law(target, 4, 2))
    named = acceptance_probability(target[()], draft[()], "sample_and_match")
    assert expected_tokens == pytest.approx(1 + float(named), abs=1e-12)


# --- a round of requests --------------------------------------------------------------------------


class JudgeOfLogits:
    """``judge`` on one row per cell, with the random numbers of the cell; float64 logits in."""

    def __init__(self, patch: Any, logits: Table, sampling: SamplingConfig, **request: Any) -> None:
        self.logits, self.sampling = logits, sampling
        self.prompt: tuple[int, ...] = request.pop("prompt", (0, 1))
        self.request = request
        self.uniforms_NS = torch.empty(0, 0)
        patch.setattr(rounds, "uniforms", self._uniforms)

    def _uniforms(self, seeds: Any, counters: Any, lane: int) -> torch.Tensor:
        chosen = self.uniforms_NS[[n for (n,) in seeds]]
        return chosen[:, -1:] if lane == RESIDUAL_LANE else chosen

    def __call__(
        self, p_SV: Any, q_KV: Any, drafts: tuple[int, ...], uniforms_NS: torch.Tensor
    ) -> Any:
        self.uniforms_NS = uniforms_NS
        number = len(uniforms_NS)
        rows = [
            Row(
                handle=n,
                request=DecodeRequest(
                    self.prompt, 9, self.sampling, n, frozenset(), **self.request
                ),
                rules=CommitRules(9, 99),
                draft_length=FixedDraftLength(len(drafts)),
                token_ids=list(self.prompt),
                num_prompt_tokens=len(self.prompt),
            )
            for n in range(number)
        ]
        logits_SV = torch.stack([self.logits[drafts[:n]] for n in range(len(drafts) + 1)])
        return rounds.judge(
            rows,
            [drafts] * number,
            logits_SV.repeat(number, 1),
            None if q_KV is None else q_KV.expand(number, -1, -1),
        )


SHAPES = [
    SamplingConfig(),
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=0.6),
    SamplingConfig(top_k=3),
    SamplingConfig(top_p=0.7),
    SamplingConfig(min_p=0.2),
    SamplingConfig(temperature=1.4, top_k=4, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("sampling", SHAPES)
@pytest.mark.parametrize(("vocabulary", "k"), [(5, 3), (4, 2), (5, 1)])
def test_a_round_has_the_law_of_its_settings(monkeypatch, vocabulary, k, sampling):
    target_logits = random_logits(vocabulary, k + 1, seed=21)
    draft_logits = random_logits(vocabulary, k + 1, seed=22)
    target, draft = law_of(target_logits, sampling), law_of(draft_logits, sampling)
    decide = JudgeOfLogits(monkeypatch, target_logits, sampling, prompt=(0,))
    law, expected_tokens = emitted_law(target, draft, vocabulary, k, decide=decide)
    close(law, joint_law(target, vocabulary, k + 1))
    assert expected_tokens >= 1.0 - 1e-12


@pytest.mark.parametrize("sampling", SHAPES)
def test_a_round_of_a_deterministic_draft_has_the_law_of_its_settings(monkeypatch, sampling):
    target_logits = random_logits(5, 3, seed=23)
    draft = argmax_law(random_logits(5, 3, seed=24))
    target = law_of(target_logits, sampling)
    decide = JudgeOfLogits(monkeypatch, target_logits, sampling, prompt=(0,))
    law, _ = emitted_law(target, draft, 5, 2, deterministic=True, decide=decide)
    close(law, joint_law(target, 5, 3))


EDITS = [
    SamplingConfig(repetition_penalty=1.8),
    SamplingConfig(temperature=0.1, repetition_penalty=1.05),
    SamplingConfig(frequency_penalty=0.9, presence_penalty=0.4),
    SamplingConfig(logit_bias={1: 2.0, 2: -1.0}, bad_token_ids=(0,)),
    SamplingConfig(bad_words_ids=((0, 1), (1, 2), (2, 2, 0), (1, 0, 0))),
    SamplingConfig(temperature=0.7, top_k=2, repetition_penalty=1.3, bad_words_ids=((2, 2),)),
    SamplingConfig(temperature=0.0, frequency_penalty=2.5, bad_words_ids=((0, 0),)),
]


@pytest.mark.parametrize("sampling", EDITS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_round_has_the_law_of_edits_on_prefix_and_drafted_tokens(
    monkeypatch, sampling, deterministic
):
    prompt, k = (2, 0), 2
    target_logits, draft_logits = random_logits(3, 3, seed=31), random_logits(3, 3, seed=32)
    target = law_of(target_logits, sampling, prompt)
    draft = law_of(draft_logits, sampling, prompt)
    decide = JudgeOfLogits(monkeypatch, target_logits, sampling, prompt=prompt)
    law, _ = emitted_law(
        target,
        argmax_law(draft) if deterministic else draft,
        3,
        k,
        deterministic=deterministic,
        decide=decide,
    )
    close(law, joint_law(target, 3, 3))


def test_a_round_has_the_law_of_a_logits_processor(monkeypatch):
    """A processor that looks at the last two tokens; p by hand from its definition."""

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last, before = int(input_ids[0, -1]), int(input_ids[0, -2])
        scores[:, last] -= 1.5
        scores[:, before] += 0.5
        return scores

    prompt = (2, 0)
    target_logits = random_logits(3, 3, seed=41)
    target: Table = {}
    for prefix, row in target_logits.items():
        text = (*prompt, *prefix)
        shifted = row.clone()
        shifted[text[-1]] -= 1.5
        shifted[text[-2]] += 0.5
        target[prefix] = (shifted / 0.8).softmax(-1)
    draft = random_law(3, 3, seed=42)
    decide = JudgeOfLogits(
        monkeypatch,
        target_logits,
        SamplingConfig(temperature=0.8),
        prompt=prompt,
        logits_processors=(processor,),
    )
    law, _ = emitted_law(target, draft, 3, 2, decide=decide)
    close(law, joint_law(target, 3, 3))


def test_edits_that_do_not_see_the_drafted_tokens_would_be_caught(monkeypatch):
    """The proof can fail: the same edits on the prefix alone give another law."""
    sampling, prompt = SamplingConfig(frequency_penalty=1.5), (2, 0)
    logits = random_logits(3, 3, seed=31)
    target = law_of(logits, sampling, prompt)
    original = rounds.edit_logits

    def forgetful(logits_V: Any, sampling: Any, **given: Any) -> torch.Tensor:
        return original(logits_V, sampling, **(given | {"output_token_ids": []}))

    monkeypatch.setattr(rounds, "edit_logits", forgetful)
    decide = JudgeOfLogits(monkeypatch, logits, sampling, prompt=prompt)
    law, _ = emitted_law(target, random_law(3, 3, seed=42), 3, 2, decide=decide)
    assert (law - joint_law(target, 3, 3)).abs().max() > 0.01


def test_cells_fill_the_unit_cube():
    target, draft = random_law(4, 3, seed=1), random_law(4, 3, seed=2)
    p_SV = torch.stack([target[()], target[(1,)], target[(1, 2)]])
    q_KV = torch.stack([draft[()], draft[(1,)]])
    uniforms_NS, sizes_N = all_cells(p_SV, q_KV, (1, 2))
    assert sizes_N.sum() == pytest.approx(1.0, abs=1e-12)
    assert ((uniforms_NS > 0) & (uniforms_NS < 1)).all()
