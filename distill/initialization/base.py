"""Owns the one entry point of initialization and building a model like the target.

Refuses to know where the draft's weights come from: each kind has its own file.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distill.models import LoadedModel, ResolvedModel, shape_of

if TYPE_CHECKING:
    from torch import Tensor

# Settings of a transformers config that hold one entry per layer.
_PER_LAYER_SETTINGS = ("layer_types", "mlp_layer_types", "no_rope_layers")


class Initialization(Protocol):
    """What every kind's config can do: build the draft it describes."""

    def build(self, target: LoadedModel, *, seed: int) -> LoadedModel:
        """Return the untrained draft; the target is not changed."""
        ...


def initialize(config: Initialization, target: LoadedModel, *, seed: int) -> LoadedModel:
    """Return the untrained draft that `config` describes, in evaluation mode.

    It has the target's tokenizer and device and shares no storage with the target. Equal
    arguments give equal weights; the global random state is left as it was.

    Raises:
        ConfigError: the settings do not fit the target (a layer it does not have, ...).
        PairMismatchError: an existing model that reads token ids differently from the target.
    """
    draft = config.build(target, seed=seed)
    draft.model.eval()
    return draft


def like_target(
    target: LoadedModel, *, layers: Sequence[int], changes: dict[str, Any], seed: int
) -> Any:
    """Return a freshly initialised model of the target's class with one layer for each of `layers`.

    `layers` are indices into the target's layers: settings with one entry per layer (attention
    kinds) are taken from there. `changes` are set on the copy of the target's config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = len(layers)
    for name in _PER_LAYER_SETTINGS:
        if (entries := getattr(config, name, None)) is not None:
            setattr(config, name, [entries[index] for index in layers])
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # not .to(dtype): that would also round the rotary frequencies, which stay float32
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return model.to(target.device).eval()


def as_draft(model: Any, target: LoadedModel, description: str) -> LoadedModel:
    """Wrap a model built from the target, with the target's tokenizer."""
    resolved = ResolvedModel(
        reference=f"{description} of {target.resolved.reference}",
        path=target.resolved.path,
        revision=target.resolved.revision,
    )
    return LoadedModel(model, target.tokenizer, resolved, shape_of(model.config))


def layer_prefix(model: Any) -> str:
    """Return the state-dict prefix of the decoder layers, such as "model.layers."."""
    from torch import nn

    depth = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return f"{name}."
    raise AssertionError(f"{type(model).__name__} has no list of {depth} layers")


def copy_weights(model: Any, target: LoadedModel, names: dict[str, str]) -> None:
    """Copy the target's tensors into `model`: {name in model: name in the target}."""
    source: dict[str, Tensor] = target.model.state_dict()
    state: dict[str, Tensor] = model.state_dict()
    state.update({name: source[origin] for name, origin in names.items()})
    model.load_state_dict(state)
