"""Owns the chunked driver: a loss and its gradient without ever holding logits for all positions.

Refuses to know models, optimisers and how batches are made; it is given states, heads and counts.

N flat token positions, V vocabulary rows of the heads (or of the subset), D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.losses.base import HiddenLoss, LogitLoss
from distill.losses.head import Head
from distill.losses.knowledge import DraftColumns, FullKnowledge, TargetKnowledge

# Float32 elements of one [chunk, V] buffer: 4 MiB. Larger ones leave the cache of a CPU core and
# are handed back to the operating system between uses, which made the same arithmetic 3x slower.
_CHUNK_ELEMENTS = 2**20
_MAX_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class ChunkedLoss:
    """value: scalar for backward (weighted sum / normalizer). loss_N: per position, detached."""

    value: Tensor
    loss_N: Tensor


def default_chunk_tokens(num_rows: int) -> int:
    """Return how many positions of a head with `num_rows` rows one chunk takes."""
    return max(16, min(_MAX_CHUNK_TOKENS, _CHUNK_ELEMENTS // max(1, num_rows)))


def chunked_loss(
    loss: LogitLoss | HiddenLoss,
    draft_hidden_ND: Tensor,
    target: TargetKnowledge,
    *,
    draft_head: Head,
    columns: DraftColumns,
    normalizer: float,
    weight_N: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> ChunkedLoss:
    """Return sum_n weight_n loss_n / normalizer, differentiable in the draft's states and head.

    `normalizer` is the token count of the whole optimiser step over all its micro-batches and
    processes, so that values and gradients of any split add up to those of the whole.
    `weight_N` None counts every position; a position of weight 0 contributes nothing, whatever
    its loss. `columns` says which tokens the rows of `draft_head` are. Gradients with respect
    to the draft's states, and to its head where it is trained, are computed chunk by chunk during
    forward, so [N, V] never exists; backward only scales them.
    """
    assert draft_hidden_ND.shape[0] == len(target), "positions differ"
    assert normalizer > 0, "the normalizer is a token count"
    if isinstance(loss, HiddenLoss):
        assert isinstance(target, FullKnowledge), "refused before training"
        loss_N = loss.per_position(draft_hidden_ND, target.hidden_ND)
        weighted_N = loss_N if weight_N is None else _masked(loss_N, weight_N)
        return ChunkedLoss(weighted_N.sum() / normalizer, loss_N.detach())
    assert draft_head.num_rows == columns.num_columns, "heads have different rows"
    call = _Call(
        loss=loss,
        target=target,
        draft_head=draft_head,
        columns=columns,
        weight_N=weight_N,
        normalizer=normalizer,
        chunk_tokens=chunk_tokens or default_chunk_tokens(draft_head.num_rows),
    )
    # torch leaves Function.apply unannotated
    value, loss_N = _ChunkedLossFunction.apply(  # type: ignore[no-untyped-call]
        draft_hidden_ND, draft_head.weight_VD, draft_head.bias_V, call
    )
    return ChunkedLoss(value, loss_N)


def _masked(loss_N: Tensor, weight_N: Tensor) -> Tensor:
    return torch.where(weight_N != 0, loss_N, 0.0) * weight_N


@dataclass(frozen=True)
class _Call:
    loss: LogitLoss
    target: TargetKnowledge
    draft_head: Head
    columns: DraftColumns
    weight_N: Tensor | None
    normalizer: float
    chunk_tokens: int


class _ChunkedLossFunction(torch.autograd.Function):
    """Computes the gradients in forward: the logits of a chunk are alive only there."""

    @staticmethod
    def forward(
        ctx: Any,
        draft_hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_ND = torch.empty_like(draft_hidden_ND) if needs_hidden else None
        # float32 sums: thousands of chunk products added in bfloat16 would stop growing
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias_V = None
        if needs_bias and bias_V is not None:
            grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32)
        pieces: list[Tensor] = []
        for start in range(0, draft_hidden_ND.shape[0], call.chunk_tokens):
            chunk = slice(start, start + call.chunk_tokens)
            hidden_ND = draft_hidden_ND[chunk]
            linear_NV = call.draft_head.linear(hidden_ND)
            if not (needs_hidden or needs_weight or needs_bias):
                logits_NV = call.draft_head.finish(linear_NV)
                pieces.append(call.target.value(call.loss, logits_NV, chunk, call.columns))
                continue
            loss_N, grad_NV = _value_and_grad(call, linear_NV, chunk)
            pieces.append(loss_N)
            scale_N = torch.full_like(loss_N, 1.0 / call.normalizer)
            if call.weight_N is not None:
                scale_N = call.weight_N[chunk].to(loss_N.dtype) / call.normalizer
                grad_NV = grad_NV.masked_fill_((scale_N == 0).unsqueeze(-1), 0.0)
            # scaled after the product: 1 / normalizer would push small entries into rounding
            low_NV = grad_NV.to(weight_VD.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[chunk] = (low_NV @ weight_VD) * scale_N.unsqueeze(-1)
            if grad_weight_VD is not None:
                scaled_ND = (hidden_ND.float() * scale_N.unsqueeze(-1)).to(weight_VD.dtype)
                grad_weight_VD += low_NV.t() @ scaled_ND
            if grad_bias_V is not None:
                grad_bias_V += scale_N @ grad_NV
        loss_N = torch.cat(pieces) if pieces else draft_hidden_ND.new_zeros(0, dtype=torch.float32)
        weighted_N = loss_N if call.weight_N is None else _masked(loss_N, call.weight_N)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD, grad_bias_V)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(loss_N)
        return weighted_N.sum() / call.normalizer, loss_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        hidden_ND, weight_VD, bias_V = ctx.saved_tensors
        return (
            None if hidden_ND is None else hidden_ND * scale.to(hidden_ND.dtype),
            None if weight_VD is None else (weight_VD * scale).to(ctx.weight_dtype),
            None if bias_V is None else (bias_V * scale).to(ctx.weight_dtype),
            None,
        )


def _value_and_grad(call: _Call, linear_NV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return (loss_N, d loss / d linear_NV) through the head's scale and soft cap."""
    head = call.draft_head
    logits_NV = head.finish(linear_NV)
    loss_N, grad_NV = call.target.value_and_grad(call.loss, logits_NV, chunk, call.columns)
    if head.softcap is not None:
        # d (cap tanh(x / cap)) / dx = 1 - (logits / cap)^2
        grad_NV = grad_NV * (1.0 - (logits_NV.float() / head.softcap) ** 2)
    if head.scale != 1.0:
        grad_NV = grad_NV * head.scale
    return loss_N, grad_NV
