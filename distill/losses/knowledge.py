"""Owns what may be known of the target at a position, and how a loss is taken from it.

Refuses to know files and models: `target_store/` reads and writes it, `training/` runs targets.

N flat token positions, V columns of the draft's head, W the target's vocabulary, K kept tokens,
M drawn tokens, S = K + 1 (the K and all others), D width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from torch import Tensor

from distill.losses.base import Knowledge, LogitLoss, scratch_log_probs
from distill.losses.head import Head


@dataclass(frozen=True)
class DraftColumns:
    """What the columns of the draft's logits are in the target's vocabulary.

    `target_head` has the same rows as the draft's head, in the same order. `token_ids_V` are their
    ids, ascending, where the draft proposes a subset; None: column v is token v.
    """

    target_head: Head
    token_ids_V: Tensor | None = None

    @property
    def num_columns(self) -> int:
        """V."""
        return self.target_head.num_rows

    def of(self, token_ids: Tensor) -> Tensor:
        """Return the columns (int64) of token ids; -1 for a token the draft cannot propose."""
        ids = token_ids.to(torch.int64)
        if self.token_ids_V is None:
            return torch.where(ids < self.num_columns, ids, -1)
        known_V = self.token_ids_V.to(ids.device)
        columns = torch.searchsorted(known_V, ids).clamp_max(self.num_columns - 1)
        return torch.where(known_V[columns] == ids, columns, -1)


class TargetKnowledge(Protocol):
    """What is known of the target at N positions. Methods take the positions of one chunk."""

    kind: ClassVar[Knowledge]

    def __len__(self) -> int:
        """N."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        ...

    def value(
        self, loss: LogitLoss, draft_logits_NV: Tensor, chunk: slice, columns: DraftColumns
    ) -> Tensor:
        """Return loss_N without gradient."""
        ...

    def value_and_grad(
        self, loss: LogitLoss, draft_logits_NV: Tensor, chunk: slice, columns: DraftColumns
    ) -> tuple[Tensor, Tensor]:
        """Return (loss_N, d loss_N / d draft_logits_NV); the gradient is the caller's to change."""
        ...


class _Tensors:
    """What the kinds share: as many rows as positions, moved together."""

    def __len__(self) -> int:
        return len(getattr(self, fields(cast(Any, self))[0].name))

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        moved = {
            name: tensor.to(device)
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor)
        }
        return cast(Self, replace(cast(Any, self), **moved))


@dataclass(frozen=True)
class FullKnowledge(_Tensors):
    """The target's final states; its head turns them into exact logits.

    `logsumexp_N` (float32), the log-sum-exp of the whole vocabulary's logits, is needed where the
    draft proposes a subset of it.
    """

    kind: ClassVar[Knowledge] = "full"
    hidden_ND: Tensor
    logsumexp_N: Tensor | None = None

    def logits(self, chunk: slice, columns: DraftColumns) -> tuple[Tensor, Tensor | None]:
        """Return (target_logits_NV, logsumexp_N or None where the columns are everything)."""
        logits_NV = columns.target_head.logits(self.hidden_ND[chunk])
        if columns.token_ids_V is None:
            return logits_NV, None
        assert self.logsumexp_N is not None, "on a subset the whole vocabulary's mass is needed"
        return logits_NV, self.logsumexp_N[chunk]

    def value(
        self, loss: LogitLoss, draft_logits_NV: Tensor, chunk: slice, columns: DraftColumns
    ) -> Tensor:
        """The loss of exact logits."""
        return loss.per_position(draft_logits_NV, *self.logits(chunk, columns))

    def value_and_grad(
        self, loss: LogitLoss, draft_logits_NV: Tensor, chunk: slice, columns: DraftColumns
    ) -> tuple[Tensor, Tensor]:
        """The loss of exact logits, and its gradient."""
        return loss.value_and_grad(draft_logits_NV, *self.logits(chunk, columns))


@dataclass(frozen=True)
class TopKnowledge(_Tensors):
    """The K most likely tokens of the target at temperature 1 and the mass of all the others.

    The others count as ONE more token, for target and draft alike: the loss is that of the two
    laws on S = K + 1 symbols. Lumping cannot raise a divergence (data processing), so forward_kl,
    reverse_kl, jsd and total_variation are bounded from below and alpha from above: by at most
    min(p, q) of the tail. What it misses is only how the tail is shared out, which stays as the
    draft has it. Renormalising on the K instead would teach the draft a tail of 0, and cap its
    acceptance at 1 - tail mass. On a vocabulary subset the tail is taken to lie inside it.
    """

    kind: ClassVar[Knowledge] = "top_k"
    token_ids_NK: Tensor
    log_probs_NK: Tensor
    tail_mass_N: Tensor

    def value(
        self, loss: LogitLoss, draft_logits_NV: Tensor, chunk: slice, columns: DraftColumns
    ) -> Tensor:
        """The loss on S symbols."""
        lumped = self._lumped(loss, draft_logits_NV, chunk, columns)
        return loss.per_position(lumped.draft_NS, lumped.target_NS, lumped.logsumexp_N)

    def value_and_grad(
        self, loss: LogitLoss, draft_logits_NV: Tensor, chunk: slice, columns: DraftColumns
    ) -> tuple[Tensor, Tensor]:
        """The loss on S symbols, and its gradient through the lumping.

        With u_k = log q_k and u_tail = log sum_tail q, a loss that adding a constant to u leaves
        alone has d / d z_j = g_j for one of the K and g_tail q_j / q_tail for one of the others.
        """
        lumped = self._lumped(loss, draft_logits_NV, chunk, columns)
        loss_N, grad_NS = loss.value_and_grad(lumped.draft_NS, lumped.target_NS, lumped.logsumexp_N)
        tail_N = lumped.rest_N
        share_N = torch.where(tail_N > 0, grad_NS[:, -1] / tail_N, 0.0)
        grad_NV = lumped.rest_NV.mul_(share_N.unsqueeze(-1))
        grad_NV[lumped.rows_M, lumped.columns_M] = grad_NS[lumped.rows_M, lumped.slots_M]
        return loss_N, grad_NV

    def _lumped(
        self, loss: LogitLoss, draft_logits_NV: Tensor, chunk: slice, columns: DraftColumns
    ) -> _Lumped:
        columns_NK = columns.of(self.token_ids_NK[chunk])
        inside_NK = columns_NK >= 0
        draft_NV = scratch_log_probs(draft_logits_NV)
        top_NK = draft_NV.gather(-1, columns_NK.clamp_min(0)).masked_fill_(~inside_NK, -torch.inf)
        rows_M, slots_M = inside_NK.nonzero(as_tuple=True)
        columns_M = columns_NK[rows_M, slots_M]
        rest_NV = draft_NV.exp_()
        rest_NV[rows_M, columns_M] = 0.0
        rest_N = rest_NV.sum(dim=-1)
        draft_NS = torch.cat([top_NK, rest_N.log().unsqueeze(-1)], dim=-1)
        target_NK = self.log_probs_NK[chunk].to(draft_NS.dtype)
        # a tail that was computed as 1 - sum may have been rounded below 0
        tail_N1 = self.tail_mass_N[chunk].to(draft_NS.dtype).unsqueeze(-1)
        # nor may a tail of exactly 0 leave a row without any symbol: its law would be 0 / 0
        tail_N1 = tail_N1.clamp_min(torch.finfo(draft_NS.dtype).tiny).log()
        if not loss.lumps_tail:
            # where none of the K can be proposed nothing else is known, and nothing is learnt
            tail_N1 = tail_N1.masked_fill(inside_NK.any(dim=-1, keepdim=True), -torch.inf)
        target_NS = torch.cat([target_NK.masked_fill(~inside_NK, -torch.inf), tail_N1], dim=-1)
        # log-probabilities are logits whose log-sum-exp is 0; losses that need the mass of tokens
        # the draft cannot propose take it from there
        is_whole = columns.token_ids_V is None
        logsumexp_N = None if is_whole else torch.zeros_like(target_NS[:, 0])
        return _Lumped(
            draft_NS, target_NS, logsumexp_N, rest_NV, rest_N, rows_M, slots_M, columns_M
        )


@dataclass(frozen=True)
class _Lumped:
    """Both laws on S symbols. M: a row and one of its K.

    rest_NV is q of the tail's tokens, rest_N the sum.
    """

    draft_NS: Tensor
    target_NS: Tensor
    logsumexp_N: Tensor | None
    rest_NV: Tensor
    rest_N: Tensor
    rows_M: Tensor
    slots_M: Tensor
    columns_M: Tensor


@dataclass(frozen=True)
class SampledKnowledge(_Tensors):
    """Tokens drawn from the target at temperature 1, each with its share of the draws.

    E[weight of v] = p_v, so q - weights is an unbiased estimate of forward_kl's gradient (random
    sampling KD, arXiv 2503.16870, section 4). With the target's entropy beside them the value is
    an unbiased estimate too; at one position it can be negative. Unused places have weight 0.

    On a vocabulary subset of target mass m the gradient estimates m (q - p / m), m times that of
    forward_kl there. The value is then the cross entropy -sum w log q, at least 0: the entropy kept
    is the whole vocabulary's, and how much of it lies on the subset is not known.
    """

    kind: ClassVar[Knowledge] = "sampled"
    token_ids_NM: Tensor
    weights_NM: Tensor
    entropy_N: Tensor

    def value(
        self, loss: LogitLoss, draft_logits_NV: Tensor, chunk: slice, columns: DraftColumns
    ) -> Tensor:
        """The estimate of forward_kl; on a subset, of the cross entropy."""
        columns_NM, weights_NM = self._drawn(loss, chunk, columns)
        entropy_N = self._entropy(chunk, columns)
        return _value(scratch_log_probs(draft_logits_NV), columns_NM, weights_NM, entropy_N)

    def value_and_grad(
        self, loss: LogitLoss, draft_logits_NV: Tensor, chunk: slice, columns: DraftColumns
    ) -> tuple[Tensor, Tensor]:
        """The estimates of forward_kl and of its gradient, (sum of the weights) q - weights."""
        columns_NM, weights_NM = self._drawn(loss, chunk, columns)
        draft_NV = scratch_log_probs(draft_logits_NV)
        loss_N = _value(draft_NV, columns_NM, weights_NM, self._entropy(chunk, columns))
        grad_NV = draft_NV.exp_().mul_(weights_NM.sum(dim=-1, keepdim=True))
        return loss_N, grad_NV.scatter_add_(-1, columns_NM, -weights_NM.to(grad_NV.dtype))

    def _drawn(self, loss: LogitLoss, chunk: slice, columns: DraftColumns) -> tuple[Tensor, Tensor]:
        assert loss.why_not(self.kind) is None, "refused before training"
        columns_NM = columns.of(self.token_ids_NM[chunk])
        weights_NM = self.weights_NM[chunk].masked_fill(columns_NM < 0, 0.0)
        return columns_NM.clamp_min(0), weights_NM

    def _entropy(self, chunk: slice, columns: DraftColumns) -> Tensor | None:
        return self.entropy_N[chunk] if columns.token_ids_V is None else None


def _value(
    draft_log_NV: Tensor, columns_NM: Tensor, weights_NM: Tensor, entropy_N: Tensor | None
) -> Tensor:
    cross_N = -(draft_log_NV.gather(-1, columns_NM) * weights_NM).sum(dim=-1)
    return cross_N if entropy_N is None else cross_N - entropy_N.to(cross_N.dtype)
