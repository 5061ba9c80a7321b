"""Owns the proof of the acceptance rule: the law of a whole block, by enumeration, not sampling.
Refuses models and random numbers.

``verify`` is piecewise constant in every uniform. So each cell is visited once and weighted with
its length and with q of the drafted tokens; the sum is the exact law of what is emitted. Blocks
shorter than K + 1 are completed with the target's own conditional probabilities, which makes the
law comparable with the target's joint law of K + 1 tokens.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from distill.runtime.verify import verify
from distill.sampling import overlap, residual

Table = dict[tuple[int, ...], torch.Tensor]


def random_law(vocabulary: int, length: int, seed: int, *, zeros: float = 0.0) -> Table:
    """Conditional distributions for every prefix shorter than ``length``, float64."""
    generator = torch.Generator().manual_seed(seed)
    table: Table = {}
    for size in range(length):
        for prefix in itertools.product(range(vocabulary), repeat=size):
            weights = torch.rand(vocabulary, generator=generator, dtype=torch.float64)
            dropped = torch.rand(vocabulary, generator=generator) < zeros
            dropped[int(torch.argmax(weights))] = False
            weights[dropped] = 0.0
            table[prefix] = weights / weights.sum()
    return table


def joint_law(law: Table, vocabulary: int, length: int) -> torch.Tensor:
    """Probability of every sequence of ``length`` tokens."""
    joint = torch.ones([vocabulary] * length, dtype=torch.float64)
    for tokens in itertools.product(range(vocabulary), repeat=length):
        for position in range(length):
            joint[tokens] *= law[tokens[:position]][tokens[position]]
    return joint


def cells(borders: list[float]) -> list[tuple[float, float]]:
    """(midpoint, length) of the cells that sorted borders cut the unit interval into."""
    points = sorted({0.0, 1.0, *(b for b in borders if 0.0 < b < 1.0)})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(points)]


def block_cases(target: Table, draft: Table, drafts: tuple[int, ...], deterministic: bool):
    """p [S, V], q [K, V] along the drafted tokens, and (uniforms, weight) for every cell."""
    prefixes = [drafts[:n] for n in range(len(drafts) + 1)]
    p_SV = torch.stack([target[prefix] for prefix in prefixes])
    q_KV = torch.stack([draft[prefix] for prefix in prefixes[:-1]])
    if deterministic:
        q_KV = torch.nn.functional.one_hot(torch.tensor(drafts), p_SV.shape[1]).double()
    tests = [
        cells([float(p_SV[k, token] / q_KV[k, token]) if q_KV[k, token] > 0 else 0.0])
        for k, token in enumerate(drafts)
    ]
    last_laws = [residual(p_SV[k], q_KV[k]) for k in range(len(drafts))] + [p_SV[-1]]
    borders = [float(b) for law in last_laws for b in law.cumsum(0)]
    for chosen in itertools.product(*tests, cells(borders)):
        uniforms = [midpoint for midpoint, _ in chosen]
        weight = 1.0
        for _, size in chosen:
            weight *= size
        yield p_SV, q_KV, uniforms, weight


def emitted_law(
    target: Table, draft: Table, vocabulary: int, k: int, *, deterministic: bool = False
) -> tuple[torch.Tensor, float]:
    """Law of K + 1 tokens produced by one block, and the expected number emitted by the block."""
    cases = []
    for drafts in itertools.product(range(vocabulary), repeat=k):
        q_drafts = 1.0
        for position, token in enumerate(drafts):
            q_drafts *= float(draft[drafts[:position]][token])
        if q_drafts:
            for p_SV, q_KV, uniforms, weight in block_cases(target, draft, drafts, deterministic):
                cases.append((p_SV, q_KV, drafts, uniforms, q_drafts * weight))
    result = verify(
        torch.stack([case[0] for case in cases]),
        None if deterministic else torch.stack([case[1] for case in cases]),
        torch.tensor([case[2] for case in cases], dtype=torch.long).view(len(cases), k),
        torch.tensor([case[3] for case in cases], dtype=torch.float64),
    )
    law = torch.zeros([vocabulary] * (k + 1), dtype=torch.float64)
    expected_tokens = 0.0
    decisions = zip(result.num_accepted_B.tolist(), result.next_token_B.tolist(), strict=True)
    for (_, _, drafts, _, weight), (accepted, next_token) in zip(cases, decisions, strict=True):
        block = (*drafts[:accepted], next_token)
        expected_tokens += weight * len(block)
        for rest in itertools.product(range(vocabulary), repeat=k + 1 - len(block)):
            tokens, probability = (*block, *rest), weight
            for position in range(len(block), k + 1):
                probability *= float(target[tokens[:position]][tokens[position]])
            law[tokens] += probability
    return law, expected_tokens


def argmax_law(draft: Table) -> Table:
    """A draft that always proposes its most likely token."""
    size = len(next(iter(draft.values())))
    return {
        prefix: torch.nn.functional.one_hot(q.argmax(), size).double()
        for prefix, q in draft.items()
    }


@pytest.mark.parametrize(
    ("vocabulary", "k", "zeros"),
    [(2, 1, 0.0), (5, 1, 0.4), (4, 2, 0.0), (4, 2, 0.4), (3, 3, 0.0), (3, 3, 0.4), (5, 2, 0.3)],
)
def test_the_emitted_block_has_exactly_the_target_law(vocabulary, k, zeros):
    target = random_law(vocabulary, k + 1, seed=vocabulary, zeros=zeros)
    draft = random_law(vocabulary, k + 1, seed=100 + k, zeros=zeros)
    law, _ = emitted_law(target, draft, vocabulary, k)
    torch.testing.assert_close(law, joint_law(target, vocabulary, k + 1), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("vocabulary", "k"), [(4, 1), (4, 2), (3, 3)])
def test_a_deterministic_draft_changes_nothing_either(vocabulary, k):
    target = random_law(vocabulary, k + 1, seed=1, zeros=0.2)
    draft = argmax_law(random_law(vocabulary, k + 1, seed=2))
    law, _ = emitted_law(target, draft, vocabulary, k, deterministic=True)
    torch.testing.assert_close(law, joint_law(target, vocabulary, k + 1), atol=1e-12, rtol=0)


def test_a_draft_that_equals_the_target_is_always_accepted():
    target = random_law(3, 3, seed=4)
    law, expected_tokens = emitted_law(target, target, 3, 2)
    torch.testing.assert_close(law, joint_law(target, 3, 3), atol=1e-12, rtol=0)
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
    vocabulary = 4
    target = random_law(vocabulary, 2, seed=8)
    draft = random_law(vocabulary, 2, seed=9)
    law = torch.zeros(vocabulary, vocabulary, dtype=torch.float64)
    for token in range(vocabulary):
        for p_SV, q_KV, uniforms, weight in block_cases(target, draft, (token,), False):
            nonsense = torch.full((2, vocabulary), float("nan"), dtype=torch.float64)
            result = verify(
                torch.cat((p_SV, nonsense)).unsqueeze(0),
                torch.cat((q_KV, nonsense)).unsqueeze(0),
                torch.tensor([[token, 0, 0]]),
                torch.tensor([[uniforms[0], 0.5, 0.5, uniforms[1]]], dtype=torch.float64),
                torch.tensor([1]),
            )
            weight *= float(draft[()][token])
            if result.num_accepted_B.item():
                law[token, result.next_token_B] += weight
            else:
                law[result.next_token_B.item()] += weight * target[(result.next_token_B.item(),)]
    torch.testing.assert_close(law, joint_law(target, vocabulary, 2), atol=1e-12, rtol=0)


def test_a_rule_that_skips_the_residual_would_be_caught():
    """The proof can fail: replacing rejected tokens from p instead of p - q is off by far."""
    target, draft = random_law(4, 2, seed=5), random_law(4, 2, seed=6)
    p, q = target[()], draft[()]
    accepted = torch.minimum(p, q)
    wrong = accepted + (1 - accepted.sum()) * p
    assert (wrong - p).abs().max() > 0.01
