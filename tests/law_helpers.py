"""Owns enumerating the law of a block: every cell of every random number, weighted by its size.
Refuses models and random numbers. The expected laws are read from the settings' documentation
with numpy, one row at a time, not computed by the code under test.

``verify`` is piecewise constant in every uniform. So each cell is visited once and weighted with
its length and with q of the drafted tokens; the sum is the exact law of what is emitted. Blocks
shorter than K + 1 are completed with the target's own conditional probabilities, which makes the
law comparable with the target's joint law of K + 1 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from distill.runtime.verify import Verification, verify
from distill.sampling import SamplingConfig, residual

Table = dict[tuple[int, ...], torch.Tensor]
Decide = Callable[[torch.Tensor, "torch.Tensor | None", tuple[int, ...], torch.Tensor], Any]


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


def random_logits(vocabulary: int, length: int, seed: int, *, spread: float = 1.5) -> Table:
    """Logits for every prefix shorter than ``length``, float64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        prefix: spread * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
        for size in range(length)
        for prefix in itertools.product(range(vocabulary), repeat=size)
    }


def numpy_probs(
    logits: np.ndarray, sampling: SamplingConfig, prompt: tuple[int, ...], output: tuple[int, ...]
) -> np.ndarray:
    """What a position is drawn from: an independent reading of the settings' documentation."""
    scores = np.asarray(logits, dtype=np.float64).copy()
    row = (*prompt, *output)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    for *beginning, last in [*sampling.bad_words_ids, *((i,) for i in sampling.bad_token_ids)]:
        if not beginning or row[-len(beginning) :] == tuple(beginning):
            scores[last] = -np.inf
    for token in range(len(scores)):
        count = output.count(token)
        if token in row:
            penalty = sampling.repetition_penalty
            scores[token] = (
                scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            )
        scores[token] -= sampling.frequency_penalty * count
        scores[token] -= sampling.presence_penalty * (count > 0)
    if sampling.temperature == 0:
        return np.eye(len(scores))[scores.argmax()]
    scores /= sampling.temperature
    if sampling.top_k:
        scores[np.argsort(-scores)[sampling.top_k :]] = -np.inf
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    floor = sampling.min_p * probs.max()
    if sampling.top_p < 1:
        order = np.argsort(-probs)
        probs[order[1 + np.searchsorted(probs[order].cumsum(), sampling.top_p) :]] = 0
    probs[probs < floor] = 0
    return probs / probs.sum()


def law_of(logits: Table, sampling: SamplingConfig, prompt: tuple[int, ...] = ()) -> Table:
    """The conditional distributions that logits and settings give."""
    return {
        prefix: torch.from_numpy(numpy_probs(row.numpy(), sampling, prompt, prefix))
        for prefix, row in logits.items()
    }


def conditional(law: Table, vocabulary: int, size: int) -> torch.Tensor:
    """p(token | prefix) for all prefixes of ``size`` tokens: [V] * (size + 1)."""
    prefixes = itertools.product(range(vocabulary), repeat=size)
    return torch.stack([law[prefix] for prefix in prefixes]).view([vocabulary] * (size + 1))


def joint_law(law: Table, vocabulary: int, length: int) -> torch.Tensor:
    """Probability of every sequence of ``length`` tokens."""
    return completed([torch.ones((), dtype=torch.float64)], law, vocabulary, length)


def completed(mass: list[torch.Tensor], law: Table, vocabulary: int, length: int) -> torch.Tensor:
    """The law of ``length`` tokens from that of beginnings: ``mass[i]`` is of a fixed size each."""
    total = torch.zeros([vocabulary] * length, dtype=torch.float64)
    for part in mass:
        for size in range(part.dim(), length):
            part = part.unsqueeze(-1) * conditional(law, vocabulary, size)
        total += part
    return total


def cells(borders: list[float]) -> list[tuple[float, float]]:
    """(midpoint, length) of the cells that sorted borders cut the unit interval into."""
    points = sorted({0.0, 1.0, *(b for b in borders if 1e-15 < b < 1 - 1e-15)})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(points)]


def all_cells(
    p_SV: torch.Tensor, q_KV: torch.Tensor, drafts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniforms [N, S] inside every cell, and the cells' sizes [N]."""
    tests = [
        cells([float(p_SV[k, token] / q_KV[k, token]) if q_KV[k, token] > 0 else 0.0])
        for k, token in enumerate(drafts)
    ]
    last_laws = [residual(p_SV[k], q_KV[k]) for k in range(len(drafts))] + [p_SV[-1]]
    axes = [*tests, cells([float(b) for law in last_laws for b in law.cumsum(0)])]
    chosen = torch.tensor(list(itertools.product(*axes)), dtype=torch.float64)
    return chosen[..., 0], chosen[..., 1].prod(dim=1)


def by_verify(
    p_SV: torch.Tensor,
    q_KV: torch.Tensor | None,
    drafts: tuple[int, ...],
    uniforms_NS: torch.Tensor,
) -> Verification:
    """The acceptance rule itself, on all cells at once."""
    number = len(uniforms_NS)
    return verify(
        p_SV.expand(number, -1, -1),
        None if q_KV is None else q_KV.expand(number, -1, -1),
        torch.tensor(drafts, dtype=torch.long).expand(number, -1),
        uniforms_NS,
    )


def emitted_law(
    target: Table,
    draft: Table,
    vocabulary: int,
    k: int,
    *,
    deterministic: bool = False,
    decide: Decide = by_verify,
    claimed: Table | None = None,
) -> tuple[torch.Tensor, float]:
    """Law of K + 1 tokens produced by one block, and the expected number emitted by the block.

    Args:
        draft: what the drafts are drawn from.
        claimed: what the rule is told they were drawn from; None: the truth.
    """
    mass = [torch.zeros([vocabulary] * (n + 1), dtype=torch.float64) for n in range(k + 1)]
    for drafts in itertools.product(range(vocabulary), repeat=k):
        prefixes = [drafts[:n] for n in range(k + 1)]
        weight = 1.0
        for prefix, token in zip(prefixes, drafts, strict=False):
            weight *= float(draft[prefix][token])
        if not weight:
            continue
        p_SV = torch.stack([target[prefix] for prefix in prefixes])
        q_KV = torch.stack([(claimed or draft)[prefix] for prefix in prefixes[:-1]])
        if deterministic:
            q_KV = torch.nn.functional.one_hot(torch.tensor(drafts), vocabulary).double()
        uniforms_NS, sizes_N = all_cells(p_SV, q_KV, drafts)
        found = decide(p_SV, None if deterministic else q_KV, drafts, uniforms_NS)
        outcome_N = found.num_accepted_B * vocabulary + found.next_token_B
        weights = torch.zeros((k + 1) * vocabulary, dtype=torch.float64)
        weights.index_add_(0, outcome_N, sizes_N * weight)
        for accepted, part in enumerate(weights.view(k + 1, vocabulary)):
            mass[accepted][drafts[:accepted]] += part
    expected_tokens = sum(n * float(part.sum()) for n, part in enumerate(mass, start=1))
    return completed(mass, target, vocabulary, k + 1), expected_tokens


def argmax_law(draft: Table) -> Table:
    """A draft that always proposes its most likely token."""
    size = len(next(iter(draft.values())))
    return {
        prefix: torch.nn.functional.one_hot(q.argmax(), size).double()
        for prefix, q in draft.items()
    }
