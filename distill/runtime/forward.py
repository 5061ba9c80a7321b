"""Owns the model call that appends tokens to a cache, whole or in part, for rows of any lengths.
Refuses to know drafts, acceptance and stops. Beside the cache and the attention, the only place
that knows how transformers' decoders are called.

Legend: B rows in one call, S tokens per row (right-padded), N positions whose logits are asked for,
L cached positions, G query heads per key/value head, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distill.errors import ContextLengthError
from distill.runtime.attention import attention_for, needs_no_mask, ragged_mask
from distill.runtime.cache import RaggedCache, WritePlan

# Padding up to here costs less than a call of its own; beyond it, an eighth may be padding.
_FREE_PADDING = 32


@dataclass(frozen=True)
class ForwardOutput:
    """Logits of the asked token positions, in row order, and the hidden states that gave them."""

    logits_NV: Tensor
    hidden_ND: Tensor | None


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
    num_layers: int | None = None,
) -> ForwardOutput:
    """Append tokens to consecutive rows of the cache and return logits of what was appended.

    Args:
        token_ids: per row, from ``first_row`` on, the tokens to append; a row may have none and is
            then left as it is.
        logits_of: every appended token, the last one of each row that has any, or none at all.
            The output head runs on exactly these positions.
        keep_hidden: also return the head's input at these positions.
        head: output head to use instead of the model's own, for a smaller vocabulary.
        num_layers: run only the first so many layers, then the final norm and the head. The other
            layers' keys and values are left as they were: roll the row back before they are read.

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
    wanted_N = None
    if (
        logits_of == "none"
        or (logits_of == "last" and num_tokens > 1)
        or len(set(num_tokens_B)) > 1
    ):
        wanted_N = _positions_wanted(num_tokens_B, num_tokens, logits_of).to(device)
    with cache.writing(first_row, num_tokens_B, device) as plan:
        lean = cache.lean
        if lean is not None and not lean.is_hooked:
            masks = _masks(cache, plan, model.dtype, is_ours=True)
            logits_NV, hidden_ND = lean.run(
                tokens_BS,
                plan,
                cache,
                masks,
                wanted_N,
                head=None if head is None else cache.fused_head(head),
                num_layers=num_layers,
            )
        else:
            logits_NV, hidden_ND = _own_forward(
                model, cache, plan, tokens_BS, wanted_N, head, num_layers
            )
    return ForwardOutput(logits_NV, hidden_ND if keep_hidden else None)


def _own_forward(
    model: Any,
    cache: RaggedCache,
    plan: WritePlan,
    tokens_BS: Tensor,
    wanted_N: Tensor | None,
    head: nn.Module | None,
    num_layers: int | None,
) -> tuple[Tensor, Tensor]:
    """The model's own code; logits [N, V] and the head's input [N, D]."""
    with (
        cache.packed.applied(head),
        attention_for(model, cache.config) as is_ours,
        _head_on(model, head, wanted_N) as captured,
        _first_layers(model, num_layers),
    ):
        output = model(
            input_ids=tokens_BS,
            attention_mask=_masks(cache, plan, model.dtype, is_ours),
            position_ids=plan.rotary_positions_BS,
            cache=cache,
            use_cache=True,
        )
    return output.logits[0], captured[0]


def prefill(
    model: Any,
    cache: RaggedCache,
    tokens_by_row: Mapping[int, Sequence[int]],
    *,
    max_tokens: int = 4096,
    num_layers: int | None = None,
) -> None:
    """Append many tokens to some rows, without logits.

    Consecutive empty rows share a call as long as it stays under ``max_tokens`` padded tokens and
    little of it is padding, so join rows of similar length one after the other; a row that already
    holds tokens goes alone.

    Raises:
        ContextLengthError: as :func:`forward`.
    """
    group: list[int] = []
    for row in sorted(row for row, tokens in tokens_by_row.items() if tokens):
        sizes = [len(tokens_by_row[r]) for r in [*group, row]]
        num_padded = max(sizes) * len(sizes)
        is_joinable = bool(group) and row == group[-1] + 1
        is_fresh = not any(cache.lengths[r] for r in [*group, row])
        is_dense = num_padded - sum(sizes) <= max(_FREE_PADDING, num_padded // 8)
        if not (is_joinable and is_fresh and is_dense and num_padded <= max_tokens) and group:
            _prefill_group(model, cache, tokens_by_row, group, num_layers)
            group = []
        group.append(row)
    if group:
        _prefill_group(model, cache, tokens_by_row, group, num_layers)


def _prefill_group(
    model: Any,
    cache: RaggedCache,
    tokens_by_row: Mapping[int, Sequence[int]],
    group: list[int],
    num_layers: int | None,
) -> None:
    forward(
        model,
        cache,
        [tokens_by_row[row] for row in group],
        first_row=group[0],
        logits_of="none",
        num_layers=num_layers,
    )


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
def _head_on(model: Any, head: nn.Module | None, wanted_N: Tensor | None) -> Iterator[list[Tensor]]:
    """Let the output head see only the wanted positions; yields a list that receives its input.

    A hook on the head rather than a second implementation of what follows the decoder: scaling
    and soft caps of the logits stay the model's own business.
    """
    own_head = model.get_output_embeddings()
    used: nn.Module = own_head if head is None else head
    captured: list[Tensor] = []

    def select(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_BSD = arguments[0]
        hidden_ND = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
        if wanted_N is not None:
            hidden_ND = hidden_ND.index_select(0, wanted_N)
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


@contextmanager
def _first_layers(model: Any, num_layers: int | None) -> Iterator[None]:
    """Let the decoder have only its first layers in this block."""
    if num_layers is None:
        yield
        return
    decoder = model.get_decoder()
    layers = decoder.layers
    decoder.layers = layers[:num_layers]
    try:
        yield
    finally:
        decoder.layers = layers


def _masks(cache: RaggedCache, plan: WritePlan, dtype: torch.dtype, is_ours: bool) -> Any:
    """The mask of each kind of layer: one value, or a dict where kinds are mixed."""
    group = 1
    if is_ours:
        heads = cache.config.num_attention_heads
        group = heads // (getattr(cache.config, "num_key_value_heads", None) or heads)
    kinds = dict.fromkeys(cache.layer_types)
    window = getattr(cache.config, "sliding_window", None)
    masks: dict[str, Tensor | None] = {}
    for kind in kinds:
        seen = window if kind == "sliding_attention" else None
        masks[kind] = None
        if not (is_ours and needs_no_mask(plan.start, plan.num_tokens, plan.length, window=seen)):
            masks[kind] = ragged_mask(
                plan.positions_BS, plan.length, window=seen, group=group, dtype=dtype
            )
    return masks if len(masks) > 1 else next(iter(masks.values()))
