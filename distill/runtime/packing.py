"""Owns linear layers whose weights lie in the layout the CPU computes in, for one call at a time.
Refuses to change a model: its parameters stay, and outside a call it runs as it always did.

A bfloat16 product with a few rows, which is what decoding and verifying are, otherwise rearranges
the weights on every call. Packed once, one row costs about half and five rows cost no more than
one (measured on AVX-512 with bfloat16). The operators are those PyTorch's own compiler emits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Packing is a second copy of the weights, so it is left out where that would be felt.
_MAX_BYTES = 4 * 2**30


@dataclass
class _Layer:
    """One layer, with what it computes and the weight (address, version) that was packed."""

    module: nn.Linear
    forward: Callable[[Tensor], Tensor] | None = None
    address: int = 0
    version: int = -1


class PackedLinears:
    """Packed copies of a model's bfloat16 linear layers on the CPU, made at their first use.

    A weight that was changed or replaced since (training, another adapter) is packed again.
    """

    def __init__(self, model: nn.Module) -> None:
        linears = [module for module in model.modules() if _is_packable(module)]
        num_bytes = sum(module.weight.nbytes for module in linears)
        self._layers = [_Layer(m) for m in linears] if num_bytes <= _MAX_BYTES else []
        self._extra: _Layer | None = None

    def covers_the_layers_of(self, other: PackedLinears) -> bool:
        """Whether both are about the same layers: a model may have changed dtype or parts."""
        ours, theirs = self._layers, other._layers
        return [id(one.module) for one in ours] == [id(one.module) for one in theirs]

    @contextmanager
    def applied(self, extra: nn.Module | None = None) -> Iterator[None]:
        """Let the layers, and ``extra`` if it is one, compute with packed weights in this block."""
        layers = self._layers
        if extra is not None and layers and _is_packable(extra):
            if self._extra is None or self._extra.module is not extra:
                self._extra = _Layer(extra)
            layers = [*layers, self._extra]
        # Straight into the instance: nn.Module's attribute checks, hundreds of times per token,
        # would cost more than is won. A layer that has a forward of its own keeps it.
        replaced = [layer for layer in layers if "forward" not in layer.module.__dict__]
        try:
            for layer in replaced:
                weight = layer.module._parameters["weight"]
                assert weight is not None
                if layer.version != weight._version or layer.address != weight.data_ptr():
                    layer.forward = _packed_forward(weight, layer.module.bias)
                    layer.version, layer.address = weight._version, weight.data_ptr()
                layer.module.__dict__["forward"] = layer.forward
            yield
        finally:
            for layer in replaced:
                layer.module.__dict__.pop("forward", None)


_PACKED: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()


def packed_linears(model: nn.Module) -> PackedLinears:
    """The packed copies of a model: one set, however many caches and engines it serves.

    Gone with the model: the copies refer to its layers, and layers do not refer to their model.
    """
    fresh = PackedLinears(model)
    kept = _PACKED.get(model)
    if kept is None or not kept.covers_the_layers_of(fresh):
        kept = _PACKED[model] = fresh
    return kept


def _is_packable(module: object) -> TypeGuard[nn.Linear]:
    return (
        isinstance(module, nn.Linear)
        and type(module) is nn.Linear  # a subclass computes something else
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and not module.weight.is_inference()
        and (module.bias is None or module.bias.dtype == torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _packed_forward(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    multiply = torch.ops.mkldnn._linear_pointwise.default
    plain_bias = None if bias is None else bias.detach()

    def forward(hidden: Tensor) -> Tensor:
        if not hidden.numel():
            return F.linear(hidden, weight, bias)
        output: Tensor = multiply(hidden, packed, plain_bias, "none", [], "")
        return output

    return forward
