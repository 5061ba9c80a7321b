"""Owns attention over ragged rows: the mask, and grouped heads without copying keys and values.
Refuses to know where keys and values are kept. Registers itself with transformers on first use.

Legend: B rows, S queries per row, L keys, H key/value heads, G query heads per key/value head,
D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NAME = "distill_ragged"
_MANY, _FEW = 24, 32  # rows times heads, and queries of each: where batched products win


@contextmanager
def attention_for(model: Any, config: Any) -> Iterator[bool]:
    """Switch the model to :func:`ragged_attention` for one call, where that is the same maths.

    Yields whether it was switched. Otherwise the model keeps its own attention: soft caps, sinks
    and the like are not reproduced here.
    """
    before = config._attn_implementation
    is_ours = (
        bool(getattr(model, "_supports_sdpa", False))
        and bool(getattr(model, "_supports_attention_backend", False))
        and getattr(config, "attn_logit_softcapping", None) is None
    )
    if is_ours:
        _register()
    config._attn_implementation = _NAME if is_ours else "eager"
    try:
        yield is_ours
    finally:
        config._attn_implementation = before


def needs_no_mask(
    common_start: int | None, num_tokens: int, length: int, *, window: int | None
) -> bool:
    """Whether :func:`ragged_attention` sees the right keys without being told.

    So do equally long rows: with one query each everything is visible, and a fresh prompt is
    causal.

    Args:
        common_start: the first position when all rows agree, else None.
        num_tokens, length, window: as for :func:`ragged_mask`.
    """
    is_inside = window is None or length <= window
    return is_inside and common_start is not None and (common_start == 0 or num_tokens == 1)


def ragged_mask(
    positions_BS: Tensor,
    length: int,
    *,
    window: int | None,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """Additive mask [B, 1, G * S, L]: 0 where a query may look, -inf where not.

    Args:
        positions_BS: position of each query in its row; key j of a row has position j.
        length: L, how many keys there are.
        window: keys at a distance of ``window`` or more are hidden; None: no window.
        group: G, query heads per key/value head; the mask repeats itself for each.
    """
    keys_L = torch.arange(length, device=positions_BS.device)
    queries_BS1 = positions_BS.unsqueeze(-1)
    is_hidden = keys_L > queries_BS1
    if window is not None:
        is_hidden |= keys_L <= queries_BS1 - window
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    mask.masked_fill_(is_hidden, -torch.inf)
    return mask.repeat(1, group, 1).unsqueeze(1)


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _for_transformers)


def _for_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    assert dropout == 0.0
    return ragged_attention(query, key, value, attention_mask, scaling), None


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
) -> Tensor:
    """Attention whose query heads share their key/value head without copying it.

    The G query heads of a key/value head become G times as many queries of that head, which on a
    CPU is several times faster than repeating keys and values, and than PyTorch's own
    ``enable_gqa``.

    Args:
        query: [B, H * G, S, D]; key, value: [B, H, L, D].
        attention_mask: additive [B, 1, G * S, L]; None for causal (S > 1) or full (S = 1).

    Returns:
        [B, S, H * G, D].
    """
    batch, num_heads, num_tokens, width = query.shape
    group = num_heads // key.shape[1]
    if attention_mask is None and num_tokens > 1:
        output = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, dim=1) if group > 1 else key,
            value.repeat_interleave(group, dim=1) if group > 1 else value,
            is_causal=True,
            scale=scaling,
        )
        return output.transpose(1, 2)
    if attention_mask is not None and attention_mask.shape[2] != group * num_tokens:
        attention_mask = attention_mask[:, :, :num_tokens].repeat(1, 1, group, 1)
    grouped = query.reshape(batch, key.shape[1], group * num_tokens, width)
    if _has_many_small_products(grouped):
        output = products_attention(grouped, key, value, attention_mask, scaling)
    else:
        output = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
    return output.reshape(batch, num_heads, num_tokens, -1).transpose(1, 2)


def _has_many_small_products(query: Tensor) -> bool:
    batch, heads, num_queries, _ = query.shape
    is_cpu_bfloat16 = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return is_cpu_bfloat16 and batch * heads >= _MANY and num_queries <= _FEW


def products_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention as two batched products with a float32 softmax between them.

    For a batch of decoding rows in bfloat16 on a CPU: the fused kernel there handles each row and
    head by itself, at a cost that exceeds the work (a third more time at 64 rows). Keys come first
    in the first product, so that the large operand is read as it lies.

    Args:
        query: [B, H, Q, D]; key, value: [B, H, L, D], rows and heads evenly spaced in memory;
        mask: additive [B, 1, Q, L] or None.
    """
    batch, heads, num_queries, width = query.shape
    queries = query.reshape(batch * heads, num_queries, width).transpose(1, 2)
    scores = torch.bmm(key.flatten(0, 1), queries).transpose(1, 2).float()
    scores.mul_(width**-0.5 if scaling is None else scaling)
    if mask is not None:
        scores.view(batch, heads, num_queries, -1).add_(mask)
    weights = scores.softmax(dim=-1).to(value.dtype)
    return torch.bmm(weights, value.flatten(0, 1)).view(batch, heads, num_queries, -1)
