"""Owns cutting a Llama-like target narrower: which channels and heads stay, and slicing by them.

Refuses to know which layers stay and how importance is measured.

D hidden channels, F MLP channels, H heads of E dimensions, G key/value groups; KD, KF, KG: kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.initialization.base import PLAIN_FAMILIES
from distill.initialization.importance import WidthImportance, norms_of
from distill.models import LoadedModel, ModelShape

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class KeptWidth:
    """What stays, as ascending indices into the target: MLP channels and groups by layer."""

    channels_KD: Tensor
    mlp_KF: Mapping[int, Tensor]
    groups_KG: Mapping[int, Tensor]
    norm_gains: Mapping[str, float]

    @property
    def report(self) -> dict[str, float]:
        """The mean factor on the norms: near 1, what was left out carried its share of energy."""
        gains = self.norm_gains.values()
        return {"mean_norm_gain": sum(gains) / len(gains)} if gains else {}


def check_width(target: LoadedModel, after: ModelShape) -> None:
    """Refuse a target whose tensors this file does not know, and a shape its family does not allow.

    Raises:
        ConfigError: names the family and the known ones, or the two sizes that do not divide.
    """
    family = target.model.config.model_type
    if family not in PLAIN_FAMILIES:
        raise ConfigError(
            f"initialization: the width of a {family!r} model cannot be pruned, only that of "
            f"{', '.join(PLAIN_FAMILIES)}. Prune its layers only, or start a draft of that "
            "width from scratch (kind: scratch)"
        )
    # the others take the size of a head from their config, and this one checks the division too
    if family == "llama" and after.hidden_size % after.num_attention_heads:
        raise ConfigError(
            f"initialization: hidden_size {after.hidden_size} is not a multiple of "
            f"num_attention_heads {after.num_attention_heads}, which transformers wants of a "
            "Llama; change one of them"
        )


def choose_width(
    importance: WidthImportance, *, before: ModelShape, after: ModelShape, layers: Sequence[int]
) -> KeptWidth:
    """Keep the most important channels and groups, in the target's order.

    Hidden channels are the same in all layers (the residual stream joins them), ranked by the sum
    over the kept layers' norms and the last one. MLP channels and groups are each layer's own.

    A norm divides by the root mean square over all its channels. With fewer of them that is another
    number, so its weights are multiplied by

        gain = sqrt(D / KD * mean over positions of energy(kept) / energy(all)),

    energies measured at its input: what stays keeps its size on average, and channels that are
    zero can be left out without any change.
    """
    norms = {
        name: score_D
        for name, score_D in importance.channels_LD.items()
        if (layer := _layer_of(name)) is None or layer in layers
    }
    count = after.hidden_size
    channels_KD = _highest(torch.stack(list(norms.values())).sum(dim=0), count)
    gains = {}
    if count < before.hidden_size:
        for name in norms:
            energy_D = importance.energies_LD[name]
            share = (energy_D[channels_KD].sum() / energy_D.sum()).item()
            gains[name] = math.sqrt(before.hidden_size / count * share)
    return KeptWidth(
        channels_KD=channels_KD,
        mlp_KF={i: _highest(importance.mlp_LF[i], after.intermediate_size) for i in layers},
        groups_KG={i: _highest(importance.groups_LG[i], after.num_key_value_heads) for i in layers},
        norm_gains=gains,
    )


def slice_weights(target: LoadedModel, kept: KeptWidth) -> dict[str, Tensor]:
    """The target's tensors under its own names, with what is kept of them.

    Tensors of layers that are left out are left out. Whole tensors are not copied.
    """
    config = target.model.config
    heads_per_group = config.num_attention_heads // config.num_key_value_heads
    head_dim = target.shape.head_dim or config.hidden_size // config.num_attention_heads
    norms = {f"{name}.weight" for name, _ in norms_of(target.model)}
    sliced = {}
    for name, tensor in target.model.state_dict().items():
        layer = _layer_of(name)
        if layer is not None and layer not in kept.mlp_KF:
            continue
        if name in norms:
            gain = kept.norm_gains.get(name.removesuffix(".weight"), 1.0)
            part = tensor[kept.channels_KD.to(tensor.device)]
            # in double, and rounded once: a gain of 1 leaves every bit as it was
            sliced[name] = (part.double() * gain).to(tensor.dtype)
            continue
        rows, columns = None, None
        if layer is not None:
            groups_KG = kept.groups_KG[layer]
            rows, columns = _kept_of(
                name,
                hidden=kept.channels_KD,
                mlp=kept.mlp_KF[layer],
                queries=_blocks(groups_KG, heads_per_group * head_dim),
                keys=_blocks(groups_KG, head_dim),
            )
        elif tensor.dim() == 2:  # embedding and head: a row a token
            columns = kept.channels_KD
        sliced[name] = _taken(tensor, rows, columns)
    return sliced


def _kept_of(
    name: str, *, hidden: Tensor, mlp: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Output rows and input columns that stay of a layer's tensor; None: all of them."""
    module = name.split(".")[-2]
    kept_by_module: dict[str, tuple[Tensor, Tensor]] = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (mlp, hidden),
        "up_proj": (mlp, hidden),
        "down_proj": (hidden, mlp),
    }
    if module in ("q_norm", "k_norm"):  # one weight a dimension of a head, and heads stay whole
        return None, None
    return kept_by_module[module]


def _taken(tensor: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    if rows is not None and len(rows) < tensor.shape[0]:
        tensor = tensor[rows.to(tensor.device)]
    if columns is not None and tensor.dim() == 2 and len(columns) < tensor.shape[1]:
        tensor = tensor[:, columns.to(tensor.device)]
    return tensor


def _highest(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest scores, ascending; of equal ones the first."""
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    return order.sort().values


def _blocks(indices: Tensor, size: int) -> Tensor:
    """Indices of the elements of blocks of `size`."""
    return (indices.unsqueeze(1) * size + torch.arange(size)).flatten()


def _layer_of(name: str) -> int | None:
    found = _LAYER.search(name)
    return None if found is None else int(found.group(1))
