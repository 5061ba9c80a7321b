"""Owns the packed form of sampled: a few draws from the target at each position.

Refuses to know files and losses.

N positions, V vocabulary, E entries of all positions, C bytes an entry, M most entries of one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from distill.losses.knowledge import SampledKnowledge
from distill.sampling import uniforms
from distill.target_store.config import entry_bytes

_COUNT_BITS = 6
# Random numbers of the store: a stream of its own beside those of decoding.
_LANE = 8
_CHUNK_POSITIONS = 64


def draw(probs_NV: Tensor, uniforms_N: Tensor, num_draws: int) -> Tensor:
    """Return counts_NV (int64) of `num_draws` draws by systematic sampling.

    Draw i falls where the cumulative law passes (i + u) / num_draws. Each count is num_draws p_v
    rounded down or up, its mean over u is num_draws p_v exactly: as unbiased as independent
    draws, and nearer. Constant in u between finitely many points, so a test can enumerate it.
    """
    total_NV = probs_NV.double().cumsum(-1)
    total_NV /= total_NV[:, -1:].clone()
    passed_NV = (total_NV * num_draws - uniforms_N.double().unsqueeze(-1)).ceil_()
    passed_NV.clamp_(0, num_draws)
    return torch.diff(passed_NV, dim=-1, prepend=torch.zeros_like(passed_NV[:, :1])).long()


def sampled_of_law(
    log_probs_NV: Tensor, *, seed: int, num_draws: int, vocab_size: int, first: int = 0
) -> dict[str, Tensor]:
    """Draw from whole laws and pack; position n of the row with this seed has its own numbers.

    `first` is the position of the first law in its row.
    """
    entries, nums, entropies = [], [], []
    uniforms_N = uniforms(seed, first + np.arange(len(log_probs_NV)), _LANE)
    width = entry_bytes(vocab_size)
    for start in range(0, len(log_probs_NV), _CHUNK_POSITIONS):
        chunk = slice(start, start + _CHUNK_POSITIONS)
        probs_NV = log_probs_NV[chunk].double().exp()
        counts_NV = draw(probs_NV, uniforms_N[chunk], num_draws)
        rows_E, ids_E = counts_NV.nonzero(as_tuple=True)
        packed_E = (ids_E << _COUNT_BITS) | (counts_NV[rows_E, ids_E] - 1)
        as_bytes = packed_E.numpy().astype("<u4")[:, None].view(np.uint8)
        entries.append(torch.from_numpy(as_bytes[:, :width].copy()))
        nums.append((counts_NV > 0).sum(-1).to(torch.uint8))
        entropies.append(torch.special.entr(probs_NV).sum(-1).to(torch.float16))
    if not entries:
        entries.append(torch.zeros(0, width, dtype=torch.uint8))
        nums.append(torch.zeros(0, dtype=torch.uint8))
        entropies.append(torch.zeros(0, dtype=torch.float16))
    return {
        "entries_EC": torch.cat(entries),
        "num_entries_N": torch.cat(nums),
        "entropy_N": torch.cat(entropies),
    }


class SampledRows:
    """A file's draws, found by position."""

    def __init__(self, packed: dict[str, Tensor]) -> None:
        self._packed = packed
        self._num_N = packed["num_entries_N"].long()
        self._start_N = self._num_N.cumsum(0) - self._num_N

    def of(self, index_N: Tensor) -> SampledKnowledge:
        """Unpack these positions; places a position does not use have weight 0 and id 0."""
        num_N = self._num_N[index_N]
        place_M = torch.arange(int(num_N.max()) if len(num_N) else 0)
        is_used_NM = place_M < num_N.unsqueeze(-1)
        entry_NM = (self._start_N[index_N].unsqueeze(-1) + place_M).masked_fill(~is_used_NM, 0)
        bytes_NMC = self._packed["entries_EC"][entry_NM].long()
        value_NM = (bytes_NMC << (8 * torch.arange(bytes_NMC.shape[-1]))).sum(-1)
        value_NM = value_NM.masked_fill(~is_used_NM, 0)
        counts_NM = ((value_NM & (2**_COUNT_BITS - 1)) + 1).masked_fill(~is_used_NM, 0)
        return SampledKnowledge(
            token_ids_NM=value_NM >> _COUNT_BITS,
            weights_NM=counts_NM / counts_NM.sum(-1, keepdim=True).clamp_min(1),
            entropy_N=self._packed["entropy_N"][index_N].float(),
        )


def concatenate(parts: list[SampledKnowledge]) -> SampledKnowledge:
    """Join positions that need different numbers of places."""
    width = max(part.token_ids_NM.shape[1] for part in parts)

    def padded(tensor_NM: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor_NM, (0, width - tensor_NM.shape[1]))

    return SampledKnowledge(
        torch.cat([padded(part.token_ids_NM) for part in parts]),
        torch.cat([padded(part.weights_NM) for part in parts]),
        torch.cat([part.entropy_N for part in parts]),
    )
