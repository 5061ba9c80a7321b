"""Owns a leaner pass through Llama-like decoders: the model's own modules, fewer operations.
Refuses to know rows' lengths and masks, and to touch any model whose layers it does not know.

Legend: B rows, S tokens per row, N positions whose logits are asked for, D model width, H heads
(Q of the queries, K of keys and values), W width of a head, V vocabulary.

A small decoder spends more time between its matrix products than in them: framework calls, and a
rotation for queries and another for keys. Here products that share an input are one product (where
their weights are packed), and everything else is what the model computes, in its order: float32
logits are equal to the model's own to the bit, which the tests check for every family known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.models.quantization import Int8Linear
from distill.runtime.attention import ragged_attention
from distill.runtime.packing import MAX_BYTES, FusedLinear
from distill.runtime.rotary import Places, RotaryTable

_FAMILIES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)


class LayerCache(Protocol):
    """What a pass needs of a cache: somewhere to put keys and values, and what kind each layer is.

    ``update`` stores [B, K, S, W] of one layer and returns all that may be looked at, [B, K, L, W].
    """

    layer_types: list[str]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Any, Any]: ...


@dataclass(frozen=True)
class _Layer:
    attention_norm: nn.Module
    queries_keys_values: FusedLinear
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    attention_out: FusedLinear
    mlp_norm: nn.Module
    gate_up: FusedLinear
    down: FusedLinear
    num_query_heads: int
    num_key_heads: int
    scaling: float

    @property
    def products(self) -> tuple[FusedLinear, ...]:
        return (self.queries_keys_values, self.attention_out, self.gate_up, self.down)


class LeanDecoder:
    """The decoder layers of one model, ready to be run without their own Python.

    Made by :func:`lean_decoder`, which knows for which models this is the same computation.
    """

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        self._layers = [_layer_of(layer) for layer in decoder.layers]
        self._embedding = decoder.embed_tokens
        self._rotary = RotaryTable(decoder.rotary_emb)
        self._final_norm = decoder.norm
        own_head = model.get_output_embeddings()
        self._own_head = FusedLinear([own_head])
        self.parts = _parts_of(model)
        self._products = [product for layer in self._layers for product in layer.products]
        self._products.append(self._own_head)
        if sum(product.num_bytes for product in self._products) > MAX_BYTES:
            for product in self._products:
                product.never_pack()
        self._hooks = [
            hooks
            for module in model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    @property
    def is_hooked(self) -> bool:
        """Whether somebody watches or steers the model's modules: then those must be called."""
        return any(self._hooks)

    def recheck(self) -> None:
        """Notice parameters that were changed behind autograd's back since they were packed."""
        for product in self._products:
            product.recheck()

    def run(
        self,
        tokens_BS: Tensor,
        places: Places,
        cache: LayerCache,
        masks: Tensor | Mapping[str, Tensor | None] | None,
        wanted_N: Tensor | None,
        *,
        head: FusedLinear | None,
        num_layers: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] and the final hidden states [N, D] they come from.

        Args:
            masks: as :func:`ragged_attention` takes them, one or one for each kind of layer.
            wanted_N: flat indices into [B * S]; None: all of them.
            head: an output head to use instead of the model's own.
            num_layers: run only so many layers before the final norm.
        """
        hidden_BSD = self._embedding.forward(tokens_BS)
        cos_BS1W, sin_BS1W = self._rotary.at(places, hidden_BSD)
        for index, layer in enumerate(self._layers[:num_layers]):
            mask = masks[cache.layer_types[index]] if isinstance(masks, Mapping) else masks
            attended_BSE = _attend(layer, index, hidden_BSD, cos_BS1W, sin_BS1W, cache, mask)
            hidden_BSD = layer.attention_out(attended_BSE).add_(hidden_BSD)
            gate, up = layer.gate_up.apart(layer.mlp_norm.forward(hidden_BSD))
            hidden_BSD = layer.down(F.silu(gate).mul_(up)).add_(hidden_BSD)
        hidden_ND = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
        if wanted_N is not None:
            hidden_ND = hidden_ND.index_select(0, wanted_N)
        hidden_ND = self._final_norm.forward(hidden_ND)
        return (self._own_head if head is None else head)(hidden_ND), hidden_ND


def _attend(
    layer: _Layer,
    index: int,
    hidden_BSD: Tensor,
    cos_BS1W: Tensor,
    sin_BS1W: Tensor,
    cache: LayerCache,
    mask: Tensor | None,
) -> Tensor:
    """One layer's attention up to its output product: [B, S, Q * W]."""
    batch, num_tokens, _ = hidden_BSD.shape
    width = cos_BS1W.shape[-1]
    num_queries, num_keys = layer.num_query_heads, layer.num_key_heads
    joined = layer.queries_keys_values(layer.attention_norm.forward(hidden_BSD))
    joined_BSHW = joined.view(batch, num_tokens, -1, width)
    rotated_BSHW = joined_BSHW[:, :, : num_queries + num_keys]
    if layer.query_norm is not None and layer.key_norm is not None:
        rotated_BSHW = torch.cat(
            (
                layer.query_norm.forward(rotated_BSHW[:, :, :num_queries]),
                layer.key_norm.forward(rotated_BSHW[:, :, num_queries:]),
            ),
            dim=2,
        )
    turned_BSHW = rotated_BSHW.roll(width // 2, dims=-1).mul_(sin_BS1W)
    rotated_BSHW = (rotated_BSHW * cos_BS1W).add_(turned_BSHW)
    keys, values = cache.update(
        rotated_BSHW[:, :, num_queries:].transpose(1, 2),
        joined_BSHW[:, :, num_queries + num_keys :].transpose(1, 2),
        index,
    )
    queries = rotated_BSHW[:, :, :num_queries].transpose(1, 2)
    attended = ragged_attention(queries, keys, values, mask, scaling=layer.scaling)
    return attended.reshape(batch, num_tokens, num_queries * width)


_LEAN: WeakKeyDictionary[nn.Module, LeanDecoder] = WeakKeyDictionary()


def lean_decoder(model: Any) -> LeanDecoder | None:
    """The lean pass of a model, made once; None where the model must run its own code."""
    if not _is_known(model):
        return None
    kept = _LEAN.get(model)
    if kept is None or kept.parts != _parts_of(model):
        kept = _LEAN[model] = LeanDecoder(model)
    kept.recheck()
    return kept


def _is_known(model: Any) -> bool:
    """Whether every module on the way is one whose computation is repeated here."""
    name = type(model).__name__
    if name not in _FAMILIES or not _is_stock(model, name):
        return False
    family = name.removesuffix("ForCausalLM")
    config, decoder = model.config, model.get_decoder()
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.hidden_act == "silu"
        and not getattr(config, "attn_logit_softcapping", None)
        and rope.get("partial_rotary_factor", 1.0) in (None, 1.0)
        and bool(getattr(model, "_supports_sdpa", False))
        and _is_stock(decoder, f"{family}Model")
        and _is_stock(decoder.rotary_emb, f"{family}RotaryEmbedding")
        and _is_stock(decoder.norm, f"{family}RMSNorm")
        and type(decoder.embed_tokens) is nn.Embedding
        and all(_is_stock_layer(layer, family) for layer in decoder.layers)
    )


def _is_stock_layer(layer: Any, family: str) -> bool:
    if not _is_stock(layer, f"{family}DecoderLayer"):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        _is_stock(attention, f"{family}Attention")
        and _is_stock(mlp, f"{family}MLP")
        and _is_stock(layer.input_layernorm, f"{family}RMSNorm")
        and _is_stock(layer.post_attention_layernorm, f"{family}RMSNorm")
        and all(type(module) in (nn.Linear, Int8Linear) for module in linears)
    )


def _is_stock(module: Any, name: str) -> bool:
    """Whether this is transformers' own class, with the forward of its class."""
    kind = type(module)
    is_own = kind.__name__ == name and kind.__module__.startswith("transformers.")
    return is_own and "forward" not in module.__dict__


def _parts_of(model: Any) -> list[Any]:
    """What the lean pass was made of, to notice a module that was replaced or changed its dtype."""
    modules = [id(module) for module in model.modules()]
    return [*modules, *((one.dtype, one.device) for one in model.parameters())]


def _layer_of(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        attention_norm=layer.input_layernorm,
        queries_keys_values=FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        attention_out=FusedLinear([attention.o_proj]),
        mlp_norm=layer.post_attention_layernorm,
        gate_up=FusedLinear([mlp.gate_proj, mlp.up_proj]),
        down=FusedLinear([mlp.down_proj]),
        num_query_heads=attention.config.num_attention_heads,
        num_key_heads=attention.config.num_key_value_heads,
        scaling=attention.scaling,
    )
