"""Owns the tests of the rotary table: the numbers of the model's own module, for any position.
Refuses models beyond their rotary module; whole passes are compared in ``test_lean``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from distill.runtime.rotary import _FIRST_SIZE, RotaryTable

STRETCHED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
TYPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", **STRETCHED},
    "llama3": {
        "rope_type": "llama3",
        **STRETCHED,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


def module_of(kind: str) -> Any:
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters=dict(TYPES[kind]),
    )
    return LlamaRotaryEmbedding(config)


def places(starts: list[int], num_tokens: int) -> Any:
    return SimpleNamespace(
        start=starts[0] if len(set(starts)) == 1 else None,
        num_tokens=num_tokens,
        length=max(starts) + num_tokens,
        rotary_positions_BS=torch.tensor(starts).unsqueeze(1) + torch.arange(num_tokens),
    )


def turned(vector: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    return vector * cos + vector.roll(vector.shape[-1] // 2, dims=-1) * signed_sin


@pytest.mark.parametrize("kind", list(TYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("starts", [[0, 0], [7, 7], [3, 40], [_FIRST_SIZE + 5, 2], [2000, 2000]])
def test_a_table_rotates_as_the_model_does(
    kind: str, dtype: torch.dtype, starts: list[int]
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    asked = places(starts, 3)
    like = torch.zeros(1, dtype=dtype)
    vector = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    cos, sin = module_of(kind)(like, asked.rotary_positions_BS)
    expected, _ = apply_rotary_pos_emb(vector, vector, cos, sin, unsqueeze_dim=2)
    table = RotaryTable(module_of(kind))
    table.at(places([0], 5), like)  # a table that has to grow
    found = turned(vector, *table.at(asked, like))
    assert torch.equal(found, expected)


def test_a_table_is_made_once_and_again_for_another_dtype_or_other_frequencies() -> None:
    rotary = module_of("default")
    calls: list[int] = []
    rotary.register_forward_hook(lambda *_: calls.append(1))
    table = RotaryTable(rotary)
    for start in range(0, 200, 20):
        table.at(places([start], 2), torch.zeros(1))
    assert len(calls) == 1
    halved, _ = table.at(places([3], 1), torch.zeros(1, dtype=torch.bfloat16))
    assert halved.dtype == torch.bfloat16
    assert len(calls) == 2
    rotary.inv_freq = rotary.inv_freq * 2
    doubled, _ = table.at(places([3], 1), torch.zeros(1))
    assert len(calls) == 3
    # Twice the frequency at position 3 is what position 6 was before.
    before, _ = RotaryTable(module_of("default")).at(places([6], 1), torch.zeros(1))
    assert torch.equal(doubled, before)


def test_angles_that_change_with_the_longest_position_are_never_kept() -> None:
    rotary = module_of("dynamic")
    table = RotaryTable(rotary)
    short, _ = table.at(places([10], 1), torch.zeros(1))
    far, _ = table.at(places([10, 300], 1), torch.zeros(1))
    assert not torch.equal(short.reshape(-1), far[0].reshape(-1))
