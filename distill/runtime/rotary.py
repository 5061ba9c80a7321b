"""Owns the rotation of queries and keys by position, looked up instead of computed anew every call.
Refuses to know formulas: every number in the table comes from the model's own module.

Legend: B rows, S tokens per row, W width of a head.

Llama's rotary module is some fifteen operations, whatever it is asked for. For one token of a
draft of one layer that is more than its attention.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

_FIRST_SIZE = 512
# Their angles depend on the position alone. Others change with the longest position of a call.
_FIXED_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


class Places(Protocol):
    """Where the tokens of one call stand."""

    @property
    def start(self) -> int | None:
        """The first position, where all rows share it."""
        ...

    @property
    def num_tokens(self) -> int:
        """S."""
        ...

    @property
    def length(self) -> int:
        """No position reaches it."""
        ...

    @property
    def rotary_positions_BS(self) -> Tensor:
        """Every token's position; padding stays among the model's positions."""
        ...


class RotaryTable:
    """cos and sin of every position that was ever asked for, as one model's module gives them."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._is_fixed = getattr(rotary, "rope_type", None) in _FIXED_TYPES
        self._made_of: tuple[Any, ...] = ()
        self._table: tuple[Tensor, Tensor] | None = None

    def at(self, places: Places, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [B, S, 1, W] or, where all rows agree, [S, 1, W].

        ``rotate_half(x) * sin == roll(x, W / 2) * signed sin``: the sign goes to the smaller
        operand, once.

        Args:
            like: its dtype and device.
        """
        if not self._is_fixed:
            return self._computed(places.rotary_positions_BS, like)
        cos_TW, sin_TW = self._up_to(places.length, like)
        if places.start is None:
            positions_BS = places.rotary_positions_BS
            return cos_TW[positions_BS], sin_TW[positions_BS]
        stop = places.start + places.num_tokens
        return cos_TW[places.start : stop], sin_TW[places.start : stop]

    def _up_to(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        made_of = (self._rotary.inv_freq, self._rotary.attention_scaling, like.dtype, like.device)
        is_same = len(self._made_of) == len(made_of) and self._made_of[0] is made_of[0]
        if self._table is None or not is_same or self._made_of[1:] != made_of[1:]:
            self._table, self._made_of = None, made_of
        if self._table is None or len(self._table[0]) < length:
            size = max(_FIRST_SIZE, length if self._table is None else 2 * length)
            positions_1T = torch.arange(size, device=like.device).unsqueeze(0)
            cos, sin = self._computed(positions_1T, like)
            self._table = (cos[0], sin[0])
        return self._table

    def _computed(self, positions_BS: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        cos_BSW, sin_BSW = self._rotary(like, positions_BS)
        half = sin_BSW.shape[-1] // 2
        sin_BSW = torch.cat((-sin_BSW[..., :half], sin_BSW[..., half:]), dim=-1)
        return cos_BSW.unsqueeze(2), sin_BSW.unsqueeze(2)
