"""Owns the key/value cache for rows of different lengths: where a call writes, how rows forget.
Refuses to know models' calls, drafts, acceptance and stops.

Legend: B rows in one call, S tokens per row (right-padded), L cached positions, H key/value heads,
D width of a head.

A row owns one slot of preallocated memory and a length. Position t of a row is always slot index
t, so rolling back is lowering a number, padding needs no left shift, and what lies behind the
length is overwritten before anything may attend to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from distill.errors import CacheRollbackError
from distill.runtime.lean import lean_decoder
from distill.runtime.packing import FusedLinear, packed_linears

_ROUND_UP = 64
_ROLLBACK_BY_LENGTH = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class WritePlan:
    """Where one call writes and how far it reads; computed once and shared by all layers."""

    rows: slice
    starts: list[int]
    num_tokens: int
    length: int
    device: Any
    max_positions: int | None

    @cached_property
    def start(self) -> int | None:
        """The common first position, or None when rows differ."""
        first = self.starts[0]
        return first if all(start == first for start in self.starts) else None

    @cached_property
    def positions_BS(self) -> Tensor:
        """The position of every token; a decoding row by itself never asks for them."""
        start_B1 = torch.tensor(self.starts, device=self.device).unsqueeze(1)
        return start_B1 + torch.arange(self.num_tokens, device=self.device)

    @property
    def rotary_positions_BS(self) -> Tensor:
        """The same for rotating: padding may point behind the last position, which a model with
        stretched positions would take for a longer text."""
        if self.max_positions is None:
            return self.positions_BS
        return self.positions_BS.clamp_max(self.max_positions - 1)


class RaggedCache:
    """Keys and values of up to ``max_rows`` rows, each with its own length.

    Rows are numbered 0 .. num_rows - 1 without holes: :meth:`join` adds one at the end and
    :meth:`leave` moves the last one into the gap, so every call reads plain slices.

    Raises:
        CacheRollbackError: the model keeps a recurrent state, or layers of a kind whose cache
            cannot forget single tokens; known before anything is computed.
    """

    def __init__(self, model: Any, *, max_rows: int, capacity: int = 256) -> None:
        self.config = model.config.get_text_config()
        self.layer_types = check_can_roll_back(model)
        self.lean = lean_decoder(model)
        self.packed = packed_linears(model)
        self.max_rows = max_rows
        self.max_positions = _max_positions(self.config)
        self.lengths: list[int] = []
        self._capacity = _rounded_up(capacity)
        self._slots = 0
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._fused_heads: dict[int, FusedLinear] = {}
        self._plan: WritePlan | None = None
        self._index: tuple[int, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def fused_head(self, head: nn.Module) -> FusedLinear:
        """An output head of somebody else, packed once for as long as this cache lives."""
        if id(head) not in self._fused_heads:  # what is kept keeps the head, and so its id
            self._fused_heads[id(head)] = FusedLinear([head])
        return self._fused_heads[id(head)]

    def join(self) -> int:
        """Add an empty row and return its number."""
        assert self.num_rows < self.max_rows, f"the cache has {self.max_rows} rows, all taken"
        self.lengths.append(0)
        return self.num_rows - 1

    @torch.inference_mode()
    def leave(self, row: int) -> int | None:
        """Drop a row; return which row took over its number (None: it was the last one)."""
        last = self.num_rows - 1
        assert 0 <= row <= last
        length = self.lengths.pop()
        if row == last:
            return None
        for keys, values in self._memory.values():
            keys[row, :, :length] = keys[last, :, :length]
            values[row, :, :length] = values[last, :, :length]
        self.lengths[row] = length
        return last

    def roll_back(self, row: int, length: int) -> int:
        """Forget what a row holds behind ``length``; return how many tokens that were."""
        removed = self.lengths[row] - length
        assert length >= 0, (row, length)
        assert removed >= 0, (row, length, self.lengths[row])
        self.lengths[row] = length
        return removed

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room for the rows that are here, of up to ``length`` tokens each.

        Grows by doubling, so that copies stay rare; call it with the most that is to come, after
        the rows have joined, and there are none.
        """
        if length <= self._capacity and self.num_rows <= self._slots:
            return
        capacity, slots = self._capacity, self._slots
        if length > capacity:
            capacity = _rounded_up(max(length, 2 * capacity))
        if self.num_rows > slots:
            slots = min(self.max_rows, max(self.num_rows, 2 * slots))
        # All or nothing: memory that runs out halfway must leave every layer of one shape.
        grown = {
            layer: (self._grown(keys, slots, capacity), self._grown(values, slots, capacity))
            for layer, (keys, values) in self._memory.items()
        }
        self._memory, self._capacity, self._slots = grown, capacity, slots

    def _grown(self, old: Tensor, slots: int, capacity: int) -> Tensor:
        new = _zeros(old, slots, capacity)
        used = max(self.lengths, default=0)
        rows = min(self.num_rows, old.shape[0])
        new[:rows, :, :used] = old[:rows, :, :used]
        return new

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[Any, Any]:
        """Store the new keys and values of one layer and return all that may be attended to.

        Called by the model's attention layers, inside ``runtime.forward.forward``.

        Args:
            keys, values: [B, H, S, D].

        Returns:
            Views [B, H, L, D] into the cache; nothing is copied.
        """
        plan = self._plan
        assert plan is not None, "the cache is written through runtime.forward only"
        if layer_idx not in self._memory:
            pair = [_zeros(new, self._slots, self._capacity) for new in (keys, values)]
            self._memory[layer_idx] = (pair[0], pair[1])
        views = []
        for memory, new in zip(self._memory[layer_idx], (keys, values), strict=True):
            if plan.start is not None:
                memory[plan.rows, :, plan.start : plan.start + plan.num_tokens] = new
            else:
                memory.view(-1, new.shape[-1]).index_copy_(
                    0, self._flat_index(plan, new.shape[1]), new.reshape(-1, new.shape[-1])
                )
            views.append(memory[plan.rows, :, : plan.length])
        return views[0], views[1]

    def _flat_index(self, plan: WritePlan, num_heads: int) -> Tensor:
        """Row numbers in the cache seen as [slots * H * capacity, D], for [B, H, S] vectors."""
        if self._index is None or self._index[0] != num_heads:
            device = plan.positions_BS.device
            rows_B = torch.arange(plan.rows.start, plan.rows.stop, device=device)
            heads_H = torch.arange(num_heads, device=device)
            head_BH = rows_B.unsqueeze(1) * num_heads + heads_H
            flat = head_BH.unsqueeze(2) * self._capacity + plan.positions_BS.unsqueeze(1)
            self._index = (num_heads, flat.reshape(-1))
        return self._index[1]

    @contextmanager
    def writing(
        self, first_row: int, num_tokens_B: Sequence[int], device: Any
    ) -> Iterator[WritePlan]:
        """Open the cache for one call over rows first_row ..; lengths grow when it succeeds."""
        stop = first_row + len(num_tokens_B)
        assert 0 <= first_row < stop <= self.num_rows
        starts = self.lengths[first_row:stop]
        num_tokens = max(num_tokens_B)
        length = max(starts) + num_tokens
        self.reserve(length)
        self._plan = WritePlan(
            slice(first_row, stop), starts, num_tokens, length, device, self.max_positions
        )
        try:
            yield self._plan
        finally:
            self._plan = self._index = None
        for row, number in enumerate(num_tokens_B, start=first_row):
            self.lengths[row] += number


def check_can_roll_back(model: Any) -> list[str]:
    """Return the model's attention kind per layer.

    Raises:
        CacheRollbackError: some state of the model cannot be rolled back by lowering a length.
    """
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = list(getattr(config, "layer_types", None) or [])
    if not kinds:
        kinds = ["sliding_attention" if window else "full_attention"] * num_layers
    strange = sorted(set(kinds) - set(_ROLLBACK_BY_LENGTH))
    if getattr(config, "attention_chunk_size", None) and not strange:
        strange = ["chunked_attention"]
    if getattr(model, "_is_stateful", False) and not strange:
        strange = ["recurrent state"]
    parameters = inspect.signature(model.forward).parameters
    if not strange and not {"position_ids", "cache"} <= set(parameters):
        strange = ["no position_ids or cache argument"]
    if strange:
        raise CacheRollbackError(
            f"{type(model).__name__} ({config.model_type}) cannot be rolled back token by token: "
            f"{', '.join(strange)}. Speculative decoding here needs a decoder whose layers are "
            f"{' or '.join(_ROLLBACK_BY_LENGTH)}."
        )
    return kinds


def _zeros(like: Tensor, slots: int, capacity: int) -> Tensor:
    # Zeros, not empty: a masked position has weight 0, and 0 * NaN would be NaN.
    shape = (slots, like.shape[1], capacity, like.shape[3])
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _max_positions(config: Any) -> int | None:
    """Positions a row may have.

    Up to the original ones where positions are stretched by "longrope": behind them transformers
    rotates a whole call differently, so a row would depend on its neighbours and on its drafts.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if original is not None and (positions is None or original < positions):
            return int(original)
    return positions


def _rounded_up(length: int) -> int:
    return -(-length // _ROUND_UP) * _ROUND_UP
