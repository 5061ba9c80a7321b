"""Owns the key/value cache for rows of different lengths, and the model call that writes into it.
Refuses to know drafts, acceptance and stops. The only file that touches transformers' internals.

Legend: B rows in one call, S tokens per row (right-padded), N real tokens, L cached positions,
H key/value heads, G query heads per key/value head, D width of a head, V vocabulary.

A row owns one slot of preallocated memory and a length. Position t of a row is always slot index
t, so rolling back is lowering a number, padding needs no left shift, and what lies behind the
length is overwritten before anything may attend to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distill.errors import CacheRollbackError, ContextLengthError
from distill.runtime.attention import attention_for, ragged_mask
from distill.runtime.packing import packed_linears

_ROUND_UP = 64
_ROLLBACK_BY_LENGTH = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class ForwardOutput:
    """Logits of the asked token positions, in row order, and the hidden states that gave them."""

    logits_NV: Tensor
    hidden_ND: Tensor | None


@dataclass(frozen=True)
class _Plan:
    """Where one call writes and how far it reads; computed once and shared by all layers."""

    rows: slice
    start: int | None  # the common first position, or None when rows differ
    positions_BS: Tensor
    num_tokens: int
    length: int


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
        self.packed = packed_linears(model)
        self.max_rows = max_rows
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.lengths: list[int] = []
        self._capacity = _rounded_up(capacity)
        self._slots = 0
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._plan: _Plan | None = None
        self._index: tuple[int, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

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
        is_enough = length <= self._capacity and self.num_rows <= self._slots
        if is_enough:
            return
        if length > self._capacity:
            self._capacity = _rounded_up(max(length, 2 * self._capacity))
        if self.num_rows > self._slots:
            self._slots = min(self.max_rows, max(self.num_rows, 2 * self._slots))
        for layer, pair in self._memory.items():
            self._memory[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def _grown(self, old: Tensor) -> Tensor:
        new = self._empty(old)
        used = max(self.lengths, default=0)
        rows = min(self.num_rows, old.shape[0])
        new[:rows, :, :used] = old[:rows, :, :used]
        return new

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[Any, Any]:
        """Store the new keys and values of one layer and return all that may be attended to.

        Called by the model's attention layers, inside :func:`forward`.

        Args:
            keys, values: [B, H, S, D].

        Returns:
            Views [B, H, L, D] into the cache; nothing is copied.
        """
        plan = self._plan
        assert plan is not None, "the cache is written through runtime.cache.forward only"
        if layer_idx not in self._memory:
            self._memory[layer_idx] = (self._empty(keys), self._empty(values))
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

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, not empty: a masked position has weight 0, and 0 * NaN would be NaN.
        shape = (self._slots, like.shape[1], self._capacity, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _flat_index(self, plan: _Plan, num_heads: int) -> Tensor:
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
    def writing(self, first_row: int, num_tokens_B: Sequence[int], device: Any) -> Iterator[_Plan]:
        """Open the cache for one call over rows first_row ..; lengths grow when it succeeds."""
        stop = first_row + len(num_tokens_B)
        assert 0 <= first_row < stop <= self.num_rows
        starts = self.lengths[first_row:stop]
        num_tokens = max(num_tokens_B)
        length = max(starts) + num_tokens
        self.reserve(length)
        start_B1 = torch.tensor(starts, device=device).unsqueeze(1)
        self._plan = _Plan(
            rows=slice(first_row, stop),
            start=starts[0] if len(set(starts)) == 1 else None,
            positions_BS=start_B1 + torch.arange(num_tokens, device=device),
            num_tokens=num_tokens,
            length=length,
        )
        try:
            yield self._plan
        finally:
            self._plan = self._index = None
        for row, number in enumerate(num_tokens_B, start=first_row):
            self.lengths[row] += number


@torch.inference_mode()
def forward(
    model: Any,
    cache: RaggedCache,
    token_ids: Sequence[Sequence[int]],
    *,
    first_row: int = 0,
    logits_of: Literal["all", "last", "none"] = "all",
    keep_hidden: bool = False,
    head: nn.Module | None = None,
) -> ForwardOutput:
    """Append tokens to consecutive rows of the cache and return logits of what was appended.

    Args:
        token_ids: per row, from ``first_row`` on, the tokens to append; a row may have none and is
            then left as it is.
        logits_of: every appended token, the last one of each row that has any, or none at all.
            The output head runs on exactly these positions.
        keep_hidden: also return the head's input at these positions.
        head: output head to use instead of the model's own, for a smaller vocabulary.

    Returns:
        Logits [N, V] in row order, N = number of positions asked for.

    Raises:
        ContextLengthError: a row would outgrow the model's positions.
    """
    assert not model.training, "decoding needs model.eval(): dropout would change the target's law"
    num_tokens_B = [len(row) for row in token_ids]
    _check_context(cache, first_row, num_tokens_B)
    device = model.get_input_embeddings().weight.device
    num_tokens = max(num_tokens_B)
    tokens_BS = torch.tensor(
        [[*row, *([0] * (num_tokens - len(row)))] for row in token_ids], device=device
    )
    with (
        cache.writing(first_row, num_tokens_B, device) as plan,
        cache.packed.applied(head),
        attention_for(model, cache.config) as is_ours,
        _head_on(
            model, head, _positions_wanted(num_tokens_B, num_tokens, logits_of).to(device)
        ) as captured,
    ):
        positions_BS = plan.positions_BS
        if cache.max_positions is not None:  # padding may point behind the last position
            positions_BS = positions_BS.clamp_max(cache.max_positions - 1)
        output = model(
            input_ids=tokens_BS,
            attention_mask=_masks(cache, plan, model.dtype, is_ours),
            position_ids=positions_BS,
            cache=cache,
            use_cache=True,
        )
    hidden_ND = captured[0] if keep_hidden else None
    return ForwardOutput(output.logits[0], hidden_ND)


def prefill(
    model: Any,
    cache: RaggedCache,
    tokens_by_row: Mapping[int, Sequence[int]],
    *,
    max_tokens: int = 4096,
) -> None:
    """Append many tokens to some rows, without logits.

    Consecutive empty rows share a call as long as it stays under ``max_tokens`` padded tokens, so
    join rows of similar length one after the other; a row that already holds tokens goes alone.

    Raises:
        ContextLengthError: as :func:`forward`.
    """
    group: list[int] = []
    for row in sorted(row for row, tokens in tokens_by_row.items() if tokens):
        longest = max(len(tokens_by_row[r]) for r in [*group, row])
        is_joinable = bool(group) and row == group[-1] + 1
        is_fresh = not any(cache.lengths[r] for r in [*group, row])
        if group and not (is_joinable and is_fresh and longest * (len(group) + 1) <= max_tokens):
            _prefill_group(model, cache, tokens_by_row, group)
            group = []
        group.append(row)
    if group:
        _prefill_group(model, cache, tokens_by_row, group)


def _prefill_group(
    model: Any, cache: RaggedCache, tokens_by_row: Mapping[int, Sequence[int]], group: list[int]
) -> None:
    forward(model, cache, [tokens_by_row[r] for r in group], first_row=group[0], logits_of="none")


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


def _check_context(cache: RaggedCache, first_row: int, num_tokens_B: Sequence[int]) -> None:
    if cache.max_positions is None:
        return
    for row, number in enumerate(num_tokens_B, start=first_row):
        if number and cache.lengths[row] + number > cache.max_positions:
            raise ContextLengthError(
                f"{cache.lengths[row] + number} tokens do not fit the model's "
                f"{cache.max_positions} positions. Use a shorter prompt or a smaller max_length."
            )


def _positions_wanted(
    num_tokens_B: Sequence[int], num_tokens: int, logits_of: Literal["all", "last", "none"]
) -> Tensor:
    """Flat indices into [B * S] of the positions whose logits are asked for."""
    wanted: list[int] = []
    for row, number in enumerate(num_tokens_B):
        first = {"all": 0, "last": max(number - 1, 0), "none": number}[logits_of]
        wanted.extend(range(row * num_tokens + first, row * num_tokens + number))
    return torch.tensor(wanted, dtype=torch.long)


@contextmanager
def _head_on(model: Any, head: nn.Module | None, wanted_N: Tensor) -> Iterator[list[Tensor]]:
    """Let the output head see only the wanted positions; yields a list that receives its input.

    A hook on the head rather than a second implementation of what follows the decoder: scaling
    and soft caps of the logits stay the model's own business.
    """
    own_head = model.get_output_embeddings()
    used: nn.Module = own_head if head is None else head
    captured: list[Tensor] = []

    def select(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_BSD = arguments[0]
        hidden_ND = hidden_BSD.reshape(-1, hidden_BSD.shape[-1]).index_select(0, wanted_N)
        captured.append(hidden_ND)
        return (hidden_ND.unsqueeze(0), *arguments[1:])

    handle = used.register_forward_pre_hook(select)
    try:
        if head is not None:
            model.set_output_embeddings(head)
        yield captured
    finally:
        handle.remove()
        if head is not None:
            model.set_output_embeddings(own_head)


def _masks(cache: RaggedCache, plan: _Plan, dtype: torch.dtype, is_ours: bool) -> Any:
    """The mask of each kind of layer: one value, or a dict where kinds are mixed."""
    group = 1
    if is_ours:
        heads = cache.config.num_attention_heads
        group = heads // (getattr(cache.config, "num_key_value_heads", None) or heads)
    kinds = dict.fromkeys(cache.layer_types)
    window = getattr(cache.config, "sliding_window", None)
    masks = {
        kind: ragged_mask(
            plan.positions_BS,
            plan.length,
            common_start=plan.start,
            window=window if kind == "sliding_attention" else None,
            group=group,
            dtype=dtype,
            may_skip=is_ours,
        )
        for kind in kinds
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _rounded_up(length: int) -> int:
    return -(-length // _ROUND_UP) * _ROUND_UP
