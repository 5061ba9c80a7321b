"""Owns the packed form of top_k: the K most likely tokens of the target, and what is left out.

Refuses to know files and losses.

A position has K ids (16 low bits each, the bits above packed beside them), K log-probabilities at
temperature 1 and the mass of all other tokens, at temperature 1 and at 0.7.
N positions, K kept tokens, V vocabulary, H bytes of upper bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from distill.losses.knowledge import TopKnowledge
from distill.target_store.config import high_bits, high_bytes

TAIL_TEMPERATURES = (1.0, 0.7)
# Log-probabilities are 16-bit multiples of this, from 0 down to -32: a probability is off by less
# than 0.025%, wherever it lies; float16 would be off by 0.4% at e^-10.
_STEP = 32.0 / 65535.0


def top_k_of_law(log_probs_NV: Tensor, k: int) -> dict[str, Tensor]:
    """Pack whole next-token laws at temperature 1."""
    k = min(k, log_probs_NV.shape[-1])
    log_probs_NK, ids_NK = log_probs_NV.topk(k, dim=-1)
    # 1 - sum would lose a small tail to rounding; the others are summed instead
    rest_NV = log_probs_NV.scatter(-1, ids_NK, -torch.inf)
    tails: list[Tensor] = []
    for temperature in TAIL_TEMPERATURES:
        tail_N = (rest_NV / temperature).logsumexp(-1)
        whole_N = torch.logaddexp(tail_N, (log_probs_NK / temperature).logsumexp(-1))
        tails.append(torch.exp(tail_N - whole_N))
    return _pack(ids_NK, log_probs_NK, torch.stack(tails, dim=-1), log_probs_NV.shape[-1])


def top_k_of_scores(
    token_ids_NK: Tensor, log_probs_NK: Tensor, tail_mass_N: Tensor, *, vocab_size: int
) -> dict[str, Tensor]:
    """Pack what a server gives. The tail at 0.7 is an upper bound: no token in it beats the K-th.

    sum_tail p^(1/T) <= tail p_K^(1/T - 1), so the acceptance cap that follows is a lower bound.
    """
    power = 1.0 / TAIL_TEMPERATURES[1]
    bound_N = tail_mass_N * torch.exp((power - 1.0) * log_probs_NK[:, -1])
    kept_N = torch.exp(power * log_probs_NK).sum(-1)
    tails_NT = torch.stack([tail_mass_N, bound_N / (bound_N + kept_N)], dim=-1)
    return _pack(token_ids_NK, log_probs_NK, tails_NT, vocab_size)


def _pack(
    ids_NK: Tensor, log_probs_NK: Tensor, tail_mass_NT: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    ids = ids_NK.to(torch.int64).numpy()
    codes_NK = (log_probs_NK.double() / -_STEP).round().clamp(0, 65535)
    packed = {
        "id_low_NK": torch.from_numpy((ids & 0xFFFF).astype(np.uint16)),
        "log_prob_NK": torch.from_numpy(codes_NK.numpy().astype(np.uint16)),
        "tail_mass_NT": tail_mass_NT.float(),
    }
    if bits := high_bits(vocab_size):
        per_byte = 8 // bits
        high = np.zeros((len(ids), high_bytes(ids.shape[1], vocab_size) * per_byte), dtype=np.uint8)
        high[:, : ids.shape[1]] = ids >> 16
        shifted = high.reshape(len(ids), -1, per_byte) << (np.arange(per_byte) * bits)
        packed[f"id_high{bits}_NH"] = torch.from_numpy(
            np.bitwise_or.reduce(shifted, axis=-1).astype(np.uint8)
        )
    return packed


def unpack_top_k(packed: dict[str, Tensor]) -> TopKnowledge:
    """Return what `top_k_of_law` packed: ids exactly, log-probabilities to half a step."""
    ids = packed["id_low_NK"].numpy().astype(np.int64)
    k = ids.shape[1]
    for bits in (2, 4, 8):
        if (high_NH := packed.get(f"id_high{bits}_NH")) is None:
            continue
        per_byte = 8 // bits
        spread = high_NH.numpy()[:, :, None] >> (np.arange(per_byte) * bits) & (2**bits - 1)
        ids |= spread.reshape(len(ids), -1)[:, :k].astype(np.int64) << 16
    return TopKnowledge(
        token_ids_NK=torch.from_numpy(ids),
        log_probs_NK=packed["log_prob_NK"].to(torch.float32) * -_STEP,
        tail_mass_N=packed["tail_mass_NT"][:, 0].clone(),
    )


def acceptance_caps(tails: Iterable[Tensor]) -> dict[str, float]:
    """Return 1 - mean tail mass by temperature, from the `tail_mass_NT` of all files.

    It caps the acceptance of what the store shows exactly: a draft that equals the target on the
    K and puts nothing elsewhere is accepted this often (sum of min(p, q) = mass of the K).
    """
    total = torch.zeros(len(TAIL_TEMPERATURES), dtype=torch.float64)
    num_positions = 0
    for tail_mass_NT in tails:
        total += tail_mass_NT.double().sum(0)
        num_positions += len(tail_mass_NT)
    means = (total / max(1, num_positions)).tolist()
    return {f"{t:g}": 1.0 - mean for t, mean in zip(TAIL_TEMPERATURES, means, strict=True)}
