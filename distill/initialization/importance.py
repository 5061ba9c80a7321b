"""Owns what parts of a target matter, measured by running it on some of its own answers.

Refuses to know which parts are kept.

L layers, N token positions, D hidden channels, F MLP channels, H heads, G key/value groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.initialization.base import Samples, layer_prefix
from distill.models import LoadedModel


@dataclass(frozen=True)
class WidthImportance:
    """Means over the sampled positions, float64, on the CPU.

    ``mlp_LF[l]``: mean |activation| of the layer's MLP channels (what its down projection reads).
    ``groups_LG[l]``: mean L2 norm of a head's output, summed over the heads of a key/value group.
    ``channels_LD[name]``: mean |output| of the norm layer of that name, by hidden channel.
    ``energies_LD[name]``: mean share of a position's energy, x^2 / sum x^2, at that norm layer's
    input, by hidden channel. Of shares, since a norm divides each position by its own energy: the
    few positions of massive activations (arXiv 2402.17762), thousands of times as large as the
    others, would be all there is in a mean of squares.
    """

    mlp_LF: list[Tensor]
    groups_LG: list[Tensor]
    channels_LD: Mapping[str, Tensor]
    energies_LD: Mapping[str, Tensor]


def block_influence(target: LoadedModel, samples: Samples) -> tuple[float, ...]:
    """How much each layer turns the residual stream: BI = 1 - mean cos(input, output).

    Men et al. 2024 (arXiv 2403.03853, Eq. 1). A layer that hardly turns what passes through it can
    be left out with the least harm.

    Raises:
        ConfigError: no samples.
    """
    layers = _layers(target.model)
    means = [_Mean() for _ in layers]

    def watch(index: int) -> Callable[[Any, Any, Any, Any], None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            similarity_BT = torch.cosine_similarity(before.float(), after.float(), dim=-1)
            means[index].add(1.0 - similarity_BT.reshape(-1, 1))

        return hook

    handles = [
        layer.register_forward_hook(watch(index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    _run(target, samples, handles)
    return tuple(mean.value.item() for mean in means)


def width_importance(target: LoadedModel, samples: Samples) -> WidthImportance:
    """Importance of channels and heads by their activations: Minitron (arXiv 2407.14679, sec. 2.2).

    Expects a Llama-like decoder (``self_attn.o_proj``, ``mlp.down_proj``, RMS norms).

    Raises:
        ConfigError: no samples.
    """
    layers, config = _layers(target.model), target.model.config
    num_heads, num_groups = config.num_attention_heads, config.num_key_value_heads
    mlp, groups = [_Mean() for _ in layers], [_Mean() for _ in layers]
    channels, energies = {}, {}
    handles = []

    def watch_mlp(mean: _Mean) -> Callable[[Any, Any], None]:
        return lambda module, args: mean.add(args[0].float().abs().flatten(0, -2))

    def watch_heads(mean: _Mean) -> Callable[[Any, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            heads_NHd = args[0].float().flatten(0, -2).unflatten(-1, (num_heads, -1))
            norms_NH = torch.linalg.vector_norm(heads_NHd, dim=-1)
            mean.add(norms_NH.unflatten(-1, (num_groups, -1)).sum(dim=-1))

        return hook

    def watch_norm(output_mean: _Mean, input_mean: _Mean) -> Callable[[Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            output_mean.add(output.float().abs().flatten(0, -2))
            energy_ND = args[0].float().square().flatten(0, -2)
            tiny = torch.finfo(energy_ND.dtype).tiny  # a position of zeros has no shares
            input_mean.add(energy_ND / energy_ND.sum(dim=-1, keepdim=True).clamp_min(tiny))

        return hook

    for index, layer in enumerate(layers):
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(watch_mlp(mlp[index])))
        heads = groups[index]
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(watch_heads(heads)))
    for name, module in norms_of(target.model):
        channels[name], energies[name] = _Mean(), _Mean()
        handles.append(module.register_forward_hook(watch_norm(channels[name], energies[name])))
    _run(target, samples, handles)
    return WidthImportance(
        mlp_LF=[mean.value for mean in mlp],
        groups_LG=[mean.value for mean in groups],
        channels_LD={name: mean.value for name, mean in channels.items()},
        energies_LD={name: mean.value for name, mean in energies.items()},
    )


def norms_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Name and module of every norm on the residual stream: two a layer, and the last one."""
    for name, module in model.named_modules():
        if name.endswith(("input_layernorm", "post_attention_layernorm")) or name == "model.norm":
            yield name, module


class _Mean:
    """A mean over positions, in float64, that is told a part of them at a time."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, values_NX: Tensor) -> None:
        total_X = values_NX.sum(dim=0, dtype=torch.float64).cpu()
        self._sum = total_X if self._sum is None else self._sum + total_X
        self._count += len(values_NX)

    @property
    def value(self) -> Tensor:
        assert self._sum is not None
        return self._sum / self._count


def _layers(model: Any) -> Any:
    return model.get_submodule(layer_prefix(model).removesuffix("."))


def _run(target: LoadedModel, samples: Samples, handles: list[Any]) -> None:
    """Run the target's layers over the samples, row by row, then take the hooks away."""
    with _removed(handles):
        if not any(samples):
            raise ConfigError(
                "importance is measured on answers of the target, and there are 0 of them here. "
                "Give samples, such as read_samples of a generate artifact; or name the layers in "
                "a list, and leave hidden_size, intermediate_size and num_attention_heads out"
            )
        limit = target.shape.max_position_embeddings
        with torch.inference_mode():
            for row in samples:
                ids_BT = torch.tensor([list(row[:limit])], device=target.device)
                target.model.base_model(input_ids=ids_BT, use_cache=False)


@contextmanager
def _removed(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
