"""Owns linear layers whose weights lie in the layout the CPU computes in, for one call at a time.
Refuses to change a model: its parameters stay, and outside a call it runs as it always did.

A bfloat16 product with a few rows, which is what decoding and verifying are, otherwise rearranges
the weights on every call. Packed once, one row costs about half and five rows cost no more than
one (measured on AVX-512 with bfloat16). The operators are those PyTorch's own compiler emits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Packing is a second copy of the weights, so it is left out where that would be felt.
MAX_BYTES = 4 * 2**30


@dataclass
class _Layer:
    """One layer, with what it computes, and the state of the parameters that was packed."""

    module: nn.Linear
    forward: Callable[[Tensor], Tensor] | None = None
    seen: tuple[tuple[int, int], ...] = ()
    checksums: tuple[int, ...] = ()

    def recheck(self) -> None:
        if self.forward is not None and self.checksums != _checksums([self.module]):
            self.forward = None


class PackedLinears:
    """Packed copies of a model's bfloat16 linear layers on the CPU, made at their first use.

    A parameter that was changed or replaced since (training) is packed again at the next call; a
    change behind autograd's back (``weight.data += ...``, as adapters merge) by :meth:`recheck`.
    """

    def __init__(self, model: nn.Module) -> None:
        linears = [module for module in model.modules() if _is_packable(module)]
        num_bytes = sum(module.weight.nbytes for module in linears)
        self._layers = [_Layer(m) for m in linears] if num_bytes <= MAX_BYTES else []
        self._extra: _Layer | None = None

    def covers_the_layers_of(self, other: PackedLinears) -> bool:
        """Whether both are about the same layers: a model may have changed dtype or parts."""
        ours, theirs = self._layers, other._layers
        return [id(one.module) for one in ours] == [id(one.module) for one in theirs]

    def recheck(self) -> None:
        """Forget copies whose parameters now have other contents: reads each once."""
        for layer in self._layers:
            layer.recheck()

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
                seen = _seen([layer.module])
                if layer.forward is None or layer.seen != seen:
                    layer.forward = _packed_forward(layer.module.weight, layer.module.bias)
                    layer.seen, layer.checksums = seen, _checksums([layer.module])
                layer.module.__dict__["forward"] = layer.forward
            yield
        finally:
            for layer in replaced:
                layer.module.__dict__.pop("forward", None)


class FusedLinear:
    """Linear layers that read the same input, as one product where their weights can be packed.

    Elsewhere each layer computes as it always did, and float32 results are the model's own to the
    bit. A parameter that was changed or replaced since the last call is packed again; for changes
    behind autograd's back see :meth:`recheck`.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._can_pack = all(_is_packable(module) for module in modules)
        self._packed: Callable[[Tensor], Tensor] | None = None
        self._seen: tuple[tuple[int, int], ...] = ()
        self._checksums: tuple[int, ...] = ()

    def recheck(self) -> None:
        """Forget the copy if the parameters now have other contents: reads each once."""
        if self._packed is not None and self._checksums != _checksums(self._modules):
            self._packed = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed copy, 0 if there is none to be made."""
        return sum(m.weight.nbytes for m in self._modules if _is_packable(m) and self._can_pack)

    def never_pack(self) -> None:
        """Keep to the layers' own weights from now on."""
        self._can_pack = False

    def __call__(self, hidden: Tensor) -> Tensor:
        """Multiply [..., D] to [..., sum of the layers' widths], one output beside the other."""
        if self._can_pack and hidden.numel():
            return self._packed_product(hidden)
        outputs = [module.forward(hidden) for module in self._modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def apart(self, hidden: Tensor) -> Sequence[Tensor]:
        """Each layer's output by itself; all of the same width."""
        if self._can_pack and hidden.numel():
            return self._packed_product(hidden).chunk(len(self._modules), dim=-1)
        return [module.forward(hidden) for module in self._modules]

    def _packed_product(self, hidden: Tensor) -> Tensor:
        seen = _seen(self._modules)
        if self._packed is None or seen != self._seen:
            self._packed, self._seen = self._pack(), seen
            self._checksums = _checksums(self._modules)
        return self._packed(hidden)

    def _pack(self) -> Callable[[Tensor], Tensor]:
        linears = [module for module in self._modules if isinstance(module, nn.Linear)]
        if len(linears) == 1:
            return _packed_forward(linears[0].weight, linears[0].bias)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat(
                [
                    weight.new_zeros(one.out_features) if one.bias is None else one.bias.detach()
                    for one in linears
                ]
            )
        return _packed_forward(weight, bias)


def _seen(modules: Sequence[nn.Module]) -> tuple[tuple[int, int], ...]:
    """What changes when a parameter is replaced, or changed where autograd can see it."""
    return tuple(
        [
            (parameter.data_ptr(), parameter._version)
            for module in modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
    )


def _checksums(modules: Sequence[nn.Module]) -> tuple[int, ...]:
    """A sum over the bits of each parameter: as fast as memory, and no change keeps it."""
    sums = []
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                bits = parameter.detach().reshape(-1).view(torch.int16)
                whole = bits.numel() // 4 * 4
                sums.append(int(bits[:whole].view(torch.int64).sum()) + int(bits[whole:].sum()))
    return tuple(sums)


_PACKED: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()


def packed_linears(model: nn.Module) -> PackedLinears:
    """The packed copies of a model: one set, however many caches and engines it serves.

    Gone with the model: the copies refer to its layers, and layers do not refer to their model.
    """
    fresh = PackedLinears(model)
    kept = _PACKED.get(model)
    if kept is None or not kept.covers_the_layers_of(fresh):
        kept = _PACKED[model] = fresh
    kept.recheck()
    return kept


def _is_packable(module: object) -> TypeGuard[nn.Linear]:
    return (
        isinstance(module, nn.Linear)
        and type(module) is nn.Linear  # a subclass computes something else
        and "forward" not in module.__dict__
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
