"""Owns int8 weights: linear layers that keep one signed byte a weight and one scale an output row.

Refuses to know which model is quantised and why: target, draft, or one drafting for the other.

M rows of a product, N output rows of a layer, D its input width.

A weight is scale * integer, integers in -127 .. 127, scale = max|row| / 127 (symmetric, no zero
point), so no weight moves by more than half a scale. Activations stay in the model's dtype:
deciding a token reads every weight once, and it is those bytes that cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.models.config import Quantize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LARGEST = 127
_DTYPES = (torch.bfloat16, torch.float32)
# Up to this many rows the kernel beats widening the weights first; a row's result does not depend
# on how many rows there are with it.
_MAX_KERNEL_ROWS = 16
# The kernel reads this many inputs at a time, also behind the end of a narrower layer.
_KERNEL_WIDTH = 32
# Output rows widened at a time: enough for a fast product, few enough to stay in the cache.
_ROWS_AT_ONCE = 4096


class Int8Linear(nn.Module):
    """``hidden @ (scale * integers).T + bias``, of the dtype of the scales.

    Args:
        integers_ND: int8.
        scale_N: bfloat16 or float32: the dtype the layer computes in.
        bias_N: None, or of that dtype.
    """

    integers_ND: Tensor
    scale_N: Tensor
    bias: Tensor | None

    def __init__(self, integers_ND: Tensor, scale_N: Tensor, bias_N: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = integers_ND.shape
        self.register_buffer("integers_ND", integers_ND)
        self.register_buffer("scale_N", scale_N)
        self.register_buffer("bias", bias_N)

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """Quantise a layer; it is left as it is.

        Raises:
            ConfigError: its dtype is neither bfloat16 nor float32, or a weight is not a number.
        """
        weight_ND = linear.weight.detach()
        if weight_ND.dtype not in _DTYPES:
            raise ConfigError(
                f"int8 weights compute in bfloat16 or float32, and this model is "
                f"{str(weight_ND.dtype).removeprefix('torch.')}; set `dtype: bfloat16`"
            )
        scale_N = (weight_ND.abs().amax(dim=1).float() / _LARGEST).to(weight_ND.dtype)
        if not scale_N.isfinite().all():
            raise ConfigError(
                "a weight of this model is infinite or not a number, which no scale can hold; "
                "fetch or save the model again"
            )
        # A row of zeros stays one under any scale, and so does one too small to have a scale.
        scale_N = torch.where(scale_N > 0, scale_N, torch.ones_like(scale_N))
        integers_ND = torch.empty_like(weight_ND, dtype=torch.int8)
        for rows in _row_slices(len(weight_ND)):  # float32 copies of a few rows at a time
            scaled_ND = weight_ND[rows].float() / scale_N[rows].float().unsqueeze(1)
            integers_ND[rows] = scaled_ND.round_().clamp_(-_LARGEST, _LARGEST)
        bias_N = None if linear.bias is None else linear.bias.detach().clone()
        return cls(integers_ND, scale_N, bias_N)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs and outputs."""
        return self.scale_N.dtype

    @property
    def weight(self) -> Tensor:
        """The weights this layer computes with, [N, D] in its dtype: a copy, made at each access.

        In bfloat16 ``scale * integer`` is rounded once more here than in the layer's own product.
        """
        return self.integers_ND.to(self.dtype).mul_(self.scale_N.unsqueeze(1))

    @property
    def num_bytes(self) -> int:
        """Bytes of the layer."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def rows(self, ids_U: Tensor) -> Int8Linear:
        """The layer with these output rows only, copied; each gives what it gives in the whole."""
        bias_U = None if self.bias is None else self.bias[ids_U]
        return Int8Linear(self.integers_ND[ids_U], self.scale_N[ids_U], bias_U)

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply [..., D] to [..., N]."""
        hidden_MD = hidden.reshape(-1, self.in_features)
        if self._has_kernel_for(hidden_MD):
            output_MN = torch._weight_int8pack_mm(
                hidden_MD.contiguous(), self.integers_ND, self.scale_N
            )
        else:
            output_MN = self._widened_product(hidden_MD)
        if self.bias is not None:
            output_MN = output_MN + self.bias
        return output_MN.view(*hidden.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What the layer is, for ``print(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.dtype}"

    def _has_kernel_for(self, hidden_MD: Tensor) -> bool:
        return (
            0 < hidden_MD.shape[0] <= _MAX_KERNEL_ROWS
            and self.in_features % _KERNEL_WIDTH == 0
            and hidden_MD.device.type == "cpu"
        )

    def _widened_product(self, hidden_MD: Tensor) -> Tensor:
        """The product by parts of the output, each with its weights widened first.

        The integers are exact in bfloat16; the scales come last, as in the kernel.
        """
        output_MN = hidden_MD.new_empty(hidden_MD.shape[0], self.out_features)
        for rows in _row_slices(self.out_features):
            output_MN[:, rows] = F.linear(hidden_MD, self.integers_ND[rows].to(self.dtype))
        return output_MN.mul_(self.scale_N)


def quantize_model(model: PreTrainedModel, quantize: Quantize) -> None:
    """Hold the weights of a model's linear layers as ``quantize`` says, in place; "none": as is.

    All plain linear layers change, the output head included; a head tied to the embedding gets
    weights of its own and the embedding stays. Subclasses of ``nn.Linear`` (adapters, other
    quantisations) compute something else and are left alone. Quantising again changes nothing.
    The model cannot be trained or saved afterwards.

    Raises:
        ConfigError: no such layer in the model, or its dtype is neither bfloat16 nor float32, or a
            weight is not a number.
    """
    if quantize == "none":
        return
    found = [(name, one) for name, one in model.named_modules() if type(one) is nn.Linear]
    if not found and not is_quantized(model):
        raise ConfigError(
            f"{type(model).__name__} has no plain linear layers, so `quantize: int8` would change "
            "nothing; write `quantize: none`"
        )
    while found:  # the list must not keep alive what has been replaced
        name, linear = found.pop()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Int8Linear.of(linear))
    model.requires_grad_(False)


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer has int8 weights."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def require_full_precision(model: nn.Module, purpose: str) -> None:
    """Refuse a quantised model where its weights themselves are needed ("train", "save").

    Raises:
        ConfigError: it has int8 weights.
    """
    if is_quantized(model):
        raise ConfigError(
            f"cannot {purpose} a model with int8 weights: what rounding took is not in them. "
            "Load it with `quantize: none`, and quantise when it is used"
        )


def _row_slices(num_rows: int) -> list[slice]:
    return [slice(start, start + _ROWS_AT_ONCE) for start in range(0, num_rows, _ROWS_AT_ONCE)]
