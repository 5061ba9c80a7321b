"""Owns the proof that choosing the draft length from a row's history leaves the output law alone.
Refuses tolerances in the proof: whole sequences are enumerated, round after round, with every
history that leads to them. A policy that looks at the drafted tokens fails the same proof.

Legend: K draft tokens, S = K + 1, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from distill.drafters.causal_lm import CausalLMDrafter
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult
from distill.runtime.draft_length import AdaptiveDraftLength, DraftLength, SpeedModel
from distill.runtime.speculative import decode_batch
from distill.runtime.verify import verify
from distill.sampling import SamplingConfig, residual
from tests.helpers import make_llama

Law = dict[tuple[int, ...], torch.Tensor]
History = tuple[tuple[int, int], ...]
VOCABULARY, LENGTH = 3, 5

# Forgets within a few tokens and probes at once: short sequences see every K, in both directions.
NERVOUS = AdaptiveDraftLength(
    SpeedModel(0.3, {1: 1.0, 2: 1.1, 3: 1.2}),
    2,
    prior_acceptance_rate=0.55,
    prior_weight=1.0,
    half_life=1.0,
    position_weight=1.0,
    min_probe_interval=1,
)


def random_law(seed: int) -> Law:
    """Conditional distributions for every prefix, float64; some tokens are impossible."""
    generator = torch.Generator().manual_seed(seed)
    law: Law = {}
    for size in range(LENGTH):
        for prefix in itertools.product(range(VOCABULARY), repeat=size):
            weights = torch.rand(VOCABULARY, generator=generator, dtype=torch.float64)
            if torch.rand((), generator=generator) < 0.2:
                weights[int(weights.argmin())] = 0.0
            law[prefix] = weights / weights.sum()
    return law


def joint_law(law: Law) -> torch.Tensor:
    joint = torch.ones([VOCABULARY] * LENGTH, dtype=torch.float64)
    for tokens in itertools.product(range(VOCABULARY), repeat=LENGTH):
        for position in range(LENGTH):
            joint[tokens] *= law[tokens[:position]][tokens[position]]
    return joint


def cells(borders: list[float]) -> list[tuple[float, float]]:
    """(midpoint, length) of the cells that sorted borders cut the unit interval into."""
    points = sorted({0.0, 1.0, *(b for b in borders if 0.0 < b < 1.0)})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(points)]


Block = tuple[tuple[int, ...], int, int]
"""Emitted tokens of a round, how many drafts were submitted, how many of them were accepted."""


def block_law(
    target: Law,
    draft: Law,
    prefix: tuple[int, ...],
    k: int,
    num_kept: Callable[[torch.Tensor, tuple[int, ...]], int],
) -> dict[Block, float]:
    """Every outcome of one round after a prefix and its probability.

    ``num_kept(q_KV, drafts)`` says how many of the drawn tokens are submitted.
    """
    blocks: dict[Block, float] = defaultdict(float)
    for drafts in itertools.product(range(VOCABULARY), repeat=k):
        q_KV = torch.stack([draft[prefix + drafts[:n]] for n in range(k)]) if k else None
        drawn = 1.0
        for n, token in enumerate(drafts):
            drawn *= float(q_KV[n, token])
        if not drawn:
            continue
        kept = drafts[: num_kept(q_KV, drafts)] if k else ()
        p_SV = torch.stack([target[prefix + kept[:n]] for n in range(len(kept) + 1)])
        tests = [cells([float(p_SV[n, token] / q_KV[n, token])]) for n, token in enumerate(kept)]
        last = [residual(p_SV[n], q_KV[n]) for n in range(len(kept))] + [p_SV[-1]]
        chosen = list(
            itertools.product(*tests, cells([float(b) for one in last for b in one.cumsum(0)]))
        )
        size = len(chosen)
        result = verify(
            p_SV.expand(size, -1, -1),
            q_KV[: len(kept)].expand(size, -1, -1) if kept else None,
            torch.tensor([kept] * size, dtype=torch.long).view(size, len(kept)),
            torch.tensor([[middle for middle, _ in one] for one in chosen], dtype=torch.float64),
        )
        for one, accepted, token in zip(
            chosen, result.num_accepted_B.tolist(), result.next_token_B.tolist(), strict=True
        ):
            weight = drawn
            for _, length in one:
                weight *= length
            blocks[(*kept[:accepted], token), len(kept), accepted] += weight
    return blocks


def keep_all(q_KV: torch.Tensor, drafts: tuple[int, ...]) -> int:
    return len(drafts)


def drop_unlikely(q_KV: torch.Tensor, drafts: tuple[int, ...]) -> int:
    """What many runtimes do: not to submit a drafted token of which the draft was not sure."""
    for n, token in enumerate(drafts):
        if q_KV[n, token] < 0.4:
            return n
    return len(drafts)


def emitted_law(
    target: Law,
    draft: Law,
    choose: Callable[[History], int],
    num_kept: Callable[[torch.Tensor, tuple[int, ...]], int] = keep_all,
) -> tuple[torch.Tensor, set[int]]:
    """Law of LENGTH tokens, and every K that some history led to."""
    law = torch.zeros([VOCABULARY] * LENGTH, dtype=torch.float64)
    seen: set[int] = set()
    blocks_of: dict[tuple[tuple[int, ...], int], dict[Block, float]] = {}
    states: dict[tuple[tuple[int, ...], History], float] = {((), ()): 1.0}
    while states:
        following: dict[tuple[tuple[int, ...], History], float] = defaultdict(float)
        for (prefix, history), weight in states.items():
            if len(prefix) == LENGTH:
                law[prefix] += weight
                continue
            k = min(choose(history), LENGTH - len(prefix) - 1)
            seen.add(k)
            if (prefix, k) not in blocks_of:
                blocks_of[prefix, k] = block_law(target, draft, prefix, k, num_kept)
            for (block, drafted, accepted), chance in blocks_of[prefix, k].items():
                state = (prefix + block, (*history, (drafted, accepted)))
                following[state] += weight * chance
        states = following
    return law, seen


def adaptive_choice(history: History) -> int:
    row = NERVOUS.start()
    for drafted, accepted in history:
        row.observe(drafted, accepted)
    return row.choose()


def contrary_choice(history: History) -> int:
    """Any function of the history will do; this one is as erratic as can be."""
    return (2 + sum((n + 2) * (d + 2 * a + 1) for n, (d, a) in enumerate(history))) % 3


class Contrary:
    """The erratic choice as a policy for the engine."""

    max_draft_tokens = 2

    def __init__(self) -> None:
        self.history: History = ()

    def start(self) -> Contrary:
        return Contrary()

    def choose(self) -> int:
        return contrary_choice(self.history)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.history = (*self.history, (num_drafted, num_accepted))


@pytest.mark.parametrize("choose", [adaptive_choice, contrary_choice])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_draft_length_chosen_from_the_past_leaves_the_target_law(choose, seed):
    target, draft = random_law(seed), random_law(100 + seed)
    law, seen = emitted_law(target, draft, choose)
    assert seen == {0, 1, 2}
    torch.testing.assert_close(law, joint_law(target), atol=1e-12, rtol=0)


def test_the_same_proof_refuses_a_policy_that_looks_at_the_drafted_tokens():
    target, draft = random_law(0), random_law(100)
    law, _ = emitted_law(target, draft, lambda _: 1, drop_unlikely)
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-12)
    assert (law - joint_law(target)).abs().sum() > 0.02
    honest, _ = emitted_law(target, draft, lambda _: 1)
    torch.testing.assert_close(honest, joint_law(target), atol=1e-12, rtol=0)


# --- the engine -------------------------------------------------------------------------------

PROMPT = [1, 0, 1, 2, 1]
NUM_SEEDS, NUM_TOKENS, SMALL = 1500, 5, 3


def engine_for(
    target: Any, draft: Any, *, batch: int, policy: DraftLength = NERVOUS
) -> DecodeEngine:
    return DecodeEngine(
        target,
        CausalLMDrafter(draft),
        num_draft_tokens=policy.max_draft_tokens,
        max_batch_size=batch,
        max_length=320,
        draft_length=policy,
    )


@torch.no_grad()
def exact_law(target: Any) -> np.ndarray:
    """Probability of each text after PROMPT at temperature 1."""
    law = np.ones([SMALL] * NUM_TOKENS)
    for size in range(NUM_TOKENS):
        prefixes = list(itertools.product(range(SMALL), repeat=size))
        logits = target(torch.tensor([PROMPT + list(p) for p in prefixes])).logits[:, -1]
        for prefix, probs in zip(prefixes, logits.double().softmax(-1).numpy(), strict=True):
            for token in range(SMALL):
                law[(*prefix, token)] *= probs[token]
    return law


def test_sampled_texts_follow_the_target_law_however_the_past_decides_the_depth():
    """Discarded draws are drawn again at the same positions: they taught the policy nothing."""
    target, draft = (
        make_llama(vocab_size=SMALL, seed=n, hidden=16, layers=1, initializer_range=0.5)
        for n in (3, 8)
    )
    engine = engine_for(target, draft, batch=NUM_SEEDS, policy=Contrary())
    requests = [
        DecodeRequest(PROMPT, NUM_TOKENS, SamplingConfig(), n, frozenset())
        for n in range(NUM_SEEDS)
    ]
    counts = np.zeros([SMALL] * NUM_TOKENS)
    depths = set()
    for result in decode_batch(engine, requests):
        counts[tuple(result.token_ids)] += 1
        depths.add(result.stats.proposed_by_position)
    assert len(depths) > 4  # rows went different ways
    expected = exact_law(target).ravel() * NUM_SEEDS
    is_common = expected >= 5
    pooled = [np.append(x[is_common], x[~is_common].sum()) for x in (counts.ravel(), expected)]
    assert stats.chisquare(*pooled).pvalue > 1e-3


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A target of four layers, and a draft that agrees with it about half the time."""
    target, draft = make_llama(layers=4, seed=0), make_llama(layers=4, seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return target, draft


def decoded(pair: Any, requests: list[DecodeRequest], *, batch: int) -> list[DecodeResult]:
    return decode_batch(engine_for(*pair, batch=batch), requests)


def test_an_adaptive_row_gives_the_same_tokens_alone_and_in_any_batch(pair):
    wide = SamplingConfig(temperature=0.9, top_p=0.95)
    requests = [
        DecodeRequest(prompt, 60, sampling, seed, frozenset())
        for seed, (prompt, sampling) in enumerate(
            [
                ([5, 6, 7], wide),
                ([9] * 20, SamplingConfig(temperature=0.0)),
                ([5, 6, 7], SamplingConfig(temperature=0.7, repetition_penalty=1.2)),
                ([44], wide),
                ([3, 4], SamplingConfig(temperature=0.4)),
            ]
        )
    ]
    alone = [decoded(pair, [one], batch=1)[0] for one in requests]
    for batch, order in ((5, 1), (2, 1), (3, -1)):
        together = decoded(pair, requests[::order], batch=batch)[::order]
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]
        assert [r.stats for r in together] == [r.stats for r in alone]


def test_greedy_texts_of_adaptive_rows_are_the_targets_own_over_256_tokens(pair):
    prompts = [[5, 6, 7], [9] * 14, [3]]
    greedy = SamplingConfig(temperature=0.0)
    results = decoded(
        pair, [DecodeRequest(p, 256, greedy, 0, frozenset()) for p in prompts], batch=3
    )
    for prompt, result in zip(prompts, results, strict=True):
        plain = pair[0].generate(
            torch.tensor([prompt]), max_new_tokens=256, do_sample=False, eos_token_id=None
        )
        assert result.token_ids == plain[0, len(prompt) :].tolist()
        # Refused, half and wholly accepted rounds, and plain ones between them.
        assert min(result.stats.accepted_length_histogram) > 0
        assert 20 < result.stats.num_rounds < result.stats.num_target_calls - 20
