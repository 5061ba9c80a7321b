"""Owns carrying a table of token vectors over to a smaller width.

Refuses to know which table it is: embeddings and heads are both a row a token.

V rows, D the table's width, W the smaller one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Rows multiplied at a time in double precision: memory stays small beside the table.
_ROWS_AT_ONCE = 8192


def principal_directions(table_VD: Tensor, width: int) -> Tensor:
    """Return projection_DW: the `width` right singular vectors of the table with most energy.

    With table = U S R^T, projection = the first columns of R. Of all linear maps to that width
    and back, table -> table projection projection^T loses the least in the Frobenius norm (Eckart
    and Young 1936). They are eigenvectors of table^T table, D by D whatever V is, in float64; the
    sign of each is chosen so that its largest entry is positive.
    """
    width_before = table_VD.shape[1]
    gram_DD = torch.zeros(width_before, width_before, dtype=torch.float64, device=table_VD.device)
    for rows_ND in table_VD.split(_ROWS_AT_ONCE):
        rows_ND = rows_ND.double()
        gram_DD += rows_ND.T @ rows_ND
    vectors_DD = torch.linalg.eigh(gram_DD).eigenvectors  # ascending
    projection_DW = vectors_DD.flip(1)[:, :width]
    largest_W = projection_DW.abs().argmax(dim=0, keepdim=True)
    oriented_DW: Tensor = projection_DW * projection_DW.gather(0, largest_W).sign()
    return oriented_DW


def project(table_VD: Tensor, projection_DW: Tensor) -> tuple[Tensor, float]:
    """Return table @ projection in the table's dtype, and the share of the energy that is left."""
    parts = [
        (rows_ND.double() @ projection_DW).to(table_VD.dtype)
        for rows_ND in table_VD.split(_ROWS_AT_ONCE)
    ]
    projected_VW = torch.cat(parts)
    left, whole = _energy(projected_VW), _energy(table_VD)
    return projected_VW, left / whole if whole else 0.0


def _energy(table_VD: Tensor) -> float:
    return math.fsum(rows.double().square().sum().item() for rows in table_VD.split(_ROWS_AT_ONCE))
