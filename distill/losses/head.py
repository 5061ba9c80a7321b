"""Owns a language-model head as data: its weight rows and the fixed functions around the product.

Refuses to know models' classes beyond reading the head off one, and refuses to know losses.

V vocabulary rows (or a subset of them), D width, N flat token positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """logits_NV = softcap(scale * (hidden_ND @ weight_VD.T + bias_V)).

    scale and softcap are the fixed factors some families apply to logits (Cohere and Granite
    scale them, Gemma caps them as cap * tanh(x / cap)); 1.0 and None elsewhere.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def num_rows(self) -> int:
        """Vocabulary rows in this head."""
        return self.weight_VD.shape[0]

    @property
    def requires_grad(self) -> bool:
        """Whether the head is trained."""
        return self.weight_VD.requires_grad

    def subset(self, token_ids_V: Tensor | None) -> Head:
        """Return the head restricted to these rows (differentiable), or itself for None."""
        if token_ids_V is None:
            return self
        ids_V = token_ids_V.to(self.weight_VD.device)
        bias_V = None if self.bias_V is None else self.bias_V.index_select(0, ids_V)
        return replace(self, weight_VD=self.weight_VD.index_select(0, ids_V), bias_V=bias_V)

    def first(self, num_rows: int) -> Head:
        """Return a view of the first rows: a padded head without its padding."""
        if num_rows == self.num_rows:
            return self
        bias_V = None if self.bias_V is None else self.bias_V[:num_rows]
        return replace(self, weight_VD=self.weight_VD[:num_rows], bias_V=bias_V)

    def to(self, dtype: torch.dtype) -> Head:
        """Return the head in another dtype (differentiable): the dtype its product runs in."""
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return replace(self, weight_VD=self.weight_VD.to(dtype), bias_V=bias_V)

    def linear(self, hidden_ND: Tensor) -> Tensor:
        """Return hidden @ weight.T + bias in the weight's dtype: what `finish` is applied to."""
        return torch.nn.functional.linear(
            hidden_ND.to(self.weight_VD.dtype), self.weight_VD, self.bias_V
        )

    @property
    def is_linear(self) -> bool:
        """Whether `finish` is the identity."""
        return self.scale == 1.0 and self.softcap is None

    def finish(self, linear_NV: Tensor) -> Tensor:
        """Return the logits: scale, then soft cap."""
        if self.is_linear:
            return linear_NV
        logits_NV = linear_NV * self.scale
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return logits_NV in the weight's dtype."""
        return self.finish(self.linear(hidden_ND))


def head_of(model: Any) -> Head:
    """Read the head off a causal language model of transformers.

    The factors are the ones `distill.models.logits_from_hidden` applies: `logits_scaling` divides
    (Granite), `logit_scale` multiplies (Cohere), `final_logit_softcapping` caps (Gemma).
    """
    output = model.get_output_embeddings()
    config = model.config
    scale = 1.0
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scale /= float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        scale *= float(factor)
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(
        weight_VD=output.weight,
        bias_V=getattr(output, "bias", None),
        scale=scale,
        softcap=None if cap is None else float(cap),
    )
