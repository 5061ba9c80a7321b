"""Owns the one entry point of initialization and building a model like the target.

Refuses to know where the draft's weights come from: each kind has its own file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from distill.models import LoadedModel, ModelShape, ResolvedModel, shape_of

if TYPE_CHECKING:
    from torch import Tensor

# Families whose norms multiply by their weights (Gemma's by 1 + weight), with nothing between the
# embedding, the layers and the head but the last norm, and with tensors of the same names.
PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

Samples = Sequence[Sequence[int]]
"""Token ids of the target's own answers, prompts included: what importance is measured on."""

# Settings of a transformers config that hold one entry per layer.
_PER_LAYER_SETTINGS = ("layer_types", "mlp_layer_types", "no_rope_layers")


@dataclass(frozen=True)
class Start:
    """An untrained draft and, JSON-able, what was decided on the way: layers kept, rows matched."""

    draft: LoadedModel
    report: Mapping[str, Any] = field(default_factory=dict)


class Initialization(Protocol):
    """What every kind's config can do: build the draft it describes."""

    @property
    def num_sample_tokens(self) -> int:
        """Tokens of the target's answers on which `build` measures something; 0: it does not."""
        ...

    def build(self, target: LoadedModel, *, seed: int, samples: Samples = ()) -> Start:
        """Return the untrained draft; the target is not changed."""
        ...


def start_draft(
    config: Initialization, target: LoadedModel, *, seed: int, samples: Samples = ()
) -> Start:
    """Return the untrained draft that `config` describes, in evaluation mode, and its report.

    It has the target's tokenizer and device and shares no storage with the target. Equal
    arguments give equal weights; the global random state is left as it was. `samples` are read
    where importance is measured only, see `Initialization.num_sample_tokens`.

    Raises:
        ConfigError: the settings do not fit the target (a layer it does not have, ...), importance
            is to be measured on no samples, or the target is quantised.
        PairMismatchError: an existing model that reads token ids differently from the target.
    """
    from distill.models.quantization import require_full_precision

    require_full_precision(target.model, "start a draft from")
    start = config.build(target, seed=seed, samples=samples)
    start.draft.model.eval()
    return start


def initialize(
    config: Initialization, target: LoadedModel, *, seed: int, samples: Samples = ()
) -> LoadedModel:
    """:func:`start_draft` without the report."""
    return start_draft(config, target, seed=seed, samples=samples).draft


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


def model_of_shape(target: LoadedModel, shape: ModelShape, *, seed: int) -> LoadedModel:
    """A randomly initialised model of the target's class and dtype in the shape given."""
    depth = target.model.config.num_hidden_layers
    layers = [index % depth for index in range(shape.num_hidden_layers)]
    changes = {**width_changes(target, shape), "tie_word_embeddings": shape.tie_word_embeddings}
    model = like_target(
        target, layers=layers, changes={**changes, "vocab_size": shape.vocab_size}, seed=seed
    )
    return as_draft(model, target, f"{shape.num_hidden_layers} random layers in the architecture")


def width_changes(target: LoadedModel, shape: ModelShape) -> dict[str, Any]:
    """What the copy of the target's config has to say for a model of `shape`'s width."""
    width, heads = shape.hidden_size, shape.num_attention_heads
    changes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.num_key_value_heads,
    }
    # families without the setting compute it; those with it would keep the target's
    is_derived = getattr(target.model.config, "head_dim", None) is None
    if shape.head_dim is not None or not is_derived:
        changes["head_dim"] = shape.head_dim or width // heads
    return changes


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


def load_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copy tensors into `model` by name; what is not named stays as it is."""
    state: dict[str, Tensor] = model.state_dict()
    state.update(weights)
    model.load_state_dict(state)
